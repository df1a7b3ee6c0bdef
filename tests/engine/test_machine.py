"""Facts about the machine, and devices that it does not have."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from chairlift.config import DType, MachineFacts
from chairlift.engine import machine
from chairlift.engine.machine import choose_num_threads, inspect_machine
from chairlift.errors import ConfigurationError
from chairlift.models.cpu import load_library
from tests.support import flash_attn_reference


def test_a_cpu_has_float32_and_free_memory() -> None:
    facts = inspect_machine("cpu")
    assert facts.device == "cpu"
    assert not facts.is_gpu
    assert DType.FLOAT32 in facts.fast_dtypes
    assert facts.free_bytes > 2**20


def test_auto_is_the_gpu_if_there_is_one() -> None:
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert inspect_machine("auto").device == expected


@pytest.mark.parametrize("device", ["tpu", "mps", "meta", "", "cuda:x", "cuda:-1"])
def test_a_device_of_a_kind_that_is_not_supported_is_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigurationError, match=f"device '{device}' .*choose cpu or cuda:0"):
        inspect_machine(device)


@pytest.mark.parametrize("index", [99, 127])
def test_a_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are(index: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"cuda:{index}.* {torch.cuda.device_count()} CUDA devices"):
        inspect_machine(f"cuda:{index}")


@pytest.mark.parametrize("index", [128, 200, 256, 1000])
def test_a_gpu_number_that_torch_itself_cannot_hold_is_refused_too(index: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cuda:{index}"):
        inspect_machine(f"cuda:{index}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Makes the machine one with two GPUs of that compute capability, 80 of 140 GiB of each free."""

    def install(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * 2**30, 140 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    return install


def test_a_gpu_with_flash_attn(gpu: Callable[[tuple[int, int]], None]) -> None:
    gpu((9, 0))
    with flash_attn_reference.installed():
        assert inspect_machine("cuda:1") == MachineFacts("cuda:1", frozenset(DType), free_bytes=80 * 2**30)


def test_a_gpu_without_the_package(gpu: Callable[[tuple[int, int]], None]) -> None:
    gpu((9, 0))
    with flash_attn_reference.module("flash_attn", None), flash_attn_reference.module("flash_attn_interface", None):
        facts = inspect_machine("cuda:0")
    assert facts.flash_attn_obstacle == "the package flash-attn is not installed (pip install 'chairlift[flash]')"


def test_a_gpu_that_is_too_old_for_bfloat16_and_flash_attn(gpu: Callable[[tuple[int, int]], None]) -> None:
    gpu((7, 5))
    with flash_attn_reference.installed():
        facts = inspect_machine("cuda:0")
    assert facts.fast_dtypes == {DType.FLOAT32, DType.FLOAT16}
    assert facts.flash_attn_obstacle == "it needs compute capability 8.0, and this GPU has 7.5"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has not loaded the cpu backend's kernels, and cannot compile them; the cache, which is empty."""
    monkeypatch.setattr(machine, "load_library", load_library.__wrapped__)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path / "cache"


@pytest.mark.usefixtures("no_compiler")
def test_why_the_cpu_backend_cannot_be_had_is_a_fact() -> None:
    said = "there is no C++ compiler 'no-such-compiler'; install g++, or name one in $CXX"
    assert inspect_machine("cpu").cpu_kernels_obstacle == said


def test_kernels_that_nobody_wants_are_not_compiled(no_compiler: Path) -> None:
    assert inspect_machine("cpu", wants_cpu_kernels=False).cpu_kernels_obstacle == "it was not asked for"
    assert not no_compiler.exists()


@pytest.mark.parametrize(
    ("num_cores", "num_usable", "num_threads"), [(4, 8, 4), (4, 2, 2), (1, 2, 1), (64, 64, 64), (None, 3, 3)]
)
def test_as_many_threads_as_physical_cores_that_may_be_used(
    num_cores: int | None, num_usable: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(logical: bool) -> int | None:
        assert not logical
        return num_cores

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_usable)))
    assert choose_num_threads() == num_threads


def test_as_many_threads_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")  # the second is of nested regions
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # what an earlier engine set
    assert choose_num_threads() == 3
