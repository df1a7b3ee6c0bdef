"""GGUF files: blocks become the numbers that the package gguf reads, and what is wrong with a file is one line."""

import contextlib
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import DType, EngineConfig
from chairlift.engine.execution.resolver import MachineFacts, resolve
from chairlift.errors import CheckpointError
from chairlift.models import open_checkpoint
from chairlift.models.checkpoint import find_model
from chairlift.models.cpu import CpuDecoder
from chairlift.models.gguf import Kind as StoredKind
from chairlift.models.gguf import format_of, open_gguf, read_tensor
from chairlift.models.gguf.families import end_tokens, sampling_of
from chairlift.models.grouped import GroupedWeight
from chairlift.models.loader import grouped_size
from tests.models.support import MAX_SEQ_LEN, groups_of, linear, load, num_bytes, refusal
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Kind, finish, new_writer, write_model
from tests.support.kernels import needs_kernels

LEGACY = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
EXACT = [*LEGACY, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q3_K, Kind.Q2_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4]
FOUR_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4)
NUM_BITS = dict.fromkeys(FOUR_BITS, 4) | {Kind.Q2_K: 2, Kind.Q3_K: 3, Kind.Q5_K: 5, Kind.Q6_K: 6}
SCALES_PER_STEP = {Kind.Q2_K: 16, Kind.Q3_K: 16, Kind.Q4_K: 8, Kind.Q5_K: 8, Kind.Q6_K: 16}
BITS_WITH_STEPS = {Kind.Q2_K: 2.625, Kind.Q3_K: 3.5625, Kind.Q4_K: 4.625, Kind.Q5_K: 5.625, Kind.Q6_K: 6.5625}
DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1, **SHAPE)


@pytest.fixture(scope="module")
def valid(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in Q4_0."""
    return write_model(model, tmp_path_factory.mktemp("valid") / "model.gguf", Kind.Q4_0)


# Blocks


def test_types_are_those_of_the_package_gguf() -> None:
    theirs = {kind.name: (kind.value, size) for kind, size in GGML_QUANT_SIZES.items()}
    assert {kind.name: (kind.value, kind.block) for kind in StoredKind} == theirs


def random_blocks(kind: Kind, num_rows: int, num_blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of any value, but for the float16 numbers that scale a block."""
    rng = np.random.default_rng(kind.value)
    size = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (num_rows * num_blocks, size), dtype=np.uint8)
    halves = rng.normal(0, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)  # of 2 bytes, 2 numbers a block
    if kind in (Kind.Q6_K, Kind.Q3_K):
        blocks[:, -2:] = halves[:, :2]
    elif kind is Kind.Q2_K:
        blocks[:, -4:] = halves
    elif kind is Kind.MXFP4:
        blocks[:, 0] = rng.integers(115, 130, len(blocks))
    else:
        num_bytes = 2 if kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q5_0, Kind.IQ4_NL, Kind.IQ4_XS) else 4
        blocks[:, :num_bytes] = halves[:, :num_bytes]
    return blocks.reshape(num_rows, -1)


