"""Recurrent layers move the states of slots: results do not depend on chunks, guesses, replays and batches."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.cache.layout import StateParams
from chairlift.models.recurrence import (
    Recur,
    add_up,
    prepare,
    prepare_part,
    prepare_without_states,
    sigmoid,
    silu,
    softplus,
)
from tests.support.recurrences import BLOCKS, Slots, drive, recurrence

KINDS = pytest.mark.parametrize("kind", BLOCKS)


@KINDS
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_sequence_give_the_bits_of_the_whole(kind: str, chunk: int) -> None:
    ours = recurrence(kind)
    memory, chunks = ours.start(), torch.split(ours.inputs[2], chunk)
    outputs = [ours.run(memory.advance([2], [len(tokens)]), tokens) for tokens in chunks]
    assert ours.whole(2).std() > 0.01  # or else there would be nothing to compare
    assert torch.equal(torch.cat(outputs), ours.whole(2))


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_guesses_replays_and_batches_change_no_bit(kind: str, seed: int) -> None:
    ours = recurrence(kind)
    for slot, outputs in drive(ours, seed, ours.run).items():
        assert torch.equal(outputs, ours.whole(slot))


@KINDS
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_batch_in_tiles_gives_the_bits_of_the_whole(kind: str, size: int) -> None:
    ours = recurrence(kind)

    def run(batch: ContinuousBatchingKVCacheCollection, tokens: torch.Tensor) -> torch.Tensor:
        assert batch.states is not None
        outputs = []
        for start in range(0, len(tokens), size):
            tile = tokens[start : start + size]
            padded = torch.cat((tile, tile[-1:].expand(size - len(tile), -1)))
            outputs.append(prepare_part(batch.states, start, start + len(tile))(1, padded, ours.block))
            assert len(outputs[-1]) == size
        return torch.cat(outputs)[: len(tokens)]

    for slot, outputs in drive(ours, 5, run).items():
        assert torch.equal(outputs, ours.whole(slot))


def test_a_state_takes_in_all_but_the_tentative_tokens() -> None:
    ours = recurrence("gated short conv")
    slots = ours.start()
    ours.run(slots.advance([4], [10], [3]), ours.inputs[4, :10])
    memory = slots.memory
    assert torch.equal(memory.live[4], ours.inputs[4, 5:7].flatten())
    assert torch.equal(memory.pending[4, :3], ours.inputs[4, 7:10])
    assert memory.pending[4, 3:].isnan().all()
    assert memory.live[[0, 1, 2, 3, 5]].isnan().all()


def test_more_pending_tokens_than_a_slot_keeps_are_refused() -> None:
    states = Slots(StateParams(2, 2)).advance([0, 1], [20, 20]).states
    assert states is not None
    with pytest.raises(ValueError, match=r"num_tentative must be at most 8, .* not \[0, 9\]"):
        prepare(replace(states, num_tentative=(0, 9)))


def test_a_dummy_run_repeats_the_first_token_as_the_beginning_of_a_sequence() -> None:
    ours = recurrence("gated delta net")
    recur: Recur = prepare_without_states([None, ours.params])
    outputs = recur(1, ours.inputs[3, :5], ours.block)
    assert torch.equal(outputs, ours.whole(3)[:1].expand(5, -1))


@pytest.mark.parametrize(
    ("function", "reference"),
    [(sigmoid, torch.sigmoid), (silu, torch.nn.functional.silu), (softplus, torch.nn.functional.softplus)],
)
def test_functions_treat_every_place_of_a_tensor_alike(
    function: Callable[[torch.Tensor], torch.Tensor], reference: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    numbers = torch.cat((torch.linspace(-100, 100, 997), torch.linspace(-1, 1, 500)))
    whole = function(numbers)
    torch.testing.assert_close(whole, reference(numbers.double()).float(), rtol=1e-5, atol=1e-7)
    for start, length in itertools.product(range(0, 1400, 37), (1, 3, 8, 17, 33)):
        assert torch.equal(function(numbers[start : start + length].clone()), whole[start : start + length])


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_sums_are_sums(length: int) -> None:
    numbers = torch.arange(2 * length * 3).view(2, length, 3)
    assert torch.equal(add_up(numbers, 1), numbers.sum(1))
