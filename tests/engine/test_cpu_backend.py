"""Loading a model for a backend: when the cpu backend is chosen, what is said when it is not, and 8-bit weights."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.config import AttentionBackend, DType, LoadFormat, Quantization
from chairlift.engine.core import EngineCore
from chairlift.errors import CheckpointError, ConfigurationError, sized
from chairlift.models import TorchForward, load_forward, load_model, open_checkpoint
from chairlift.models.cpu import CpuDecoder, load_library
from chairlift.models.loader import count_parameters
from chairlift.models.precision import widths_for
from tests.engine.support import make_tiny_checkpoint, resolved_config
from tests.support import flash_attn_reference
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels import needs_kernels

SMALL: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_batch_size": 4, "max_seq_len": 192}
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
NO_COMPILER = "there is no C++ compiler 'no-such-compiler'; install g++ or clang, or name one in $CXX"
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
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load_library.cache_clear()
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    yield
    load_library.cache_clear()


@needs_kernels
@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_it_runs_on_a_cpu_without_a_word(backend: str, is_invariant: bool, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(attention_backend=backend, batch_invariant=is_invariant)
    assert core.config.attention_backend is AttentionBackend.CPU
    assert isinstance(core.executor.forward, CpuDecoder)
    assert warnings(caplog) == []


def assert_torch_runs(caplog: pytest.LogCaptureFixture, reason: str | None, *model: str, **config: Any) -> None:
    """A reason is a warning."""
    assert isinstance(make_core(*model, **config).executor.forward, TorchForward)
    said = [] if reason is None else [f"the attention backend is torch instead of cpu: {reason}"]
    assert warnings(caplog) == said
    caplog.clear()


def test_what_it_cannot_do_is_done_in_torch_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    narrow = make_tiny_checkpoint(tmp_path, head_dim=24)
    assert_torch_runs(caplog, None, attention_backend="torch")
    reason = "it needs a head_dim of at most 512 that is a multiple of 16, not 24"
    assert_torch_runs(caplog, reason, narrow, dtype="float32")
    with pytest.raises(ConfigurationError, match="does not work here: it needs a head_dim of at most 512"):
        make_core(narrow, quantization="int8")
    assert_torch_runs(caplog, "it computes in float32 or bfloat16, not float16", dtype="float16")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_runs_with_a_warning_and_the_rest_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert_torch_runs(caplog, NO_COMPILER)
    reason = "there is no C\\+\\+ compiler 'no-such-compiler'"
    with pytest.raises(ConfigurationError, match=f"^attention_backend cpu does not work here: {reason}"):
        make_core(attention_backend="cpu")
    with pytest.raises(ConfigurationError, match=f"^quantization needs attention_backend cpu, .*: {reason}"):
        make_core(quantization="int8")


def test_a_slot_that_is_rounded_up_to_whole_pages_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path)
    caplog.set_level(logging.INFO, logger="chairlift.models.backends")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    paged = {"max_seq_len": 300, "page_size": 256, "attention_backend": AttentionBackend.FLASH_ATTN}
    with flash_attn_reference.installed():
        load_forward(open_checkpoint(str(tmp_path)), resolved_config(tmp_path, **paged))
    assert [record.message for record in caplog.records if record.name == "chairlift.models.backends"] == [
        "max_seq_len 300: slots have memory for 512 tokens, since flash_attn reads them in pages",
        "attention: FlashAttnBackend on cpu",
    ]


def test_dummy_weights_are_made_up_without_a_look_at_the_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole", vocab_size=261, hidden_size=64)
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load_forward(checkpoint, resolved_config(tmp_path))
    forward = load_forward(checkpoint, resolved_config(tmp_path, load_format=LoadFormat.DUMMY))
    assert isinstance(forward, TorchForward)
    assert forward.logits(torch.ones(2, 64)).shape == (2, 261)


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quantization", [None, Quantization.INT4], ids=["bfloat16", "int4"])
def test_packed_matrices_are_read_one_by_one(tmp_path: Path, is_tied: bool, quantization: Quantization | None) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=is_tied, **HEADS)
    checkpoint = open_checkpoint(str(tmp_path))
    model = load_model(checkpoint, DType.BFLOAT16, "cpu", 64, reads_late=True)
    left = {name for name, _ in model.named_parameters() if not name.endswith("norm.weight")}
    assert left == (set() if is_tied else {"model.embed_tokens.weight"})
    widths = widths_for(quantization, num_parameters=1)
    whole = CpuDecoder(load_model(checkpoint, DType.BFLOAT16, "cpu", 64), 64, widths=widths)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(CpuDecoder(model, 64, widths=widths).logits(hidden), whole.logits(hidden))


def test_the_log_counts_what_is_read_late_beside_what_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.models.loader")
    make_checkpoint(tmp_path, tie_word_embeddings=True, **HEADS)
    checkpoint = open_checkpoint(str(tmp_path))
    num_norms = (2 * checkpoint.config.num_layers + 1) * 64
    num_others = count_parameters(checkpoint.config) - num_norms
    load_model(checkpoint, DType.BFLOAT16, "cpu", 64, reads_late=True)
    assert f": {sized(2 * num_norms)} of weights for bfloat16 in " in caplog.messages[-1]
    assert caplog.messages[-1].endswith(f" s; {sized(2 * num_others)} more are read when they are packed")


@needs_kernels
def test_a_file_that_ends_early_is_refused_although_it_is_read_late(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **HEADS)
    path = tmp_path / "model.safetensors"
    model = load_model(open_checkpoint(str(tmp_path)), DType.BFLOAT16, "cpu", 64, reads_late=True)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="has become shorter while it was read"):
        CpuDecoder(model, 64)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_8_bits_answer_as_the_others_do(dtype: str) -> None:
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM("bundled", dtype=dtype, quantization="int8", **SMALL) as llm:
        outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=60))
    for output, expected in zip(outputs, QUESTIONS.values(), strict=True):
        assert expected in output.outputs[0].text
