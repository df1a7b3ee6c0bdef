"""Sizes that a file claims: none makes loading compute or allocate more than the file itself has."""

import json
import os
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.errors import CheckpointError
from chairlift.models import open_checkpoint
from chairlift.models.gguf import Kind as StoredKind
from chairlift.models.gguf import blocks, open_gguf, read_tensor
from chairlift.models.safetensors_header import read_places
from tests.models.support import edit, read_config, refusal, write_config
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Kind, finish, new_writer

LIMIT_S = 5.0  # of this thread's processor time
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 32}


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, **SHAPE)
    return tmp_path


def refused(path: Path) -> str:
    """Returns what loading says, soon."""
    begin = time.thread_time()
    said = refusal(path)
    assert time.thread_time() - begin < LIMIT_S
    return said


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Writes types, shapes and bytes as they are, whether or not they belong together."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + data)


def test_rows_without_elements_are_not_counted_through(valid: Path) -> None:
    write_config(valid, read_config(valid), tie_word_embeddings=True)
    empty = ("F32", [2**60, 0], b"")
    layer = ("F32", [32], bytes(128))
    tensors = {EMBEDDING: empty, HEAD: empty, "model.layers.0.input_layernorm.weight": layer}
    write_safetensors(valid / "model.safetensors", tensors)
    assert "the checkpoint lacks" in refused(valid)


def test_sizes_whose_product_no_tensor_has_are_refused(valid: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), 2**24)
    write_config(valid, read_config(valid), sizes, head_dim=2**16)
    assert refused(valid).startswith("the sizes in its config are too large together: ")
    assert open_checkpoint(str(valid)).config.vocab_size == 32


@pytest.mark.parametrize("sizes", [{"head_dim": 2**17}, {"head_dim": None, "hidden_size": 2**19}])
def test_a_head_that_is_too_large_is_refused_before_its_rope_is_computed(valid: Path, sizes: dict[str, Any]) -> None:
    path = write_config(valid, read_config(valid), sizes)
    said = "config.json: its heads have 131072 elements, and 65536 are the most"
    assert refusal(path, open_checkpoint) == f"{path}/{said}"


@pytest.mark.parametrize("counts", [[2**17], [1, 2, 2**30], 1e12])
def test_numbers_in_lists_and_with_a_point_are_bounded_too(valid: Path, counts: object) -> None:
    path = write_config(valid, read_config(valid), num_local_experts=counts)
    assert "num_local_experts must be at most 4096, not " in refusal(path, open_checkpoint)


