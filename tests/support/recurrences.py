"""Recurrences of all kinds with random weights, a cache that has their states, and random ways through sequences."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection, ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.cache.layout import StateParams
from chairlift.models.blocks import Block, Pass
from chairlift.models.blocks.gated_delta_net import GatedDeltaNetBlock
from chairlift.models.blocks.gated_short_conv import GatedShortConvBlock
from chairlift.models.blocks.mamba2 import Mamba2Block
from chairlift.models.layers import RMSNorm
from chairlift.models.recurrence import Recurrent, prepare, prepare_without_states
from tests.support.forward_bench import MAX_TENTATIVE

NUM_SLOTS, LENGTH = 6, 70
DELTA_NET = GatedDeltaNetBlock(num_key_heads=2, num_value_heads=4, key_dim=9, value_dim=6, kernel_size=4, norm_eps=1e-6)
SHORT_CONV = GatedShortConvBlock(num_features=21, kernel_size=3, has_bias=True)
MAMBA = Mamba2Block(num_heads=4, head_dim=5, num_groups=2, state_size=7, kernel_size=3, norm_eps=1e-6)
BLOCKS: dict[str, Block] = {"gated delta net": DELTA_NET, "gated short conv": SHORT_CONV, "mamba 2": MAMBA}
HIDDEN = 21
KEYS = KVCacheParams(torch.float32, 1, 2)


Run = Callable[[ContinuousBatchingKVCacheCollection, torch.Tensor], torch.Tensor]
"""Takes the new tokens of a batch's rows, `[T, num_inputs]`, through the second layer: float32 `[T, outputs]`."""


class Slots:
    """A cache whose second layer has a state, beside one that keeps keys and values."""

    def __init__(self, params: StateParams, device: torch.device | str = "cpu") -> None:
        self.cache = ContinuousBatchingKVCacheManager(
            [KEYS, None], NUM_SLOTS, LENGTH, 2, [device], states=[None, params], max_tentative=MAX_TENTATIVE
        )
        self.cache.claim(NUM_SLOTS)
        (self.memory,) = self.cache.state_memories
        self.memory.live.fill_(math.nan)  # nothing may read what was not written
        self.memory.pending.fill_(math.nan)

    def advance(
        self, slots: Sequence[int], num_new: Sequence[int], num_tentative: Sequence[int] | None = None
    ) -> ContinuousBatchingKVCacheCollection:
        """Describes a step that adds so many tokens to these slots, and counts it as done."""
        inputs = self.cache.fetch(slots, num_new, num_tentative=num_tentative)
        self.cache.step(num_new, inputs)
        return inputs[0]


@dataclass(frozen=True)
class Recurrence:
    """A block's recurrence, and the inputs of one sequence for each slot."""

    params: StateParams
    block: Recurrent
    inputs: torch.Tensor  # [slots, LENGTH, num_inputs]

    def start(self) -> Slots:
        return Slots(self.params, self.inputs.device)

    def run(self, batch: ContinuousBatchingKVCacheCollection, tokens: torch.Tensor) -> torch.Tensor:
        """Takes the tokens of all rows one after the other, in torch."""
        assert batch.states is not None
        return prepare(batch.states)(1, tokens, self.block)

    @cache  # noqa: B019 - as long as the tests
    def whole(self, slot: int) -> torch.Tensor:
        """Outputs of a sequence alone and in one go."""
        return self.run(self.start().advance([slot], [LENGTH]), self.inputs[slot])


def make_recurrence(block: Block, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Recurrence:
    """Makes random weights and inputs, the same on every device."""
    generator = torch.Generator().manual_seed(4)
    module = block.make(1, HIDDEN, lambda size: RMSNorm(size, 1e-6))
    for parameter in module.parameters():
        parameter.requires_grad_(False).normal_(0.0, 0.7, generator=generator)
    module.to(device, dtype)
    caught: list[Recurrent] = []

    def catch(_: int, inputs: torch.Tensor, recurrent: Recurrent) -> torch.Tensor:
        caught.append(recurrent)
        return prepare_without_states([None, block.state()])(1, inputs, recurrent)

    token, place = torch.ones(1, HIDDEN, dtype=dtype, device=device), torch.zeros(1, dtype=torch.int64)
    module(token, Pass({}, place, lambda *_: torch.empty(0), catch))
    params = block.state()
    assert params is not None
    inputs = torch.randn(NUM_SLOTS, LENGTH, params.num_inputs, generator=generator)
    return Recurrence(params, caught[0], inputs.to(device, dtype))


@cache
def recurrence(kind: str, device: str = "cpu") -> Recurrence:
    """A recurrence of that kind, of sizes that fit no kernel well."""
    return make_recurrence(BLOCKS[kind], device)


def drive(
    ours: Recurrence, seed: int, run: Run, num_slots: int = NUM_SLOTS, num_tokens: int = LENGTH
) -> dict[int, torch.Tensor]:
    """Takes sequences forward in random steps, with guesses that are kept or taken back; the accepted outputs.

    `num_tokens`: of each sequence, at most LENGTH.
    """
    rng, memory = random.Random(seed), ours.start()
    done = dict.fromkeys(range(num_slots), 0)
    outputs: dict[int, list[torch.Tensor]] = {slot: [] for slot in done}
    while unfinished := [slot for slot, length in done.items() if length < num_tokens]:
        slots = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        counts = [min(rng.choice((1, 1, 2, 5, 30)), num_tokens - done[slot]) for slot in slots]
        tentative = [rng.randint(0, min(count, MAX_TENTATIVE)) for count in counts]
        tokens = torch.cat([ours.inputs[slot, done[slot] :][:n] for slot, n in zip(slots, counts, strict=True)])
        parts = torch.split(run(memory.advance(slots, counts, tentative), tokens), counts)
        for slot, count, guessed, part in zip(slots, counts, tentative, parts, strict=True):
            num_wrong = rng.randint(0, guessed)
            memory.cache.rewind(slot, num_wrong)
            done[slot] += count - num_wrong
            outputs[slot].append(part[: count - num_wrong])
    return {slot: torch.cat(each) for slot, each in outputs.items()}
