"""Penalties on tokens that were seen before: repetition (prompt and answer), presence and frequency (answer only)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chairlift.device import send, to_device
from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed
from chairlift.kernels.changes import NOTHING, Penalties
from chairlift.params import SamplingParams
from chairlift.plan import RowPlan


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Holds what operators apply to the rows of a launch that carry penalties."""

    rows: torch.Tensor  # int64 [P]
    slots: torch.Tensor  # int64 [P]
    factors: torch.Tensor  # float32 [3, P]: repetition, presence, frequency
    guessed_rows: torch.Tensor  # int64 [G]: indices into P, one for each guessed token before that row
    guessed_tokens: torch.Tensor  # int64 [G]


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """Holds the penalties of a launch, in one of two forms, and says whose sampled tokens are counted."""

    counted: torch.Tensor  # int64 [2, C]: rows without a guess, and where the counts of their slots begin
    for_operators: PenalisedRows | None
    for_kernels: Penalties | None  # for all rows of the launch


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
        self._start([rows[index] for index in chosen if not guessed.get(index)])  # once for all places of a guess
        counted = [index for index in chosen if index not in guessed]
        begins = [rows[index].slot * self._shape[1] for index in counted]
        return PenaltyBatch(
            counted=to_device([counted, begins], torch.int64, self._device),
            for_operators=None if is_for_kernels else self._for_operators(rows, chosen, guessed),
            for_kernels=self._for_kernels(rows) if is_for_kernels else None,
        )

    def _for_operators(self, rows: Sequence[RowPlan], chosen: Sequence[int], guessed: Guessed) -> PenalisedRows:
        before = [(index, token) for index, row in enumerate(chosen) for token in guessed.get(row, ())]
        return PenalisedRows(
            rows=to_device(chosen, torch.int64, self._device),
            slots=to_device([rows[index].slot for index in chosen], torch.int64, self._device),
            factors=to_device(_factors(rows[index].key.params for index in chosen), torch.float32, self._device),
            guessed_rows=to_device([index for index, _ in before], torch.int64, self._device),
            guessed_tokens=to_device([token for _, token in before], torch.int64, self._device),
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

    def apply(self, batch: PenalisedRows, logits: torch.Tensor) -> None:
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
        """Counts the sampled tokens, int64 `[N]`, of the rows without a guess.

        A row that got none ends, so its counts may be any.
        """
        assert self._num_generated is not None, "a row's counts have not begun"
        rows, begins = batch.counted
        places = tokens.index_select(0, rows).clamp_(min=0).add_(begins)
        self._num_generated.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _start(self, rows: Sequence[RowPlan]) -> None:
        """Counts the histories of those rows that have one, of all together."""
        begun = [row for row in rows if row.work.history is not None]
        if not begun:
            return
        if self._num_generated is None:
            self._is_in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._num_generated = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        places = [np.array(row.work.history, dtype=np.int64) + row.slot * self._shape[1] for row in begun]
        parts = (
            np.array([row.slot for row in begun]),
            np.concatenate([own[: row.key.num_prompt_tokens] for row, own in zip(begun, places, strict=True)]),
            np.concatenate([own[row.key.num_prompt_tokens :] for row, own in zip(begun, places, strict=True)]),
        )
        together = send(torch.from_numpy(np.concatenate(parts)), self._device)
        slots, prompt, generated = torch.split(together, [len(part) for part in parts])
        self._is_in_prompt.index_fill_(0, slots, False)
        self._is_in_prompt.view(-1).index_fill_(0, prompt, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self._num_generated.index_fill_(0, slots, 0).view(-1).index_add_(0, generated, ones)  # bincount would wait


def _factors(params: Iterable[SamplingParams]) -> list[list[float]]:
    some = list(params)
    return [
        [each.repetition_penalty for each in some],
        [each.presence_penalty for each in some],
        [each.frequency_penalty for each in some],
    ]