def read_blocks(path: Path, kind: Kind, num_rows: int = 37) -> tuple[GroupedWeight, torch.Tensor]:
    """A matrix in that type as it is read, and as the package gguf dequantizes it."""
    blocks = random_blocks(kind, num_rows, 512 // GGML_QUANT_SIZES[kind][0])
    writer = new_writer(path, "llama")
    writer.add_tensor("ahead", np.ones(3, dtype=np.float32))
    writer.add_tensor("matrix", blocks, raw_dtype=kind)
    finish(writer)
    read = read_tensor(open_gguf(path).tensors["matrix"])
    assert isinstance(read, GroupedWeight)
    return read, torch.from_numpy(gguf.dequantize(blocks, kind))


@pytest.mark.parametrize(("kind", "num_rows"), [*((kind, 37) for kind in EXACT), (Kind.Q4_1, 5000)])
def test_blocks_are_read_without_loss(tmp_path: Path, kind: Kind, num_rows: int) -> None:
    read, expected = read_blocks(tmp_path / "blocks.gguf", kind, num_rows)
    assert (read.num_bits, read.group_size) == (NUM_BITS.get(kind, 8), 16 if SCALES_PER_STEP.get(kind) == 16 else 32)
    assert read.scales_per_step == SCALES_PER_STEP.get(kind, 0)
    assert torch.equal(read.dequantize(), expected)
    if kind not in (Kind.Q2_K, Kind.Q6_K):
        assert torch.equal(read.regular().dequantize(), expected)


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q2_K])
def test_scales_of_16_become_the_nearest_of_255_steps_in_regular_groups(tmp_path: Path, kind: Kind) -> None:
    read, expected = read_blocks(tmp_path / "blocks.gguf", kind)
    read = read.regular()
    assert (read.num_bits, read.group_size, read.offsets) == (8, 32, None)
    largest = expected.view(37, -1, 32).abs().amax(-1, keepdim=True)
    assert ((read.dequantize() - expected).view(37, -1, 32).abs() <= 0.56 / 127 * largest + 1e-6).all()
    assert torch.linalg.vector_norm(read.dequantize() - expected) < 0.005 * torch.linalg.vector_norm(expected)
    stored = format_of(StoredKind(kind))
    assert stored is not None
    assert read.num_bytes <= stored.regular().num_bytes(expected.numel(), is_on_gpu=True)


@pytest.mark.parametrize("kind", DTYPES, ids=lambda kind: kind.name)
def test_plain_numbers_are_as_they_are(model: Any, tmp_path: Path, kind: Kind) -> None:
    checkpoint = open_checkpoint(str(write_model(model, tmp_path / "model.gguf", kind)))
    assert checkpoint.config.dtype == str(DTYPES[kind]).removeprefix("torch.")
    read = checkpoint.open_weights().read("model.layers.1.mlp.down_proj.weight")
    assert isinstance(read, torch.Tensor)
    assert torch.equal(read, linear(model, "1.mlp.down_proj").weight.to(DTYPES[kind]))
    assert grouped_size(checkpoint) is None


# What a model keeps


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_products_keep_their_groups_and_are_weighed_before_they_are_read(tmp_path: Path, is_tied: bool) -> None:
    model = make_checkpoint(tmp_path, tie_word_embeddings=is_tied, **SHAPE)
    path = write_model(model, tmp_path / "file" / "model.gguf", Kind.Q4_0)
    kept, plain = load(path, keeps_groups=True), load(path)
    assert kept.lm_head.grouped is not None
    assert not hasattr(kept.model.embed_tokens, "weight")
    query = linear(kept, "1.self_attn.qkv_proj").grouped
    assert query is not None
    assert torch.equal(query.dequantize(), linear(plain, "1.self_attn.qkv_proj").weight)
    assert torch.equal(kept.lm_head.grouped.dequantize(), plain.lm_head.weight)
    size = grouped_size(open_checkpoint(str(path)))
    assert size is not None
    assert size.num_bytes == num_bytes(groups_of(kept))
    assert size.num_parameters == sum(each.num_outputs * each.num_inputs for each in groups_of(kept))


