"""Facts about the machine, and devices that it does not have."""

import pytest
import torch

from chairlift.config import DType
from chairlift.engine.machine import inspect_machine
from chairlift.errors import ConfigurationError


def test_a_cpu_has_float32_and_free_memory_and_no_flash_attention() -> None:
    facts = inspect_machine("cpu")
    assert facts.device == "cpu"
    assert not facts.is_gpu
    assert not facts.has_flash_attn
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
