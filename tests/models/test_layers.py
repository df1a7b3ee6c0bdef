"""The parts that architectures are wired from: equal to transformers' of the same name, packed, compiled."""

import logging
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from chairlift import device
from chairlift.device import compiled_on_gpu
from chairlift.models import layers
from chairlift.models.blocks import StackedLinear
from chairlift.models.layers import Linear, RMSNorm, can_pack
from chairlift.models.rotary import apply_rope
from tests.support.gpu import needs_gpu


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_the_norm_of_a_sum_is_that_of_transformers(dtype: torch.dtype, eps: float) -> None:
    ours, theirs = RMSNorm(64, eps).to(dtype), LlamaRMSNorm(64, eps).to(dtype)
    ours.weight.data = theirs.weight.data = random(64, dtype=dtype)
    x, delta = 0.1 * random(5, 64, dtype=dtype), 0.2 * random(5, 64, dtype=dtype).flip(0)
    total, normalised = ours.add(x, delta)
    assert torch.equal(total, x + delta)
    assert normalised.dtype == dtype
    torch.testing.assert_close(normalised, theirs(x + delta))
    assert torch.equal(ours(total), normalised)


def test_the_norm_of_large_numbers_does_not_overflow_in_sixteen_bits() -> None:
    norm = RMSNorm(64, 1e-6).to(torch.float16)
    norm.weight.data.fill_(1.0)
    x = torch.full((1, 64), 6e4, dtype=torch.float16)  # its square is far beyond float16's 65504
    torch.testing.assert_close(norm(x), torch.ones_like(x))


# Packed weights


def test_bfloat16_is_packed_on_x86_wherever_onednn_takes_it_and_float32_never() -> None:
    is_packed = platform.machine() in ("x86_64", "AMD64")
    try:
        Linear(48, 80, bias=False, dtype=torch.bfloat16).pack()
    except (AttributeError, RuntimeError):  # without oneDNN, and with AVX2 alone
        is_packed = False
    assert can_pack(torch.empty(1, dtype=torch.bfloat16)) is is_packed
    assert not can_pack(torch.empty(1))


@pytest.mark.skipif(
    not can_pack(torch.empty(1, dtype=torch.bfloat16)), reason="oneDNN has no products in bfloat16 here"
)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_weight_takes_the_place_of_the_plain_one_and_gives_the_same_product(num_rows: int, bias: bool) -> None:
    torch.manual_seed(num_rows)
    layer = Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    for parameter in layer.parameters():  # which a model loads
        parameter.normal_(std=0.1)
    x = torch.randn(num_rows, 48, dtype=torch.bfloat16)
    exact = F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
    layer.pack()
    torch.testing.assert_close(layer(x).float(), exact, atol=2e-2, rtol=2e-2)
    assert [name for name, _ in layer.named_parameters() if name == "weight"] == []  # the plain one is let go of


# Compiled functions


class CudaTensor(torch.Tensor):
    """Says that it is on the second CUDA device."""

    is_cuda = True
    device = torch.device("cuda:1")


def on_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(CudaTensor)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled, which has been tried out on the tensors' device; nothing changes by it."""
    names: list[str] = []

    def compile_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(device, "find_compile_obstacle", {torch.device("cuda:1"): None}.__getitem__)
    return names


def test_for_cuda_tensors_a_function_is_compiled_once_and_on_a_cpu_never(compiled: list[str]) -> None:
    function = compiled_on_gpu(double)
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    assert compiled == []
    for _ in range(3):
        assert torch.equal(function(on_cuda(torch.ones(3))), on_cuda(torch.full((3,), 2.0)))
    assert compiled == ["double"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which compiling for CUDA fails")
def test_where_nothing_can_be_compiled_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    function = compiled_on_gpu(double)
    for _ in range(2):
        assert torch.equal(function(on_cuda(torch.ones(3))), on_cuda(torch.full((3,), 2.0)))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("double runs operator by operator, which is slower: ")


def rope_arguments(num_tokens: int) -> tuple[torch.Tensor, ...]:
    heads = torch.randn(num_tokens, 12, 64)
    angles = torch.rand(num_tokens, 1, 64)
    return heads[:, :10], angles.cos(), angles.sin()


COMPILED: dict[Callable[..., Any], Callable[[int], tuple[Any, ...]]] = {
    layers._add_rms_norm: lambda n: (torch.randn(n, 256), torch.randn(n, 256), torch.rand(256), 1e-5, False),
    layers.silu_mul: lambda n: (torch.randn(n, 512),),
    apply_rope: rope_arguments,
}


@pytest.mark.parametrize("function", COMPILED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@needs_gpu
@torch.inference_mode()
def test_compiled_functions_compute_what_plain_ones_do(function: Callable[..., Any], dtype: torch.dtype) -> None:
    assert device.find_compile_obstacle(torch.device("cuda:0")) is None
    for num_tokens in (7, 1, 300):  # a first shape, a single row, any other
        arguments = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in COMPILED[function](num_tokens)]
        on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.testing.assert_close(function(*on_gpu), function(*arguments), check_device=False, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("has_bias", [False, True])
def test_one_call_for_all_experts_computes_what_a_call_for_each_does(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stacked = StackedLinear(5, 16, 24, bias=has_bias).to(torch.bfloat16).requires_grad_(False)
    for parameter in stacked.parameters():
        parameter.normal_(std=0.2, generator=generator)
    x, counts = torch.randn(11, 16, generator=generator).bfloat16(), [4, 0, 1, 6, 0]
    experts = torch.arange(5).repeat_interleave(torch.tensor(counts))
    ours = stacked.forward_grouped(x, torch.tensor(counts).cumsum(0).int(), experts)
    torch.testing.assert_close(ours, stacked.forward_each(x, counts), rtol=0.02, atol=0.02)
