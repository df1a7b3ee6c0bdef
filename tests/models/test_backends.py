"""Tests what keeps a backend from running; which flash-attn is used where; what the references of its kernels
refuse.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import AttentionBackend, DType
from chairlift.errors import ConfigurationError
from chairlift.models import cpu, find_obstacle, load_backend
from chairlift.models.attention.flash import is_varlen_available
from chairlift.models.attention.flash_builds import Demands, find_flash_attn
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.attention.triton import TritonBackend
from chairlift.models.config import ModelConfig, ModelShape
from tests.models.cpu.support import BASE
from tests.support.flash_attn_reference import (
    VERSION_3,
    flash_attn_3_with_kvcache,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    installed,
    module,
)
from tests.support.kernels import needs_kernels
from tests.support.shapes import varied

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
CUDA = torch.device("cuda")
Arguments = dict[str, Any]
OnGpu = Callable[[tuple[int, int]], None]


PLAIN = Demands(head_dims=(64,), is_float16=False, has_windows=False, has_softcaps=False)


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (None, ["flash_attn", "flash_attn_interface", "flash_attn"]),
        ("flash_attn", [None, "flash_attn_interface", None]),
        ("flash_attn_interface", ["flash_attn", "flash_attn", "flash_attn"]),
    ],
)
def test_version_3_is_used_on_hopper_and_version_2_elsewhere(missing: str | None, names: list[str | None]) -> None:
    with installed(), module(missing, None) if missing else nullcontext():
        assert [find_flash_attn(capability, PLAIN) for capability in (AMPERE, HOPPER, BLACKWELL)] == names


LEFT_OUT = ("FP16", "LOCAL", "PAGEDKV", "HDIM256")


@pytest.fixture
def wheel() -> Iterator[None]:
    """Installs a wheel of version 3 that lacks some kernels, beside version 2."""
    flags = {f"FLASHATTENTION_DISABLE_{what}": what in LEFT_OUT for what in (*LEFT_OUT, "SOFTCAP", "HDIM192")}
    wheels = module("fa3_fwd_interface", VERSION_3), module("fa3_fwd_config", {"CONFIG": {"build_flags": flags}})
    with installed(), module("flash_attn_interface", None), wheels[0], wheels[1]:
        yield


@pytest.mark.parametrize(
    ("demands", "name"),
    [
        ({}, "fa3_fwd_interface"),
        ({"has_softcaps": True, "head_dims": (128, 192)}, "fa3_fwd_interface"),
        ({"is_float16": True}, "flash_attn"),
        ({"has_windows": True}, "flash_attn"),
        ({"head_dims": (64, 200)}, "flash_attn"),
    ],
)
@pytest.mark.usefixtures("wheel")
def test_a_build_is_used_only_for_what_it_has_kernels_for(demands: Arguments, name: str) -> None:
    assert find_flash_attn(HOPPER, replace(PLAIN, **demands)) == name


@pytest.mark.usefixtures("wheel")
def test_without_any_other_build_its_lack_is_an_obstacle(on_gpu: OnGpu) -> None:
    on_gpu(HOPPER)
    with module("flash_attn", None):
        assert find_obstacle(AttentionBackend.FLASH_ATTN, shape(64), DType.BFLOAT16, "cuda:0") is None
        assert find_obstacle(AttentionBackend.FLASH_ATTN, shape(64), DType.FLOAT16, "cuda:0") == (
            "fa3_fwd_interface was built without kernels for float16, and flash-attn 2 is not installed"
            " (pip install 'chairlift[flash]')"
        )


@pytest.mark.usefixtures("wheel")
def test_the_wheel_s_kernels_are_called_as_those_built_from_source(on_gpu: OnGpu) -> None:
    on_gpu(HOPPER)
    backend = load_backend(AttentionBackend.FLASH_ATTN, BASE, torch.bfloat16, CUDA)
    assert type(backend).__name__ == "FlashAttn3Backend"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Lets a GPU have that compute capability, and a compiler for it be there."""
    monkeypatch.setattr("chairlift.models.attention.triton.find_compile_obstacle", lambda _: None)
    return lambda capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


