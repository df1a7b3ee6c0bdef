"""Penalties on tokens that were seen before: repetition (prompt and answer), presence and frequency (answer only)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.engine.transfers import to_device
from chairlift.params import SamplingParams
from chairlift.scheduler import Request


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """The rows of a launch that carry penalties. Factors are float32 `[P, 1]`."""

    rows: torch.Tensor  # int64 [P]
    slots: torch.Tensor  # int64 [P]
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class PenaltyState:
    """Counts of the tokens of each slot's request, kept on the device. Allocated when first needed."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._owners: dict[int, Request] = {}
        self._num_generated = torch.empty(0)  # int32 [n_slots, vocab]
        self._is_in_prompt = torch.empty(0)  # bool [n_slots, vocab]

    def prepare(self, requests: Sequence[Request]) -> PenaltyBatch | None:
        """None if no request carries a penalty. Starts the counts of requests that are new to their slots."""
        rows = [row for row, request in enumerate(requests) if has_penalty(request.params)]
        if not rows:
            return None
        slots = []
        for row in rows:
            request = requests[row]
            assert request.slot is not None, "a request without a slot is sampled"
            # Of a launch with several steps a row with a grammar keeps one token, but all were counted.
            if self._owners.get(request.slot) is not request or request.grammar is not None:
                self._start(request, request.slot)
            slots.append(request.slot)
        params = [requests[row].params for row in rows]
        return PenaltyBatch(
            rows=to_device(rows, torch.int64, self._device),
            slots=to_device(slots, torch.int64, self._device),
            repetition=self._column([p.repetition_penalty for p in params]),
            presence=self._column([p.presence_penalty for p in params]),
            frequency=self._column([p.frequency_penalty for p in params]),
        )

    def apply(self, batch: PenaltyBatch, logits: torch.Tensor) -> None:
        """Changes those rows of `[N, vocab]` in place."""
        chosen = logits[batch.rows]
        num_generated = self._num_generated[batch.slots]
        is_generated = num_generated > 0
        is_seen = self._is_in_prompt[batch.slots] | is_generated
        # Keskar et al. 2019, with negative logits multiplied so that a penalty never makes a token likelier.
        penalised = torch.where(chosen > 0, chosen / batch.repetition, chosen * batch.repetition)
        chosen = torch.where(is_seen, penalised, chosen)
        chosen -= batch.frequency * num_generated + batch.presence * is_generated
        logits[batch.rows] = chosen

    def count(self, batch: PenaltyBatch, tokens: torch.Tensor) -> None:
        """Notes the sampled tokens, int64 `[N]`, of those rows."""
        self._num_generated[batch.slots, tokens[batch.rows]] += 1

    def _start(self, request: Request, slot: int) -> None:
        if not self._num_generated.numel():
            self._num_generated = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._is_in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._owners[slot] = request
        token_ids = to_device(request.token_ids, torch.int64, self._device)
        prompt, generated = token_ids[: request.num_prompt_tokens], token_ids[request.num_prompt_tokens :]
        self._is_in_prompt[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self._num_generated[slot].zero_().index_add_(0, generated, ones)  # bincount would wait for the device

    def _column(self, values: list[float]) -> torch.Tensor:
        return to_device(values, torch.float32, self._device).unsqueeze(1)


def has_penalty(params: SamplingParams) -> bool:
    """True if tokens that were seen before change what comes."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