@pytest.mark.parametrize("sizes", [{"num_local_experts": 4096}, {"intermediate_size": 2**24}])
def test_a_decoder_in_transformers_code_is_no_larger_than_its_weights(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """transformers names the tensors of experts anew, so their shapes are compared only after it has allocated them."""
    make_checkpoint(tmp_path, model_type="phimoe", pad_token_id=0, num_local_experts=2, **SHAPE)
    path = write_config(tmp_path, read_config(tmp_path), sizes)
    assert " parameters, and the weights have " in refusal(path, open_checkpoint)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_numbers_that_are_no_weights_are_refused(valid: Path, dtype: torch.dtype) -> None:
    edit(valid, {"model.norm.weight": torch.zeros(32).to(dtype)})
    held = str(dtype).removeprefix("torch.")
    said = f"tensor model.norm.weight holds {held}; weights must be bfloat16, float16 or float32"
    assert refusal(valid) == said


HALF = ("F32", [4, 2], bytes(32))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": ("F32", [4, 3], bytes(32))}, "tensor a of type F32 and shape [4, 3] cannot have bytes 0 to 32"),
        ({"a": ("F32", [2**62, 2**62, 4], bytes(32))}, "cannot have bytes 0 to 32"),
        ({"a": ("F32", [-4, -2], bytes(32))}, "tensor a has shape [-4, -2]"),
        ({"a": ("F32", [2**62] * 2**18, bytes(32))}, "tensor a has 262144 dimensions"),
        ({"a": ("F32", [4, 2.0], bytes(32))}, "tensor a has shape [4, 2.0]"),
        ({"a": ("C64", [4], bytes(32))}, "tensor a is of type 'C64', which cannot be read"),
        ({"a": (3, [4], bytes(32))}, "tensor a is of type 3, which cannot be read"),
    ],
)
def test_a_safetensors_header_at_odds_with_itself_is_refused(tmp_path: Path, tensors: Any, said: str) -> None:
    write_safetensors(tmp_path / "a.safetensors", tensors)
    assert said in refusal(tmp_path / "a.safetensors", lambda path: read_places(Path(path)))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "it has no header"),
        (bytes(7), "it has no header"),
        (struct.pack("<Q", 2**63) + b"{}", "its header would have 9223372036854775808 bytes, and the file has 10"),
        (struct.pack("<Q", 3) + b"{}", "its header would have 3 bytes, and the file has 10"),
        (struct.pack("<Q", 2) + b"[]", "its header is no object"),
        (struct.pack("<Q", 2) + b"{}1", "its tensors end at byte 10, and the file at 11"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "its header has a name twice"),
        (struct.pack("<Q", 8) + b'{"a":{}}', "tensor a has no data_offsets"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "is damaged or truncated: "),
    ],
)
def test_what_is_no_safetensors_header_is_one_line(tmp_path: Path, header: bytes, said: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(header)
    assert said in refusal(tmp_path / "a.safetensors", lambda path: read_places(Path(path)))


def test_tensors_of_safetensors_have_bytes_of_their_own_without_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": HALF, "b": HALF})
    assert [place.offset % 32 for place in read_places(path).values()] == [path.stat().st_size % 32] * 2
    whole = path.read_bytes()
    for old, new in ((b"[32, 64]", b"[ 0, 32]"), (b"[32, 64]", b"[33, 65]"), (b"[0, 32]", b"[0, 31]")):
        path.write_bytes(whole.replace(old, new))
        assert "cannot have bytes" in refusal(path, lambda path: read_places(Path(path)))


def test_a_tensor_stays_whole_when_its_file_becomes_shorter(valid: Path) -> None:
    reader = open_checkpoint(str(valid)).open_weights()
    tensor = reader.read(EMBEDDING)
    assert isinstance(tensor, torch.Tensor)
    before = tensor.sum()
    os.truncate(valid / "model.safetensors", 0)
    assert tensor.sum() == before
    with pytest.raises(CheckpointError, match="has become shorter while it was read; load it again"):
        reader.read(EMBEDDING)


def test_a_file_that_becomes_shorter_within_a_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of it would end the process."""
    path = tmp_path / "model.gguf"
    writer = new_writer(path, "llama")
    rows = np.zeros((9000, 34), np.uint8)  # of 32 numbers in Q8_0, too many to be read at once
    writer.add_tensor("output.weight", rows, raw_dtype=Kind.Q8_0)
    finish(writer)
    info = open_gguf(path).tensors["output.weight"]
    decode = blocks._BLOCKS[StoredKind.Q8_0].decode

    def cut_the_file(written: torch.Tensor) -> Any:
        os.truncate(path, info.offset + 100)
        return decode(written)

    monkeypatch.setitem(blocks._BLOCKS, StoredKind.Q8_0, replace(blocks._BLOCKS[StoredKind.Q8_0], decode=cut_the_file))
    with pytest.raises(CheckpointError, match="has become shorter while it was read; load it again"):
        read_tensor(info)


def test_tensors_of_a_gguf_file_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """As many as there are layers could name the same bytes, and a model of them be any size."""
    writer = new_writer(tmp_path / "model.gguf", "llama")
    for index in range(4):
        writer.add_tensor(f"blk.{index}.attn_q.weight", np.full((64, 64), index, np.float32))
    finish(writer)
    content = (tmp_path / "model.gguf").read_bytes()
    assert len(open_gguf(tmp_path / "model.gguf").tensors) == 4
    for index in range(4):
        place = content.index(f"blk.{index}.attn_q.weight".encode()) + 19 + 4 + 16 + 4
        content = content[:place] + bytes(8) + content[place + 8 :]
    (tmp_path / "model.gguf").write_bytes(content[: -2 * 64 * 64 * 4])
    assert refusal(tmp_path / "model.gguf").endswith("is no GGUF file that can be read: its tensors overlap")
