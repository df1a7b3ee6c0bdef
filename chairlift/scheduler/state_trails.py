"""Recurrent states that a running request leaves behind it, because its answer may end before its newest token.

A stop string is found in text, which is made of tokens when they are known. By then the slot's state has taken the stop
string, and what was launched meanwhile:

    tokens    |====================|- stop string -|- launched -|
                   kept      kept  ^ end of the answer          ^ the slot's state
                                |~~| computed again by the next turn

So copies of the state are kept at the ends of launches while such a request decodes, the newest ones of them. Once it
is over, its tokens are known, and prompts that begin with these find the copies.
"""

from collections.abc import Callable, Container

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import pack_tokens
from chairlift.cache.snapshots import StateSource
from chairlift.cache.state_books import StateBooks
from chairlift.params import FinishReason
from chairlift.plan import StepPlan
from chairlift.scheduler.request import REPETITION_DETECTED, RequestState

_MOST_KEPT = 3  # of a request: behind what was launched, a stop string and the answer's last tokens
_LEAST_APART, _MOST_APART = 8, 64  # tokens from one to the next
_SHARE_APART = 128  # between these: one token in so many may have to be computed again


class StateTrails:
    """The copies of running requests' states, by slot, oldest first."""

    def __init__(self, slots: SlotLedger, states: StateBooks) -> None:
        self._slots = slots
        self._states = states
        self._trails: dict[int, list[StateSource]] = {}

    def extend(self, plan: StepPlan, owner_of: Callable[[int], RequestState], reusable: Container[int]) -> None:
        """Copies states as a plan, which has begun, leaves them, if their answers may end early.

        `reusable`: slots whose tokens others may reuse.
        """
        for row in plan.rows:
            request = owner_of(row.slot)
            if request.may_end_early and row.is_sampled and row.slot in reusable:
                self._extend(row.slot, request.num_prompt_tokens)

    def end(self, request: RequestState, num_sound: int) -> None:
        """Makes the copies that are within a request's first `num_sound` tokens available to prompts. Drops the rest.

        To be called when it releases its slot. If its sequence ended by itself, the slot's state stands at the end, and
        the copies are needed only if the text ended even earlier: they are evicted first.
        """
        assert request.slot is not None, f"{request.request_id} has no slot"
        ends_early = request.finish_reason is FinishReason.ABORT or request.stop_reason == REPETITION_DETECTED
        snapshots = self._states.snapshots
        for kept in self._trails.pop(request.slot, ()):
            if kept.num_tokens > num_sound or request.finish_reason is None:
                snapshots.drop(kept.row)
            else:
                tokens = pack_tokens(request.token_ids[: kept.num_tokens])
                snapshots.name(kept.row, tokens, request.options.cache_salt, is_waypoint=not ends_early)

    def clear(self) -> None:
        """Drops all copies."""
        for trail in self._trails.values():
            for kept in trail:
                self._states.snapshots.drop(kept.row)
        self._trails.clear()

    def _extend(self, slot: int, num_prompt_tokens: int) -> None:
        position, snapshots, trail = self._states.position(slot), self._states.snapshots, self._trails.get(slot, [])
        before = trail[-1].num_tokens if trail else num_prompt_tokens
        if position - before < min(max(position // _SHARE_APART, _LEAST_APART), _MOST_APART):
            return
        if len(trail) == _MOST_KEPT:
            snapshots.drop(trail.pop(0).row)
        row = snapshots.reserve()
        if row is None and trail:
            row = trail.pop(0).row
        if row is not None:
            self._slots.keep_state(slot, row)
            self._trails[slot] = [*trail, StateSource(row, position)]
