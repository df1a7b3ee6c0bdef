"""The newest token of each slot on the device, where a launch finds it before the host knows it.

Recurrent states stop at the end of their sequences. A launch may have several steps, and the next one begins before the
host knows the tokens of this one, so a row may go on for a while after the token that ends it:

    sampled          t t E x x          E: one of its end tokens; x: surplus, which the host drops
    has ended        - - - 1 1          when the token in the next column is computed
    taken in         t t - - -
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.device import to_device
from chairlift.plan import MOST_ENDS, ON_DEVICE, RowPlan

_NONE = -1  # no token


class LastTokens:
    """The last sampled token of each slot, on the device, from which the next step reads its input."""

    def __init__(self, num_slots: int, device: torch.device, *, knows_ends: bool = False) -> None:
        """`knows_ends`: it notes whether these tokens end their sequences."""
        self._by_slot = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._ends: torch.Tensor | None = None
        if knows_ends:
            self._ends = torch.full((num_slots, MOST_ENDS), _NONE, dtype=torch.int64, device=device)
            self._have_ended = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def begin(self, rows: Sequence[RowPlan]) -> None:
        """Learns the end tokens of the rows whose newest token the host knows, which therefore go on."""
        if self._ends is None:
            return
        known = [row for row in rows if row.input_ids[-1] != ON_DEVICE]
        if known:
            slots = to_device([row.slot for row in known], torch.int64, self._ends.device)
            ends = [_padded(row.key.end_token_ids) for row in known]
            self._ends[slots] = to_device(ends, torch.int64, self._ends.device)
            self._have_ended[slots] = False

    def note(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Records `tokens`, int64 `[N]`, as the last ones of these slots, int32 `[N]`."""
        newest = tokens.clamp(min=0)  # a row without a valid token ends, but surplus is computed
        self._by_slot[slots] = newest
        if self._ends is not None:
            is_end = (self._ends[slots] == newest.unsqueeze(1)).any(dim=1)
            self._have_ended[slots] = self._have_ended[slots] | is_end

    def fill_in(self, input_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`input_ids`, int64 `[N]`, with `ON_DEVICE` replaced by the last tokens of these slots, int32 `[N]`."""
        return torch.where(input_ids < 0, self._by_slot[slots], input_ids)

    def have_ended(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Returns bool `[N]`: whether sequences end with the last tokens of these slots, int32 `[N]`, or before.

        None: it does not note that.
        """
        return None if self._ends is None else self._have_ended[slots]

    def stop_states(
        self, inputs: Sequence[ContinuousBatchingKVCacheCollection]
    ) -> list[ContinuousBatchingKVCacheCollection]:
        """Returns the inputs of a step with what is known of ends: recurrent states take nothing in after these."""
        return [
            each
            if each.states is None
            else replace(each, states=replace(each.states, has_ended=self.have_ended(each.lookup_table)))
            for each in inputs
        ]


def _padded(tokens: frozenset[int]) -> list[int]:
    """As many end tokens as there is room for; the scheduler relies on them only if these are all."""
    some = list(islice(tokens, MOST_ENDS))
    return [*some, *[_NONE] * (MOST_ENDS - len(some))]
