"""The engine on the cpu backend: when it is chosen, what is said when it is not, and 8-bit weights."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.config import AttentionBackend
from chairlift.engine.core import EngineCore
from chairlift.errors import ConfigurationError
from chairlift.models import TorchForward, cpu
from chairlift.models.cpu import CpuDecoder, load_library
from tests.support.kernels import needs_kernels

SMALL: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_batch_size": 4, "max_seq_len": 192}
SLOWER = "the attention backend is torch instead of cpu: "
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
QUESTIONS = {
    "What is 17 + 25?": "42",
    "What is the opposite of hot?": "cold",
    "Extract the name and age as JSON: Maria is 34 years old and lives in Oslo.": '{"name": "Maria", "age": 34}',
    "Give me the product and price as JSON. The red lamp costs 25 euros.": '{"product": "lamp", "price": 25}',
}


def make_core(model: str = "bundled", **config: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=model, **{**SMALL, **config}))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load_library", load_library.__wrapped__)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")


@needs_kernels
@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_it_runs_on_a_cpu_without_a_word(backend: str, is_invariant: bool, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(attention_backend=backend, batch_invariant=is_invariant)
    assert core.config.attention_backend is AttentionBackend.CPU
    assert isinstance(core._runner._forward, CpuDecoder)
    assert warnings(caplog) == []


def test_torch_asked_for_by_name_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(attention_backend="torch")
    assert isinstance(core._runner._forward, TorchForward)
    assert warnings(caplog) == []


def test_what_it_cannot_do_is_done_in_torch_with_a_warning(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(tiny, dtype="float32")
    assert isinstance(core._runner._forward, TorchForward)
    assert warnings(caplog) == [f"{SLOWER}it takes a head_dim up to 256 that 32 divides, not 16"]


def test_float16_is_done_in_torch_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(make_core(dtype="float16")._runner._forward, TorchForward)
    assert warnings(caplog) == [f"{SLOWER}it computes in float32 or bfloat16, not float16"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_runs_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(make_core()._runner._forward, TorchForward)
    assert warnings(caplog) == [
        f"{SLOWER}there is no C++ compiler 'no-such-compiler'; install g++ or clang, or name one in $CXX"
    ]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_what_needs_one_is_refused_with_the_reason() -> None:
    reason = "there is no C\\+\\+ compiler 'no-such-compiler'"
    with pytest.raises(ConfigurationError, match=f"^attention_backend cpu does not work here: {reason}"):
        make_core(attention_backend="cpu")
    with pytest.raises(ConfigurationError, match=f"^quantization needs attention_backend cpu, .*: {reason}"):
        make_core(quantization="int8")


def test_quantization_of_a_model_that_it_cannot_run_is_refused_with_the_reason(tiny: str) -> None:
    with pytest.raises(ConfigurationError, match="does not work here: it takes a head_dim up to 256"):
        make_core(tiny, quantization="int8")


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_8_bits_answer_as_the_others_do(dtype: str) -> None:
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for quantization in (None, "int8"):
        with LLM("bundled", dtype=dtype, quantization=quantization, **SMALL) as llm:
            answers = [output.outputs[0].text for output in llm.chat(messages, GREEDY)]
        for answer, expected in zip(answers, QUESTIONS.values(), strict=True):
            assert expected in answer


@needs_kernels
def test_weights_in_8_bits_take_a_quarter_of_the_memory_and_score_tokens_nearly_as_the_others_do() -> None:
    cores = [make_core(dtype="float32", quantization=quantization) for quantization in (None, "int8")]
    plain, quantized = (core._runner._forward for core in cores)
    assert isinstance(plain, CpuDecoder)
    assert isinstance(quantized, CpuDecoder)
    assert quantized.weight_bytes < 0.3 * plain.weight_bytes
    hidden = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    expected = plain.logits(hidden)
    assert (quantized.logits(hidden) - expected).norm() < 0.02 * expected.norm()