@pytest.mark.parametrize(("capability", "name"), [(AMPERE, "FlashAttnBackend"), (HOPPER, "FlashAttn3Backend")])
def test_the_backend_is_that_of_the_version(capability: tuple[int, int], name: str, on_gpu: OnGpu) -> None:
    on_gpu(capability)
    with installed():
        backend = load_backend(AttentionBackend.FLASH_ATTN, BASE, torch.bfloat16, CUDA)
    assert type(backend).__name__ == name


def test_a_package_that_cannot_be_imported_is_one_clear_line(on_gpu: OnGpu) -> None:
    on_gpu(AMPERE)
    with installed(), module("flash_attn", {}), pytest.raises(ConfigurationError) as caught:
        load_backend(AttentionBackend.FLASH_ATTN, BASE, torch.bfloat16, CUDA)
    message = str(caught.value)
    assert message.startswith("flash-attn cannot be imported (cannot import name")
    assert message.endswith(f"reinstall it for torch {torch.__version__}, or choose attention_backend torch")


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (264, torch.bfloat16), (60, torch.bfloat16)])
def test_torch_copies_slots_for_what_its_flash_kernels_do_not_take(head_dim: int, dtype: torch.dtype) -> None:
    assert not is_varlen_available([head_dim], dtype)
    assert isinstance(load_backend(AttentionBackend.TORCH, shape(head_dim), dtype, CUDA), TorchBackend)


def shape(head_dim: int) -> ModelConfig:
    return varied(BASE, head_dim=head_dim, scale=head_dim**-0.5)


@pytest.mark.parametrize(
    ("backend", "head_dim", "dtype", "device", "obstacle"),
    [
        (
            AttentionBackend.CPU,
            24,
            DType.FLOAT32,
            "cpu",
            "it needs a head_dim of at most 512 that is a multiple of 16, not 24",
        ),
        (
            AttentionBackend.CPU,
            528,
            DType.FLOAT32,
            "cpu",
            "it needs a head_dim of at most 512 that is a multiple of 16, not 528",
        ),
        (AttentionBackend.CPU, 64, DType.FLOAT16, "cpu", "it computes in float32 or bfloat16, not float16"),
        (AttentionBackend.CPU, 64, DType.FLOAT32, "cuda:1", "it runs on a CPU, and the device is cuda:1"),
        (AttentionBackend.FLASH_ATTN, 64, DType.BFLOAT16, "cpu", "it runs on a CUDA device, and the device is cpu"),
        (AttentionBackend.FLASH_ATTN, 64, DType.FLOAT32, "cuda:0", "it computes in bfloat16 or float16, not float32"),
        (
            AttentionBackend.FLASH_ATTN,
            60,
            DType.FLOAT16,
            "cuda:0",
            "it needs a head_dim of at most 256 that is a multiple of 8, not 60",
        ),
        (AttentionBackend.FLASH_ATTN, 64, DType.FLOAT16, "cuda:0", None),
        (AttentionBackend.TRITON, 64, DType.BFLOAT16, "cpu", "it runs on a CUDA device, and the device is cpu"),
        (
            AttentionBackend.TRITON,
            60,
            DType.FLOAT32,
            "cuda:0",
            "it needs a head_dim of at most 256 that is a multiple of 8, not 60",
        ),
        (AttentionBackend.TRITON, 80, DType.FLOAT32, "cuda:0", None),
        (AttentionBackend.TORCH, 24, DType.FLOAT16, "cpu", None),
    ],
)
def test_a_backend_says_what_keeps_it_from_running_a_model(
    backend: AttentionBackend, head_dim: int, dtype: DType, device: str, obstacle: str | None, on_gpu: OnGpu
) -> None:
    on_gpu(AMPERE)
    with installed():
        assert find_obstacle(backend, shape(head_dim), dtype, device) == obstacle


@needs_kernels
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_nothing_keeps_native_code_from_running_such_models(head_dim: int, dtype: DType) -> None:
    assert find_obstacle(AttentionBackend.CPU, shape(head_dim), dtype, "cpu") is None


