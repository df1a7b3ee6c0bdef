"""Names that a file gives its tensors and fields: in a refusal they are one short line, whatever they are."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from chairlift.errors import CheckpointError, named, shown
from tests.models.support import load, read_config, write_config
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Kind, write_model

SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
MOST = 400  # characters of a message, without the path
TEXT, UINT32, F32 = 8, 4, 0  # types in a GGUF file

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
ATTACKS = ("\n\x1b[2JERROR all is lost", "a" * 2**20, "\N{RIGHT-TO-LEFT OVERRIDE}\x00\x7f", "é" * 200, "{0}%s")


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside it the same as a GGUF file."""
    directory = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(directory, seed=1, **SHAPE)
    write_model(model, directory / "file" / "model.gguf", Kind.Q8_0)
    return directory


def assert_refused_sanely(path: Path, most: int = MOST) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value).replace(str(path), "")
    assert message.isprintable()
    assert len(message) < most


def text(name: str) -> bytes:
    return struct.pack("<Q", len(name.encode())) + name.encode()


def with_hostile_header(valid: Path, name: str, where: str) -> bytes:
    """A GGUF file with a name that is nobody's: of a sound tensor or field, or one of a type that there is not."""
    source = (valid / "file" / "model.gguf").read_bytes()
    num_tensors, num_fields = struct.unpack_from("<QQ", source, 8)
    start = source.index(text("token_embd.weight"))  # the first tensor's
    fields, tensors = source[24:start], source[start:]
    match where:
        case "tensor" | "tensor of no type":
            place = struct.pack("<I2QIQ", 2, 1, 1, F32 if where == "tensor" else 99, 0)
            num_tensors, tensors = num_tensors + 1, text(name) + place + tensors
        case "field":
            num_fields, fields = num_fields + 1, fields + text("llama." + name) + struct.pack("<2I", UINT32, 1)
        case "field of no type":
            num_fields, fields = num_fields + 1, fields + text(name) + struct.pack("<I", 99)
        case "architecture":
            key = text("general.architecture")
            assert fields.startswith(key)
            fields = key + struct.pack("<I", TEXT) + text(name) + fields[len(key) + 17 :]
    return source[:8] + struct.pack("<QQ", num_tensors, num_fields) + fields + tensors + bytes(64)


def with_attacks(test: Any) -> Any:
    """Any name, and each of those."""
    for attack in ATTACKS:
        test = example(name=attack)(test)
    return given(name=NAMES)(test)


@pytest.mark.parametrize("where", ["tensor", "tensor of no type", "field", "field of no type", "architecture"])
@with_attacks
def test_names_in_a_gguf_file(valid: Path, tmp_path_factory: pytest.TempPathFactory, where: str, name: str) -> None:
    path = tmp_path_factory.mktemp("hostile") / "model.gguf"
    path.write_bytes(with_hostile_header(valid, name, where))
    assert_refused_sanely(path)


@pytest.mark.parametrize("ending", ["", ".qweight"])
@with_attacks
def test_names_of_tensors_in_safetensors(
    valid: Path, tmp_path_factory: pytest.TempPathFactory, ending: str, name: str
) -> None:
    directory = tmp_path_factory.mktemp("hostile")
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    write_config(directory, read_config(valid), awq if ending else {})
    tensors = {**load_file(valid / "model.safetensors"), f"{name}{ending}": torch.zeros(2, 2, dtype=torch.int32)}
    save_file(tensors, directory / "model.safetensors")
    assert_refused_sanely(directory)


@pytest.mark.parametrize(
    "change",
    [
        lambda name: {"architectures": [name]},
        lambda name: {"hidden_act": name},
        lambda name: {"rope_parameters": {"rope_type": name, "rope_theta": 1e4}},
        lambda name: {"quantization_config": name},
        lambda name: {"quantization_config": {"quant_method": name}},
        lambda name: {"quantization_config": {"quant_method": "gptq", "bits": name}},
        lambda name: {"quantization_config": {"quant_method": "compressed-tensors", "format": name}},
    ],
)
@pytest.mark.parametrize("name", ATTACKS, ids=range(len(ATTACKS)))
def test_values_in_a_configuration(valid: Path, tmp_path: Path, change: Any, name: str) -> None:
    write_config(tmp_path, read_config(valid), change(name))
    assert_refused_sanely(tmp_path, most=1200)


def test_what_looks_like_a_name_stands_as_it_is() -> None:
    assert named("model.layers.0.mlp.down_proj.weight") == "model.layers.0.mlp.down_proj.weight"
    assert named("a b") == "'a b'"
    assert named(None) == "None"
    assert shown("x" * 70) == "'" + "x" * 59 + "..."
    assert str(CheckpointError("a\nb\x1b" + "c" * 2000 + "; choose another")).startswith("a b\\x1bccc")
    assert str(CheckpointError("c" * 2000 + "; choose another")).endswith("ccc; choose another")
