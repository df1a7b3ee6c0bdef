"""A forward pass called as the runner calls it: one ragged batch at a time, over the slots of a cache."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection, ContinuousBatchingKVCacheManager
from chairlift.config import DType
from chairlift.models.attention import BatchMetadata, Forward
from chairlift.models.config import ModelShape
from chairlift.models.forward import LayeredForward, StageT

NUM_SLOTS = 9
SLOT_LEN = 391
MAX_TENTATIVE = 8  # tokens of a recurrent model that can be taken back


@dataclass(frozen=True)
class Row:
    """The next tokens of the sequence in a slot."""

    slot: int
    token_ids: list[int]


@dataclass(frozen=True)
class Step:
    """Rows that run together, decode rows first; `place` is the index of the row that a test looks at."""

    rows: list[Row]
    place: int = 0


class Bench:
    """A forward pass and a cache of its own."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, forward: Forward, device: str = "cpu") -> None:
        """`dtype`: that the model computes in."""
        kept = shape.kept(DType(str(dtype).removeprefix("torch.")))
        self.cache = ContinuousBatchingKVCacheManager(
            kept, NUM_SLOTS, SLOT_LEN, shape.num_layers, [device], states=shape.states(), max_tentative=MAX_TENTATIVE
        )
        for memory in self.cache.state_memories:  # nothing may read what was not written
            memory.live.fill_(math.nan)
            memory.pending.fill_(math.nan)
        self.cache.claim(NUM_SLOTS)
        self._forward = forward

    @property
    def blocks(self) -> torch.Tensor:
        """`[slots, 2, layers, slot_len, heads, head_dim]`"""
        return self.cache.blocks[0]

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """One step: the logits of all its tokens, by row `[tokens, vocab]`. Rows of one token come first."""
        counts = [len(row.token_ids) for row in rows]
        inputs = self.cache.fetch([row.slot for row in rows], counts)
        logits = self._pass(rows, inputs[0].cache_lengths.tolist(), inputs)
        self.cache.step(counts, inputs)
        return list(torch.split(logits, counts))

    @torch.inference_mode()
    def guess(self, rows: Sequence[Row], num_guessed: int, num_wrong: int) -> list[torch.Tensor]:
        """As `run`, with rows whose last `num_guessed` tokens are guesses, of which the last ones are wrong."""
        counts = [len(row.token_ids) for row in rows]
        inputs = self.cache.fetch([row.slot for row in rows], counts, num_tentative=[num_guessed] * len(rows))
        logits = self._pass(rows, inputs[0].cache_lengths.tolist(), inputs)
        self.cache.step(counts, inputs)
        for row in rows:
            self.cache.rewind(row.slot, num_wrong)
        return list(torch.split(logits, counts))

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """As many steps in one launch as rows have tokens, which is the same for all; each row decodes."""
        num_steps = len(rows[0].token_ids)
        inputs = self.cache.fetch([row.slot for row in rows], None, num_steps)
        offsets = torch.arange(len(rows) + 1, dtype=torch.int32)
        steps = []
        for step in range(num_steps):
            if step:
                inputs = self.cache.increment_cache_lengths(inputs, offsets)
            rows_of_step = [Row(row.slot, [row.token_ids[step]]) for row in rows]
            steps.append(self._pass(rows_of_step, inputs[0].cache_lengths.tolist(), inputs))
        self.cache.step([num_steps] * len(rows), inputs)
        return list(torch.stack(steps, dim=1))

    def _pass(
        self, rows: Sequence[Row], held: list[int], inputs: Sequence[ContinuousBatchingKVCacheCollection]
    ) -> torch.Tensor:
        counts, device = [len(row.token_ids) for row in rows], self.blocks.device
        positions = [torch.arange(n, n + count) for n, count in zip(held, counts, strict=True)]
        batch = BatchMetadata(
            row_offsets=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
            positions=torch.cat(positions).to(device),
            slots=tuple(row.slot for row in rows),
            num_new_tokens=tuple(counts),
            num_cached_tokens=tuple(held),
            num_decode_rows=next((i for i, count in enumerate(counts) if count > 1), len(counts)),
        )
        input_ids = torch.tensor([token for row in rows for token in row.token_ids], device=device)
        return self._forward.logits(self._forward.hidden(batch, input_ids, inputs[0]))


def in_pieces(forward: LayeredForward[StageT], counts: Sequence[int]) -> Forward:
    """The same forward pass with so many layers at a time."""

    class Pieces:
        def hidden(
            self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
        ) -> torch.Tensor:
            stage = forward.enter(batch, input_ids, cache)
            first_layer = 0
            for count in counts:
                stage = forward.run(stage, first_layer, count)
                first_layer += count
            return forward.leave(stage)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return forward.logits(hidden)

    return Pieces()


def logits_of(bench: Bench, steps: Sequence[Step]) -> torch.Tensor:
    """`[tokens, vocab]` of the one sequence whose rows are pointed at."""
    return torch.cat([bench.run(step.rows)[step.place] for step in steps])


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Ids that every vocabulary of these tests has."""
    return [rng.randrange(250) for _ in range(count)]


def steps_around(rng: random.Random, slot: int, sequence: list[int], cuts: Sequence[int]) -> list[Step]:
    """Steps that run a sequence in chunks, each among other rows in random order.

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
                rows.append(Row(other, random_tokens(rng, count)))
                room[other] -= count
        rng.shuffle(rows)
        rows.sort(key=lambda row: len(row.token_ids) > 1)  # decode rows first; otherwise the order stays
        steps.append(Step(rows, rows.index(own)))
    return steps