def test_native_code_runs_in_one_process_and_no_model_in_transformers_own_code() -> None:
    said = "it computes in one process, and tensor_parallel_size is 2"
    assert find_obstacle(AttentionBackend.CPU, shape(64), DType.FLOAT32, "cpu", 2) == said
    described = {field.name: getattr(BASE, field.name) for field in fields(ModelShape)}
    adapted = ModelShape(**{**described, "architecture": "PhimoeForCausalLM"})
    said = "it runs the families that have a wiring of their own, and PhimoeForCausalLM has none"
    assert find_obstacle(AttentionBackend.CPU, adapted, DType.FLOAT32, "cpu") == said


def test_without_a_compiler_there_is_no_native_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.load_library.cache_clear()
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = "there is no C++ compiler 'no-such-compiler'; install g++ or clang, or name one in $CXX"
    assert find_obstacle(AttentionBackend.CPU, shape(64), DType.FLOAT32, "cpu") == said


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((9, 0), "the package flash-attn is not installed (pip install 'chairlift[flash]')"),
        ((7, 5), "it needs compute capability 8.0, and this GPU has 7.5"),
    ],
)
def test_a_gpu_that_is_too_old_or_without_the_package(capability: tuple[int, int], said: str, on_gpu: OnGpu) -> None:
    on_gpu(capability)
    with module("flash_attn", None), module("flash_attn_interface", None), module("fa3_fwd_interface", None):
        assert find_obstacle(AttentionBackend.FLASH_ATTN, shape(64), DType.BFLOAT16, "cuda:0") == said


def test_triton_needs_a_compiler(on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(AMPERE)
    missing = {torch.device("cuda:1"): "there is no gcc"}
    monkeypatch.setattr("chairlift.models.attention.triton.find_compile_obstacle", missing.get)
    said = [find_obstacle(AttentionBackend.TRITON, shape(64), DType.BFLOAT16, f"cuda:{i}") for i in (0, 1)]
    assert said == [None, "kernels cannot be compiled: there is no gcc"]


def test_triton_needs_its_package_and_a_gpu_that_is_not_too_old(on_gpu: OnGpu) -> None:
    on_gpu(AMPERE)
    with module("triton", None):
        said = "the package triton is not installed, which torch's builds for CUDA bring along"
        assert find_obstacle(AttentionBackend.TRITON, shape(64), DType.BFLOAT16, "cuda:0") == said
    on_gpu((7, 5))
    said = "it needs compute capability 8.0, and this GPU has 7.5"
    assert find_obstacle(AttentionBackend.TRITON, shape(64), DType.BFLOAT16, "cuda:0") == said


@pytest.mark.parametrize(
    ("dtype", "missing", "name"),
    [
        (torch.bfloat16, "flash_attn_interface", "FlashAttnBackend"),
        (torch.bfloat16, "flash_attn", "FlashAttn3Backend"),
        (torch.float32, "flash_attn", "NoneType"),
    ],
)
def test_triton_leaves_prompts_to_flash_attn_where_it_is_there(
    dtype: torch.dtype, missing: str, name: str, on_gpu: OnGpu
) -> None:
    on_gpu(HOPPER)
    with installed(), module(missing, None):
        backend = load_backend(AttentionBackend.TRITON, BASE, dtype, CUDA)
    assert isinstance(backend, TritonBackend)
    assert type(backend.prompts).__name__ == name


# The references, each with arguments that it takes, and with one of them spoiled


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


HOW = {"causal": True, "softmax_scale": 0.25, "softcap": 0.0, "window_size": (-1, -1)}


def decode_arguments() -> Arguments:
    new = {"q": random(2, 1, 4, 16), "k": random(2, 1, 2, 16), "v": random(2, 1, 2, 16)}
    caches = {"k_cache": random(3, 256, 2, 16), "v_cache": random(3, 256, 2, 16)}
    rows = {"cache_seqlens": int32(5, 255), "cache_batch_idx": int32(2, 0), "num_splits": 0}
    return {**new, **caches, **rows, **HOW}


def varlen_arguments() -> Arguments:
    tensors = {"q": random(5, 4, 16), "k": random(3, 256, 2, 16), "v": random(3, 256, 2, 16)}
    offsets = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 9, 12), "max_seqlen_q": 3, "max_seqlen_k": 9}
    return {**tensors, **offsets, "block_table": int32(2, 0).unsqueeze(1), **HOW}


