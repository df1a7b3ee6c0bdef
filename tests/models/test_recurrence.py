"""Recurrent layers move the states of slots: results do not depend on chunks, guesses, replays and batches."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.cache.layout import StateParams
from chairlift.cache.states import SlotStates
from chairlift.models.blocks import Block, GatedDeltaNetBlock, GatedShortConvBlock, Mamba2Block, Pass
from chairlift.models.layers import RMSNorm
from chairlift.models.recurrence import (
    Recur,
    Step,
    add_up,
    prepare,
    prepare_part,
    prepare_without_states,
    sigmoid,
    silu,
    softplus,
)
from tests.support.forward_bench import MAX_TENTATIVE

NUM_SLOTS, LENGTH = 6, 70
DELTA_NET = GatedDeltaNetBlock(num_key_heads=2, num_value_heads=4, key_dim=9, value_dim=6, kernel_size=4, norm_eps=1e-6)
SHORT_CONV = GatedShortConvBlock(num_features=21, kernel_size=3, has_bias=True)
MAMBA = Mamba2Block(num_heads=4, head_dim=5, num_groups=2, state_size=7, kernel_size=3, norm_eps=1e-6)
BLOCKS: dict[str, Block] = {"gated delta net": DELTA_NET, "gated short conv": SHORT_CONV, "mamba 2": MAMBA}
HIDDEN = 21
KEYS = KVCacheParams(torch.float32, 1, 2)


class Slots:
    """A cache whose second layer has a state, beside one that keeps keys and values."""

    def __init__(self, params: StateParams) -> None:
        self.cache = ContinuousBatchingKVCacheManager(
            [KEYS, None], NUM_SLOTS, LENGTH, 2, ["cpu"], states=[None, params], max_tentative=MAX_TENTATIVE
        )
        self.cache.claim(NUM_SLOTS)
        (self.memory,) = self.cache.state_memories
        self.memory.live.fill_(math.nan)  # nothing may read what was not written
        self.memory.pending.fill_(math.nan)

    def advance(
        self, slots: Sequence[int], num_new: Sequence[int], num_tentative: Sequence[int] | None = None
    ) -> SlotStates:
        """Describes a step that adds so many tokens to these slots, and counts it as done."""
        inputs = self.cache.fetch(slots, num_new, num_tentative=num_tentative)
        self.cache.step(num_new, inputs)
        assert inputs[0].states is not None
        return inputs[0].states


@dataclass(frozen=True)
class Recurrence:
    """A block's recurrence, and the inputs of one sequence for each slot."""

    params: StateParams
    step: Step
    inputs: torch.Tensor  # [slots, LENGTH, num_inputs]

    def start(self) -> Slots:
        return Slots(self.params)

    def run(self, states: SlotStates, tokens: torch.Tensor) -> torch.Tensor:
        return prepare(states)(1, tokens, self.step)

    @cache  # noqa: B019 - as long as the tests
    def whole(self, slot: int) -> torch.Tensor:
        """Outputs of a sequence alone and in one go."""
        return self.run(self.start().advance([slot], [LENGTH]), self.inputs[slot])


@cache
def recurrence(kind: str) -> Recurrence:
    block = BLOCKS[kind]
    generator = torch.Generator().manual_seed(4)
    module = block.make(1, HIDDEN, lambda size: RMSNorm(size, 1e-6))
    for parameter in module.parameters():
        parameter.requires_grad_(False).normal_(0.0, 0.7, generator=generator)
    steps: list[Step] = []

    def catch(_: int, inputs: torch.Tensor, step: Step) -> torch.Tensor:
        steps.append(step)
        return prepare_without_states([None, block.state()])(1, inputs, step)

    module(torch.ones(1, HIDDEN), Pass({}, torch.zeros(1, dtype=torch.int64), lambda *_: torch.empty(0), catch))
    params = block.state()
    assert params is not None
    inputs = torch.randn(NUM_SLOTS, LENGTH, params.num_inputs, generator=generator)
    return Recurrence(params, steps[0], inputs)


KINDS = pytest.mark.parametrize("kind", BLOCKS)


@KINDS
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_sequence_give_the_bits_of_the_whole(kind: str, chunk: int) -> None:
    ours = recurrence(kind)
    memory, chunks = ours.start(), torch.split(ours.inputs[2], chunk)
    outputs = [ours.run(memory.advance([2], [len(tokens)]), tokens) for tokens in chunks]
    assert ours.whole(2).std() > 0.01  # or else there would be nothing to compare
    assert torch.equal(torch.cat(outputs), ours.whole(2))


def drive(
    ours: Recurrence, seed: int, run: Callable[[SlotStates, torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Takes all sequences forward in random steps, with guesses that are kept or taken back; the accepted outputs."""
    rng, memory = random.Random(seed), ours.start()
    done = dict.fromkeys(range(NUM_SLOTS), 0)
    outputs: dict[int, list[torch.Tensor]] = {slot: [] for slot in done}
    while unfinished := [slot for slot, length in done.items() if length < LENGTH]:
        slots = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        counts = [min(rng.choice((1, 1, 2, 5, 30)), LENGTH - done[slot]) for slot in slots]
        tentative = [rng.randint(0, min(count, MAX_TENTATIVE)) for count in counts]
        tokens = torch.cat([ours.inputs[slot, done[slot] :][:n] for slot, n in zip(slots, counts, strict=True)])
        parts = torch.split(run(memory.advance(slots, counts, tentative), tokens), counts)
        for slot, count, guessed, part in zip(slots, counts, tentative, parts, strict=True):
            num_wrong = rng.randint(0, guessed)
            memory.cache.rewind(slot, num_wrong)
            done[slot] += count - num_wrong
            outputs[slot].append(part[: count - num_wrong])
    return {slot: torch.cat(each) for slot, each in outputs.items()}


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

    def run(states: SlotStates, tokens: torch.Tensor) -> torch.Tensor:
        outputs = []
        for start in range(0, len(tokens), size):
            tile = tokens[start : start + size]
            padded = torch.cat((tile, tile[-1:].expand(size - len(tile), -1)))
            outputs.append(prepare_part(states, start, start + len(tile))(1, padded, ours.step))
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
    states = replace(Slots(StateParams(2, 2)).advance([0, 1], [20, 20]), num_tentative=(0, 9))
    with pytest.raises(ValueError, match=r"num_tentative must be at most 8, .* not \[0, 9\]"):
        prepare(states)


def test_a_rehearsal_repeats_the_first_token_as_the_beginning_of_a_sequence() -> None:
    ours = recurrence("gated delta net")
    recur: Recur = prepare_without_states([None, ours.params])
    outputs = recur(1, ours.inputs[3, :5], ours.step)
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
