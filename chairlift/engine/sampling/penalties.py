"""Penalties on tokens that were seen before: repetition (prompt and answer), presence and frequency (answer only)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from chairlift.device import to_device
from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed
from chairlift.kernels.changes import NOTHING, Penalties
from chairlift.params import SamplingParams
from chairlift.plan import RowPlan


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """The rows of a launch that carry penalties."""

    rows: torch.Tensor  # int64 [P]
    slots: torch.Tensor  # int64 [P]
    factors: torch.Tensor  # float32 [3, P]: repetition, presence, frequency
    guessed_rows: torch.Tensor  # int64 [G]: indices into P, one for each guessed token before that row
    guessed_tokens: torch.Tensor  # int64 [G]
    counted: torch.Tensor  # int64 [C]: indices into P of rows without a guess, whose tokens are counted at once
    for_kernels: Penalties | None  # the same for all rows of the launch, if a kernel applies them


class PenaltyState:
    """Counts of the tokens of each slot's request, kept on the device. Allocated when first needed."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._num_generated: torch.Tensor | None = None  # int32 [n_slots, vocab]
        self._is_in_prompt = torch.empty(0)  # bool [n_slots, vocab]

    def prepare(
        self, rows: Sequence[RowPlan], guessed: Guessed = NOTHING_GUESSED, *, is_for_kernels: bool = False
    ) -> PenaltyBatch | None:
        """None if no row has a penalty. Starts the counts of rows that come with a history."""
        chosen = [index for index, row in enumerate(rows) if row.key.params.has_penalty]
        if not chosen:
            return None
        for index in chosen:
            if not guessed.get(index):  # once for all places of a guess
                self._start(rows[index])
        slots = [rows[index].slot for index in chosen]
        before = [(index, token) for index, row in enumerate(chosen) for token in guessed.get(row, ())]
        factors = _factors(rows[index].key.params for index in chosen)
        return PenaltyBatch(
            rows=to_device(chosen, torch.int64, self._device),
            slots=to_device(slots, torch.int64, self._device),
            factors=to_device(factors, torch.float32, self._device),
            guessed_rows=to_device([index for index, _ in before], torch.int64, self._device),
            guessed_tokens=to_device([token for _, token in before], torch.int64, self._device),
            counted=to_device([i for i, row in enumerate(chosen) if row not in guessed], torch.int64, self._device),
            for_kernels=self._for_kernels(rows) if is_for_kernels else None,
        )

    def _for_kernels(self, rows: Sequence[RowPlan]) -> Penalties:
        assert self._num_generated is not None, "a row's counts have not begun"
        slots = [row.slot if row.key.params.has_penalty else NOTHING for row in rows]
        return Penalties(
            to_device(slots, torch.int32, self._device),
            to_device(_factors(row.key.params for row in rows), torch.float32, self._device),
            self._num_generated,
            self._is_in_prompt,
        )

    def apply(self, batch: PenaltyBatch, logits: torch.Tensor) -> None:
        """Changes those rows of `[N, vocab]` in place."""
        chosen = logits[batch.rows]
        repetition, presence, frequency = batch.factors.unsqueeze(2)  # [P, 1] each
        assert self._num_generated is not None, "a row's counts have not begun"
        num_generated = self._num_generated[batch.slots]
        if len(batch.guessed_rows):
            ones = torch.ones_like(batch.guessed_tokens, dtype=num_generated.dtype)
            num_generated.index_put_((batch.guessed_rows, batch.guessed_tokens), ones, accumulate=True)
        is_generated = num_generated > 0
        is_seen = self._is_in_prompt[batch.slots] | is_generated
        # Keskar et al. 2019, with negative logits multiplied so that a penalty never makes a token likelier.
        penalised = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(is_seen, penalised, chosen)
        chosen -= frequency * num_generated + presence * is_generated
        logits[batch.rows] = chosen

    def count(self, batch: PenaltyBatch, tokens: torch.Tensor) -> None:
        """Counts the sampled tokens, int64 `[N]`, of the rows without a guess."""
        assert self._num_generated is not None, "a row's counts have not begun"
        self._num_generated[batch.slots[batch.counted], tokens[batch.rows[batch.counted]]] += 1

    def _start(self, row: RowPlan) -> None:
        """Counts a row's history, if there is one."""
        if row.work.history is None:
            return
        if self._num_generated is None:
            self._is_in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._num_generated = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        token_ids = to_device(row.work.history, torch.int64, self._device)
        prompt, generated = token_ids[: row.key.num_prompt_tokens], token_ids[row.key.num_prompt_tokens :]
        self._is_in_prompt[row.slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self._num_generated[row.slot].zero_().index_add_(0, generated, ones)  # bincount would wait for the device


def _factors(params: Iterable[SamplingParams]) -> list[list[float]]:
    some = list(params)
    return [
        [each.repetition_penalty for each in some],
        [each.presence_penalty for each in some],
        [each.frequency_penalty for each in some],
    ]