@needs_kernels
@pytest.mark.parametrize("kind", BITS_WITH_STEPS, ids=lambda kind: kind.name)
def test_blocks_with_steps_take_little_more_than_in_their_file(tmp_path: Path, kind: Kind) -> None:
    model = make_checkpoint(tmp_path, **{**SHAPE, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    path = write_model(model, tmp_path / "file" / "model.gguf", kind)
    size = grouped_size(open_checkpoint(str(path)))
    assert size is not None
    assert size.num_bytes * 8 == size.num_parameters * BITS_WITH_STEPS[kind]
    decoder = CpuDecoder(load(path, DType.BFLOAT16, keeps_groups=True), MAX_SEQ_LEN)
    assert size.num_bytes < decoder.weight_bytes < size.num_bytes + 2**16  # norms and tables of rope, beside them


@needs_kernels
def test_matrices_of_several_types_in_one_product_take_little_more_than_in_their_file(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, **{**SHAPE, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    kinds = {".v_proj.": Kind.Q6_K, ".k_proj.": Kind.Q5_K, "": Kind.Q4_K}
    path = write_model(model, tmp_path / "file" / "model.gguf", kinds)
    size = grouped_size(open_checkpoint(str(path)))
    assert size is not None
    tensors = open_gguf(path).tensors.values()
    assert size.num_bytes < 1.03 * sum(each.num_bytes for each in tensors if len(each.shape) == 2)
    decoder = CpuDecoder(load(path, DType.BFLOAT16, keeps_groups=True), MAX_SEQ_LEN)
    assert size.num_bytes < decoder.weight_bytes < size.num_bytes + 2**16


@needs_kernels
@pytest.mark.parametrize("gate", [Kind.Q6_K, Kind.IQ4_NL], ids=lambda kind: kind.name)
def test_gate_and_up_of_different_types_are_weighed_as_one_matrix(tmp_path: Path, gate: Kind) -> None:
    model = make_checkpoint(tmp_path, **{**SHAPE, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    path = write_model(model, tmp_path / "file" / "model.gguf", {".gate_proj.": gate, "": Kind.Q4_K})
    size = grouped_size(open_checkpoint(str(path)))
    assert size is not None
    decoder = CpuDecoder(load(path, DType.BFLOAT16, keeps_groups=True), MAX_SEQ_LEN)
    assert size.num_bytes < decoder.weight_bytes < size.num_bytes + 2**16


def test_groups_become_numbers_where_nothing_multiplies_them(valid: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.models.loader")
    checkpoint = open_checkpoint(str(valid))
    shape, gpu = checkpoint.config, MachineFacts("cuda:0", frozenset(DType), free_bytes=2**30)
    config = resolve(EngineConfig(), shape, 2**17, gpu, lambda *_: None, grouped_size(checkpoint))
    loaded = load(valid, config.dtype, keeps_groups=config.keeps_groups)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    exact = linear(load(valid), "1.mlp.down_proj").weight
    assert torch.equal(linear(loaded, "1.mlp.down_proj").weight, exact.bfloat16())
    said = next(message for message in caplog.messages if "small integers" in message)
    assert said.endswith("in groups of small integers become bfloat16, since nothing here multiplies them as they are")


def test_what_cannot_stay_in_groups_is_logged(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.models.loader")
    path = write_model(model, tmp_path / "model.gguf", {".0.self_attn.v_proj.": Kind.F16, "": Kind.Q8_0})
    loaded = load(path, keeps_groups=True)
    assert linear(loaded, "0.self_attn.qkv_proj").grouped is None
    assert linear(loaded, "1.self_attn.qkv_proj").grouped is not None
    assert (
        "model.layers.0.self_attn.qkv_proj.weight become float32: what is stacked for a product must have groups of one"
        " size, a multiple of 32, and a GPU has embeddings as numbers"
    ) in caplog.messages


def test_matrices_of_four_and_eight_bits_are_stacked_in_eight(model: Any, valid: Path, tmp_path: Path) -> None:
    path = write_model(model, tmp_path / "model.gguf", {".v_proj.": Kind.Q8_0, "": Kind.Q4_0})
    query = linear(load(path, keeps_groups=True), "0.self_attn.qkv_proj").grouped
    assert query is not None
    assert query.num_bits == 8
    assert torch.equal(query.dequantize(), linear(load(path), "0.self_attn.qkv_proj").weight)
    assert torch.equal(query.dequantize()[:64], linear(load(valid), "0.self_attn.qkv_proj").weight[:64])


# Where a file is


def test_a_directory_with_one_file_is_that_file_and_of_several_one_must_be_named(valid: Path, tmp_path: Path) -> None:
    assert find_model(str(valid.parent)) == open_checkpoint(str(valid.parent)).path == valid
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(valid)
    assert "has 2 GGUF files (a.gguf, b.gguf...); name the one" in refusal(tmp_path)
    assert load(tmp_path / "a.gguf").config.num_layers == 2
    assert "nor a GGUF file" in refusal(tmp_path / "nowhere.gguf")


def test_a_projector_beside_the_model_is_left_out(
    valid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.models.gguf.folders")
    writer = new_writer(tmp_path / "mmproj-F16.gguf", "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    (tmp_path / "model.gguf").symlink_to(valid)
    assert find_model(str(tmp_path)) == find_model(str(tmp_path)) == tmp_path / "model.gguf"
    left_out = "is left out: it makes inputs of images or sound, which are not served"
    assert caplog.messages == [f"{tmp_path / 'mmproj-F16.gguf'} {left_out}"]
    (tmp_path / "other.gguf").symlink_to(valid)
    assert "has 2 GGUF files (model.gguf, other.gguf...)" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.GGUF", "model.Gguf", "sha256-4a1b", "weights.bin"])
def test_a_file_is_known_by_its_suffix_or_its_first_bytes(valid: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(valid, tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        assert load(path).config.num_layers == 2
        assert find_model(str(path)) == tmp_path / name
    (tmp_path / "other.bin").write_bytes(b"GGU")
    assert "nor a GGUF file" in refusal(tmp_path / "other.bin")


def test_a_split_file_with_a_suffix_in_capitals_is_read(model: Any, tmp_path: Path) -> None:
    write_model(model, tmp_path / "model.gguf", Kind.Q4_0, split_max_tensors=8)
    for part in list(tmp_path.iterdir()):
        part.rename(part.with_suffix(".GGUF"))
    assert load(tmp_path).config.num_layers == 2


def test_a_file_in_parts_is_read_by_the_name_of_any_or_of_all(model: Any, valid: Path, tmp_path: Path) -> None:
    write_model(model, tmp_path / "model.gguf", Kind.Q4_0, split_max_tensors=8)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    whole = load(valid).state_dict()
    for path in (tmp_path, tmp_path / parts[0], tmp_path / parts[2]):
        loaded = load(path).state_dict()
        assert loaded.keys() == whole.keys()
        assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    (tmp_path / parts[1]).unlink()
    assert refusal(tmp_path).endswith(f"is split, and {parts[1]} is not beside it")


# What is wrong with a file


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"general.architecture": "mamba"},
            "architecture 'mamba' is not supported, only deepseek2, ernie4_5-moe, falcon-h1, gemma2, gemma3, gemma3n",
        ),
        ({"llama.block_count": 3}, "it has 2 layers, and its metadata say 3"),
        ({"llama.block_count": 4_000_000_000}, "llama.block_count must be a number from 1 to 16777216, not 4000000000"),
        ({"llama.embedding_length": 32}, "has shape [96, 64]; the model needs [96, 32]"),
        ({"llama.feed_forward_length": 2**24}, "the model needs [16777216, 64]"),
        ({"llama.attention.head_count": 1}, "1 attention heads cannot share 2 key/value heads"),
        ({"llama.attention.key_length": 8}, "heads of another size than its keys"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base must be a positive number, not nan"),
        ({"llama.rope.scaling.type": "spiral"}, "rope type 'spiral' is not supported"),
        ({"llama.expert_count": 8}, "it lacks llama.expert_used_count"),
        ({"llama.vocab_size": 97}, "its embedding has 96 rows, and its metadata say otherwise: 96 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 95}, "its embedding has 96 rows, and its metadata say otherwise: 95 tokens"),
        ({"llama.context_length": None}, "it lacks llama.context_length"),
        ({"llama.context_length": "long"}, "llama.context_length must be a number from 1 to 16777216, not 'long'"),
    ],
)
def test_metadata_at_odds_with_tensors_is_named(
    valid: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    finish(rewritten(valid, tmp_path / "model.gguf", changes))
    assert said in refusal(tmp_path / "model.gguf")


def rewritten(source: Path, target: Path, changes: dict[str, Any]) -> GGUFWriter:
    """A writer of the same file with other metadata; None: without them."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    fields |= changes
    writer = new_writer(target, fields.pop("general.architecture"))
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kinds = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32}
            writer.add_key_value(name, value, kinds.get(type(value), gguf.GGUFValueType.UINT32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return writer


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("extra", Kind.IQ3_S, "tensor blk.0.extra.weight is IQ3_S, and only F32, F16, BF16, Q8_0, "),
        ("ffn_gate_inp", Kind.F32, "no place for: blk.0.ffn_gate_inp.weight"),
    ],
)
def test_a_tensor_of_no_place_or_type_is_named(valid: Path, tmp_path: Path, name: str, kind: Kind, said: str) -> None:
    writer = rewritten(valid, tmp_path / "model.gguf", {})
    blocks = np.zeros((4, 64), np.float32) if kind is Kind.F32 else np.zeros((4, GGML_QUANT_SIZES[kind][1]), np.uint8)
    writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=kind)
    finish(writer)
    assert said in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.999])
def test_a_truncated_file_is_one_line(valid: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "model.gguf"
    whole = valid.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "is no GGUF file that can be read: it is truncated" in refusal(path)


HUGE = struct.pack("<Q", 2**62)
LONG_LISTS = [
    ("tokenizer.ggml.tokens", 4, struct.pack("<I", kind) + HUGE) for kind in (0, 8, 12)
]  # uint8, texts, float64
LARGE_TENSORS = [("token_embd.weight", 4, struct.pack("<QQ", *shape)) for shape in ((2**40, 2**40), (2**63, 2))]


@pytest.mark.parametrize(
    ("name", "offset", "content", "said"),
    [  # what is written so many bytes behind a name, or behind the beginning of the file
        *(("", offset, HUGE, "") for offset in (8, 16, 24)),  # numbers of tensors, of metadata, of a name's bytes
        *((*each, "it is truncated in its header") for each in LONG_LISTS),
        *((*each, "it is truncated: tensor token_embd.weight ends at byte") for each in LARGE_TENSORS),
    ],
)
def test_absurd_numbers_in_a_header_are_refused_at_once(
    valid: Path, tmp_path: Path, name: str, offset: int, content: bytes, said: str
) -> None:
    damaged = bytearray(valid.read_bytes())
    place = (damaged.index(name.encode()) + len(name) if name else 0) + offset
    damaged[place : place + len(content)] = content
    (tmp_path / "model.gguf").write_bytes(damaged)
    assert f"is no GGUF file that can be read: {said}" in refusal(tmp_path / "model.gguf")


@given(st.data())
def test_whatever_bytes_are_flipped_a_file_loads_or_is_refused(
    valid: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(valid.read_bytes())
    header = damaged.index(b"token_embd.weight")  # most of the rest is weights, which may have any value
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header + 2000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flipped") / "model.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(CheckpointError):
        load(path)


def test_a_header_that_somebody_holds_is_read_again_only_if_the_file_has_changed(valid: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(valid, path)
    held = open_gguf(path)
    assert open_gguf(path) is held
    finish(rewritten(valid, path, {"general.sampling.temp": 0.25}))
    assert open_gguf(path).metadata["general.sampling.temp"] == 0.25


# What a file says of answers


def test_ends_are_those_that_are_named_and_those_that_are_known(valid: Path, tmp_path: Path) -> None:
    tokens = [f"t{index}" for index in range(96)]
    tokens[7], tokens[8], tokens[9] = "<|im_end|>", "<|eot_id|>", "<|im_start|>"
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index in (7, 9) else 1 for index in range(96)],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    finish(rewritten(valid, tmp_path / "model.gguf", changes))
    file = open_gguf(tmp_path / "model.gguf")
    assert end_tokens(file) == [2, 3, 7]
    assert sampling_of(file) == {"temperature": 0.6, "top_k": 20}
