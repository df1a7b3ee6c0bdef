"""The two ways to run a model, called as the runner calls them: one ragged batch at a time, over slots of odd sizes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.config import AttentionBackend, DType
from chairlift.engine.forward import Forward, InvariantForward, PlainForward
from chairlift.models import load_model, open_checkpoint
from chairlift.models.attention import BatchMetadata, load_backend
from chairlift.models.llama import Llama
from tests.support.checkpoints import make_checkpoint

NUM_SLOTS = 9
SLOT_LEN = 191  # with heads of 6, neighbouring slots begin at different offsets from a cache line
# Sizes that no vector width divides; two key/value heads of three query heads each.
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


@dataclass(frozen=True)
class Row:
    """The next tokens of the sequence in a slot."""

    slot: int
    token_ids: list[int]


class Bench:
    """A model and a cache of its own."""

    def __init__(self, model: Llama, forward: Forward) -> None:
        shape, dtype = model.config, model.rope.dtype
        params = KVCacheParams(dtype, shape.num_kv_heads, shape.head_dim)
        self.cache = ContinuousBatchingKVCacheManager(params, NUM_SLOTS, SLOT_LEN, shape.num_layers, ["cpu"])
        self.cache.claim(NUM_SLOTS)
        self._forward = forward

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """One step: the logits of all its tokens, by row `[tokens, vocab]`. Rows of one token come first."""
        counts = [len(row.token_ids) for row in rows]
        slots = [row.slot for row in rows]
        held = [self.cache.cache_length_of(slot) for slot in slots]
        inputs = self.cache.fetch(slots, counts)
        batch = BatchMetadata(
            row_offsets=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            positions=torch.cat([torch.arange(n, n + count) for n, count in zip(held, counts, strict=True)]),
            slots=tuple(slots),
            num_new_tokens=tuple(counts),
            num_cached_tokens=tuple(held),
            num_decode_rows=next((i for i, count in enumerate(counts) if count > 1), len(counts)),
        )
        input_ids = torch.tensor([token for row in rows for token in row.token_ids])
        logits = self._forward.logits(self._forward.hidden(batch, input_ids, inputs[0]))
        self.cache.step(counts, inputs)
        return list(torch.split(logits, counts))


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


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(250) for _ in range(count)]


def steps_around(
    rng: random.Random, slot: int, sequence: list[int], cuts: Sequence[int]
) -> list[tuple[list[Row], int]]:
    """Steps that run a sequence in chunks, each among other rows in random order; and where its own row is.

    Others decode or are prefilled beside it, in other slots that they share from step to step.
    """
    steps = []
    room = {other: SLOT_LEN for other in range(NUM_SLOTS) if other != slot}
    for start, stop in zip([0, *cuts], [*cuts, len(sequence)], strict=True):
        own = Row(slot, sequence[start:stop])
        rows = [own]
        for other in rng.sample(list(room), rng.randrange(len(room))):
            count = min(rng.choice((1, 1, 1, 2, 9)), room[other])
            if count:
                rows.append(Row(other, token_ids(rng, count)))
                room[other] -= count
        rng.shuffle(rows)
        rows.sort(key=lambda row: len(row.token_ids) > 1)  # decode rows first; otherwise the order stays
        steps.append((rows, rows.index(own)))
    return steps


def logits_of(bench: Bench, steps: list[tuple[list[Row], int]]) -> torch.Tensor:
    """`[tokens, vocab]` of the one sequence whose rows are pointed at."""
    return torch.cat([bench.run(rows)[place] for rows, place in steps])


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
    for rows, _ in steps_around(rng, 4, token_ids(rng, 60), [30, 31, 32, 50]):
        for ours, theirs in zip(invariant.run(rows), plain.run(rows), strict=True):
            assert ours.dtype == torch.float32
            assert ours.shape == theirs.shape
            scale = theirs.abs().max().clamp(min=1.0)
            assert torch.allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tokens_get_the_same_bits_in_any_slot_chunking_and_company(name: str, dtype: DType) -> None:
    model = load(name, dtype)
    forward = InvariantForward(model)
    rng = random.Random(2)
    sequence = token_ids(rng, 150)
    alone = logits_of(Bench(model, forward), [([Row(0, sequence)], 0)])
    for slot, cuts in enumerate(chunkings(rng, len(sequence)), start=1):
        assert torch.equal(logits_of(Bench(model, forward), steps_around(rng, slot, sequence, cuts)), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_to_the_slots_is_the_same_too(odd: str, dtype: DType) -> None:
    model = load(odd, dtype)
    forward = InvariantForward(model)
    rng = random.Random(3)
    sequence = token_ids(rng, 50)
    alone, among = Bench(model, forward), Bench(model, forward)
    logits_of(alone, [([Row(0, sequence)], 0)])
    logits_of(among, steps_around(rng, 5, sequence, [7, 8, 29]))
    held = slice(0, len(sequence))
    assert torch.equal(alone.cache.blocks[0][0, :, :, held], among.cache.blocks[0][5, :, :, held])


def test_a_tile_that_is_not_full_writes_nothing_beyond_its_last_token(odd: str) -> None:
    model = load(odd, DType.FLOAT32)
    bench = Bench(model, InvariantForward(model))
    bench.run([Row(2, [5]), Row(3, [6, 7])])
    blocks = bench.cache.blocks[0]
    written = blocks.abs().amax(dim=(1, 2, 4, 5)) > 0  # [slot, position]
    assert written.nonzero().tolist() == [[2, 0], [3, 0], [3, 1]]


def test_all_tokens_at_once_do_get_other_bits_in_other_chunks() -> None:
    """So that the tests above can fail: products of one row and of many add up in another order."""
    model = load("bundled", DType.FLOAT32)
    rng = random.Random(2)
    sequence = token_ids(rng, 150)
    whole = logits_of(plain_bench(model), [([Row(0, sequence)], 0)])
    others = [
        logits_of(plain_bench(model), steps_around(rng, slot, sequence, cuts))
        for slot, cuts in enumerate(chunkings(rng, len(sequence)), start=1)
    ]
    assert not all(torch.equal(whole, other) for other in others)
    assert all(torch.allclose(whole, other, atol=FLOAT32_TOLERANCE) for other in others)
