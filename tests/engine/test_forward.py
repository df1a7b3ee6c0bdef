"""Loading a model for a backend."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import AttentionBackend, DType, LoadFormat, Quantization
from chairlift.errors import CheckpointError
from chairlift.models import TorchForward, load_forward, load_model, open_checkpoint
from chairlift.models.cpu import CpuDecoder
from tests.engine.support import resolved_config
from tests.support import flash_attn_reference
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels import needs_kernels

SHAPE: dict[str, Any] = {"vocab_size": 261, "hidden_size": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, **SHAPE)
    return str(directory)


def test_a_slot_that_is_rounded_up_to_whole_pages_is_said(
    directory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.models")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with flash_attn_reference.installed():
        load_forward(
            open_checkpoint(directory),
            resolved_config(directory, max_seq_len=300, page_size=256, attention_backend=AttentionBackend.FLASH_ATTN),
        )
    assert [record.message for record in caplog.records if record.name == "chairlift.models"] == [
        "max_seq_len 300: slots have memory for 512 tokens, since flash_attn reads them in pages",
        "attention: FlashAttnBackend on cpu",
    ]


def test_dummy_weights_are_made_up_without_a_look_at_the_files(directory: str, tmp_path: Path) -> None:
    shutil.copy(Path(directory) / "config.json", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load_forward(checkpoint, resolved_config(tmp_path))
    forward = load_forward(checkpoint, resolved_config(tmp_path, load_format=LoadFormat.DUMMY))
    assert isinstance(forward, TorchForward)
    assert forward.logits(torch.ones(2, SHAPE["hidden_size"])).shape == (2, SHAPE["vocab_size"])


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quantization", [None, Quantization.INT4], ids=["bfloat16", "int4"])
def test_matrices_are_read_one_at_a_time_where_they_are_packed(
    tmp_path: Path, is_tied: bool, quantization: Quantization | None
) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=is_tied, hidden_size=64, num_attention_heads=2, head_dim=32)
    checkpoint = open_checkpoint(str(tmp_path))
    model = load_model(checkpoint, DType.BFLOAT16, "cpu", 64, reads_late=True)
    left = {name for name, _ in model.named_parameters() if not name.endswith("norm.weight")}
    assert left == (set() if is_tied else {"model.embed_tokens.weight"})
    whole = CpuDecoder(load_model(checkpoint, DType.BFLOAT16, "cpu", 64), 64, quantization=quantization)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(CpuDecoder(model, 64, quantization=quantization).logits(hidden), whole.logits(hidden))


@needs_kernels
def test_a_file_that_ends_early_is_refused_although_it_is_read_late(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, hidden_size=64, num_attention_heads=2, head_dim=32)
    path = tmp_path / "model.safetensors"
    checkpoint = open_checkpoint(str(tmp_path))
    model = load_model(checkpoint, DType.BFLOAT16, "cpu", 64, reads_late=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        CpuDecoder(model, 64)
