"""Functions that are compiled for CUDA tensors, and only for those; on a GPU, that they compute the same."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chairlift.models import fusion, layers
from chairlift.models.fusion import fused
from tests.support.gpu import needs_gpu


class CudaTensor(torch.Tensor):
    """Says that it is on a CUDA device."""

    is_cuda = True


def on_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(CudaTensor)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled; the result of which is the function itself."""
    names: list[str] = []

    def compile_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(fusion, "_find_obstacle", lambda: None)
    return names


def test_on_a_cpu_nothing_is_compiled(compiled: list[str]) -> None:
    assert torch.equal(fused(double)(torch.ones(3)), torch.full((3,), 2.0))
    assert compiled == []


def test_for_cuda_tensors_a_function_is_compiled_once(compiled: list[str]) -> None:
    function = fused(double)
    assert compiled == []
    for _ in range(3):
        assert torch.equal(function(on_cuda(torch.ones(3))), on_cuda(torch.full((3,), 2.0)))
    assert compiled == ["double"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which compiling for CUDA fails")
def test_where_nothing_can_be_compiled_the_log_says_why_and_the_result_is_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    function = fused(double)
    for _ in range(2):
        assert torch.equal(function(on_cuda(torch.ones(3))), on_cuda(torch.full((3,), 2.0)))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("double runs operator by operator, which is slower: ")


def rope_arguments(num_tokens: int) -> tuple[torch.Tensor, ...]:
    heads = torch.randn(num_tokens, 12, 64)
    angles = torch.rand(num_tokens, 1, 64)
    return heads[:, :10], angles.cos(), angles.sin()


FUSED: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "_add_rms_norm": lambda n: (torch.randn(n, 256), torch.randn(n, 256), torch.rand(256), 1e-5),
    "_silu_mul": lambda n: (torch.randn(n, 512),),
    "apply_rope": rope_arguments,
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@needs_gpu
@torch.inference_mode()
def test_compiled_functions_compute_what_plain_ones_do(name: str, dtype: torch.dtype) -> None:
    function = getattr(layers, name)
    for num_tokens in (7, 1, 300):  # a first shape, a single row, any other
        arguments = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in FUSED[name](num_tokens)]
        on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.testing.assert_close(function(*on_gpu), function(*arguments), check_device=False, rtol=2e-2, atol=2e-2)
