"""Infinite floats in files of settings mean what transformers, which writes them, reads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from chairlift.engine.text.defaults import CheckpointDefaults
from chairlift.errors import CheckpointError
from chairlift.models import open_checkpoint
from chairlift.models.special_floats import restore_floats
from tests.models.support import read_config, write_config
from tests.support.checkpoints import SMALL, make_checkpoint

INFINITE, NEGATIVE = {"__float__": "Infinity"}, {"__float__": "-Infinity"}


def test_a_config_with_an_infinite_float_is_read(tmp_path: Path) -> None:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], rms_norm_eps=math.inf).save_pretrained(tmp_path)
    assert read_config(tmp_path)["rms_norm_eps"] == INFINITE  # or else this would show nothing
    assert open_checkpoint(str(tmp_path)).config.num_layers == 3


def test_a_decoder_in_transformers_code_is_read_as_well(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    write_config(tmp_path, read_config(tmp_path), layer_norm_eps=INFINITE)
    assert open_checkpoint(str(tmp_path)).config.architecture == "Cohere2ForCausalLM"


@pytest.mark.parametrize(
    "written",
    [
        {"limit": [0.0, INFINITE], "deep": {"er": [{"low": NEGATIVE}]}},
        {"text": {"__float__": "Huge"}, "number": {"__float__": 1.0}, "more": {"__float__": "NaN", "other": 1}},
    ],
)
def test_each_is_restored_where_transformers_restores_it(tmp_path: Path, written: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert restore_floats(written) == PreTrainedConfig._dict_from_json_file(tmp_path / "config.json")


def test_not_a_number_is_restored() -> None:
    assert math.isnan(restore_floats([{"__float__": "NaN"}])[0])


def test_generation_settings_are_read_likewise(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "temperature": INFINITE}))
    with pytest.raises(CheckpointError, match=r"temperature: .* finite .*not inf$"):
        CheckpointDefaults.read("model", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "length_penalty": NEGATIVE}))
    assert CheckpointDefaults.read("model", tmp_path).params.top_p == 0.5