def ragged_arguments() -> Arguments:
    new = {"q": random(5, 4, 16), "k": random(5, 2, 16), "v": random(5, 2, 16)}
    offsets = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k_new": int32(0, 2, 5), "max_seqlen_q": 3, "num_splits": 1}
    return {**decode_arguments(), **new, **offsets, "cache_seqlens": int32(5, 253)}


def transposed(*shape: int) -> torch.Tensor:
    """A tensor of that shape, with its last dimension not dense."""
    return random(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


KERNELS: dict[Callable[[], Arguments], Callable[..., torch.Tensor]] = {
    decode_arguments: flash_attn_with_kvcache,
    varlen_arguments: flash_attn_varlen_func,
    ragged_arguments: flash_attn_3_with_kvcache,
}
SPOILED: dict[Callable[[], Arguments], list[Arguments]] = {
    decode_arguments: [
        *({"q": q} for q in (random(2, 1, 4, 16, dtype=torch.float32), random(2, 1, 3, 16), transposed(2, 1, 4, 16))),
        {"k": random(2, 1, 2, 16, dtype=torch.float16)},
        {"v": random(2, 1, 1, 16)},
        {"k_cache": transposed(3, 256, 2, 16)},
        *({"cache_seqlens": lengths} for lengths in (torch.tensor([5, 255]), int32(5, 256), int32(5, -1), int32(5))),
        {"cache_seqlens": int32(5, 0, 6, 0)[::2]},
        *({"cache_batch_idx": slots} for slots in (int32(1, 1), int32(2, 3))),
    ],
    varlen_arguments: [
        {"k": random(3, 255, 2, 16), "v": random(3, 255, 2, 16)},
        *({"cu_seqlens_q": offsets} for offsets in (int32(0, 2, 4), int32(-1, 2, 5))),
        *({"cu_seqlens_k": offsets} for offsets in (torch.tensor([0, 9, 12]), int32(0, 9, 11))),
        {"cu_seqlens_k": int32(0, 300, 303), "max_seqlen_k": 300},
        *({"max_seqlen_q": 2}, {"max_seqlen_k": 8}),
        *({"block_table": pages} for pages in (torch.tensor([[2], [0]]), int32(2, 3)[:, None], int32(2)[:, None])),
    ],
    ragged_arguments: [
        {"cache_seqlens": int32(5, 254)},
        *({"cu_seqlens_k_new": int32(0, 2, 4)}, {"cu_seqlens_q": int32(0, 0, 5)}),
        *({"max_seqlen_q": 2}, {"max_seqlen_q": 257}),
        {"cache_batch_idx": int32(1, 1)},
    ],
}


@pytest.mark.parametrize("arguments", KERNELS)
def test_a_reference_refuses_what_its_kernel_cannot_be_given(arguments: Callable[[], Arguments]) -> None:
    assert KERNELS[arguments](**arguments()).isfinite().all()
    for spoiled in SPOILED[arguments]:
        with pytest.raises(AssertionError):
            KERNELS[arguments](**{**arguments(), **spoiled})
    with pytest.raises(TypeError, match="unexpected keyword argument 'alibi_slopes'"):
        KERNELS[arguments](**arguments(), alibi_slopes=None)


def test_the_causal_mask_is_aligned_to_the_last_key() -> None:
    arguments = varlen_arguments()
    output = flash_attn_varlen_func(**arguments)
    arguments["v"][2, 8] = 1000.0  # the first row's ninth key: only its second query, the last one, sees it
    changed = flash_attn_varlen_func(**arguments)
    assert torch.equal(changed[0], output[0])
    assert not torch.equal(changed[1], output[1])
