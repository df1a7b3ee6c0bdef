"""Loading a model for a backend."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import AttentionBackend, LoadFormat
from chairlift.errors import CheckpointError
from chairlift.models import TorchForward, load_forward, open_checkpoint
from tests.engine.support import resolved_config
from tests.support import flash_attn_reference
from tests.support.checkpoints import make_checkpoint

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
