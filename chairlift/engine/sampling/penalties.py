"""Penalties on tokens that were seen before: repetition (prompt and answer), presence and frequency (answer only)."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch

from chairlift.engine.sampling import NOTHING_GUESSED, Guessed, to_device
from chairlift.params import SamplingParams
from chairlift.scheduler import RequestState


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """The rows of a launch that carry penalties."""

    rows: torch.Tensor  # int64 [P]
    slots: torch.Tensor  # int64 [P]
    factors: torch.Tensor  # float32 [3, P]: repetition, presence, frequency
    guessed_rows: torch.Tensor  # int64 [G]: of the P rows those that a guessed token comes before, once for each
    guessed_tokens: torch.Tensor  # int64 [G]
    counted: torch.Tensor  # int64 [C]: of the P rows those whose tokens are counted at once


class PenaltyState:
    """Counts of the tokens of each slot's request, kept on the device. Allocated when first needed."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._owners: dict[int, ref[RequestState]] = {}  # weak, so that a request that left does not stay in memory
        self._num_generated = torch.empty(0)  # int32 [n_slots, vocab]
        self._is_in_prompt = torch.empty(0)  # bool [n_slots, vocab]

    def prepare(self, requests: Sequence[RequestState], guessed: Guessed = NOTHING_GUESSED) -> PenaltyBatch | None:
        """None if no request carries a penalty. Starts the counts of requests that are new to their slots."""
        rows = [row for row, request in enumerate(requests) if has_penalty(request.params)]
        if not rows:
            return None
        slots: list[int] = []
        for row in rows:
            request = requests[row]
            assert request.slot is not None, "a request without a slot is sampled"
            # A row that needs its newest token keeps one token of a launch, but all were counted.
            owner = self._owners.get(request.slot)
            is_new = owner is None or owner() is not request or request.needs_newest_token
            if is_new and request.slot not in slots[-1:]:  # once for all rows of a guess
                self._start(request, request.slot)
            slots.append(request.slot)
        for slot in {slots[index] for index, row in enumerate(rows) if row in guessed}:
            del self._owners[slot]  # only the host knows which of the tokens count, so its counts start anew
        before = [(index, token) for index, row in enumerate(rows) for token in guessed.get(row, ())]
        params = [requests[row].params for row in rows]
        factors = [
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
        return PenaltyBatch(
            rows=to_device(rows, torch.int64, self._device),
            slots=to_device(slots, torch.int64, self._device),
            factors=to_device(factors, torch.float32, self._device),
            guessed_rows=to_device([index for index, _ in before], torch.int64, self._device),
            guessed_tokens=to_device([token for _, token in before], torch.int64, self._device),
            counted=to_device([i for i, row in enumerate(rows) if row not in guessed], torch.int64, self._device),
        )

    def apply(self, batch: PenaltyBatch, logits: torch.Tensor) -> None:
        """Changes those rows of `[N, vocab]` in place."""
        chosen = logits[batch.rows]
        repetition, presence, frequency = batch.factors.unsqueeze(2)  # [P, 1] each
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
        """Notes the sampled tokens, int64 `[N]`, of those rows that have no guess."""
        self._num_generated[batch.slots[batch.counted], tokens[batch.rows[batch.counted]]] += 1

    def forget_owners(self) -> None:
        """The counts of all requests start anew."""
        self._owners.clear()

    def _start(self, request: RequestState, slot: int) -> None:
        if not self._num_generated.numel():
            self._num_generated = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._is_in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        # If it had another slot before, the counts there end here, lest it returns to them.
        self._owners = {each: owner for each, owner in self._owners.items() if owner() not in (request, None)}
        self._owners[slot] = ref(request)
        token_ids = to_device(request.token_ids, torch.int64, self._device)
        prompt, generated = token_ids[: request.num_prompt_tokens], token_ids[request.num_prompt_tokens :]
        self._is_in_prompt[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self._num_generated[slot].zero_().index_add_(0, generated, ones)  # bincount would wait for the device


def has_penalty(params: SamplingParams) -> bool:
    """True if tokens that were seen before change what comes."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
