"""The two ways to run a model in torch, called as the runner calls them: ragged batches over slots of odd sizes."""

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import AttentionBackend, DType, LoadFormat
from chairlift.engine.forward import InvariantForward, PlainForward, load_forward
from chairlift.errors import CheckpointError
from chairlift.models import load_model, open_checkpoint
from chairlift.models.attention import load_backend
from chairlift.models.llama import Llama
from tests.engine.support import resolved_config
from tests.support import flash_attn_reference
from tests.support.checkpoints import make_checkpoint
from tests.support.forward_bench import SLOT_LEN, Bench, Row, Step, logits_of, random_tokens, steps_around

# Sizes that no vector width divides; two key/value heads of three query heads each. Neighbouring slots begin at
# different offsets from a cache line.
ODD: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 36,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
DTYPES = [DType.FLOAT32, DType.BFLOAT16]
BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE = 0.15, 1e-3


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("odd")
    make_checkpoint(directory, **ODD)
    return str(directory)


@pytest.fixture(params=["odd", "bundled"])
def name(request: pytest.FixtureRequest, odd: str) -> str:
    return odd if request.param == "odd" else "bundled"


def load(name: str, dtype: DType) -> Llama:
    return load_model(open_checkpoint(name), dtype, "cpu", SLOT_LEN)


def plain_bench(model: Llama) -> Bench:
    attention = load_backend(AttentionBackend.TORCH, model.config.head_dim, model.rope.dtype)
    return Bench(model, PlainForward(model, attention))


def chunkings(rng: random.Random, length: int) -> list[list[int]]:
    """Whole; all decoded; by 7; by 64; a prompt and then decoding; anyhow."""
    return [
        [],
        list(range(1, length)),
        list(range(7, length, 7)),
        list(range(64, length, 64)),
        list(range(length - 6, length)),
        sorted(rng.sample(range(1, length), 4)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_agree_over_ragged_batches(name: str, dtype: DType) -> None:
    model = load(name, dtype)
    invariant, plain = Bench(model, InvariantForward(model)), plain_bench(model)
    rng = random.Random(1)
    tolerance = BFLOAT16_TOLERANCE if dtype is DType.BFLOAT16 else FLOAT32_TOLERANCE
    for step in steps_around(rng, 4, random_tokens(rng, 60), [30, 31, 32, 50]):
        for ours, theirs in zip(invariant.run(step.rows), plain.run(step.rows), strict=True):
            assert ours.dtype == torch.float32
            assert ours.shape == theirs.shape
            scale = theirs.abs().max().clamp(min=1.0)
            assert torch.allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tokens_get_the_same_bits_in_any_slot_chunking_and_company(name: str, dtype: DType) -> None:
    model = load(name, dtype)
    forward = InvariantForward(model)
    rng = random.Random(2)
    sequence = random_tokens(rng, 150)
    alone = logits_of(Bench(model, forward), [Step([Row(0, sequence)])])
    for slot, cuts in enumerate(chunkings(rng, len(sequence)), start=1):
        assert torch.equal(logits_of(Bench(model, forward), steps_around(rng, slot, sequence, cuts)), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_to_the_slots_is_the_same_too(odd: str, dtype: DType) -> None:
    model = load(odd, dtype)
    forward = InvariantForward(model)
    rng = random.Random(3)
    sequence = random_tokens(rng, 50)
    alone, among = Bench(model, forward), Bench(model, forward)
    logits_of(alone, [Step([Row(0, sequence)])])
    logits_of(among, steps_around(rng, 5, sequence, [7, 8, 29]))
    held = slice(0, len(sequence))
    assert torch.equal(alone.blocks[0, :, :, held], among.blocks[5, :, :, held])


def test_a_tile_that_is_not_full_writes_nothing_beyond_its_last_token(odd: str) -> None:
    model = load(odd, DType.FLOAT32)
    bench = Bench(model, InvariantForward(model))
    bench.run([Row(2, [5]), Row(3, [6, 7])])
    blocks = bench.blocks
    written = blocks.abs().amax(dim=(1, 2, 4, 5)) > 0  # [slot, position]
    assert written.nonzero().tolist() == [[2, 0], [3, 0], [3, 1]]


def test_all_tokens_at_once_do_get_other_bits_in_other_chunks() -> None:
    """So that the tests above can fail: products of one row and of many add up in another order."""
    model = load("bundled", DType.FLOAT32)
    rng = random.Random(2)
    sequence = random_tokens(rng, 150)
    whole = logits_of(plain_bench(model), [Step([Row(0, sequence)])])
    others = [
        logits_of(plain_bench(model), steps_around(rng, slot, sequence, cuts))
        for slot, cuts in enumerate(chunkings(rng, len(sequence)), start=1)
    ]
    assert not all(torch.equal(whole, other) for other in others)
    assert all(torch.allclose(whole, other, atol=FLOAT32_TOLERANCE) for other in others)


def test_a_slot_that_is_rounded_up_to_whole_pages_is_said(
    odd: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.engine.forward")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with flash_attn_reference.installed():
        load_forward(
            open_checkpoint(odd),
            resolved_config(odd, max_seq_len=300, attention_backend=AttentionBackend.FLASH_ATTN),
        )
    assert caplog.messages == [
        "max_seq_len 300: slots have memory for 512 tokens, since flash_attn reads them in pages",
        "attention: FlashAttnBackend on cpu",
    ]


def test_dummy_weights_are_made_up_without_a_look_at_the_files(odd: str, tmp_path: Path) -> None:
    shutil.copy(Path(odd) / "config.json", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load_forward(checkpoint, resolved_config(tmp_path))
    forward = load_forward(checkpoint, resolved_config(tmp_path, load_format=LoadFormat.DUMMY))
    assert isinstance(forward, PlainForward)
    assert forward.logits(torch.ones(2, ODD["hidden_size"])).shape == (2, ODD["vocab_size"])
