"""Finds for a prompt the slot that holds most of it, the state to go on from, and who computes more of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, SharedPrefix
from chairlift.cache.snapshots import StateSource
from chairlift.scheduler.request import RequestState
from chairlift.scheduler.state_reuse import StateReuse

_MIN_AWAITED_TOKENS = 16  # computing fewer is quicker than waiting for them


@dataclass(frozen=True, slots=True)
class Finding:
    """The slot that holds a request's longest prefix, and the request that is computing a longer one.

    Layers with recurrent states can reuse `num_tokens` of the `num_matched` tokens that the slot holds, because there
    is a state; or `num_in_place`, if the request gets the slot itself. Otherwise the three are equal.
    """

    slot: int | None = None
    num_tokens: int = 0
    num_matched: int = 0
    num_in_place: int = 0
    state: StateSource | None = None
    leader: RequestState | None = None
    num_awaited: int = 0  # tokens that the leader will have of the request's


class Finder:
    """Searches the slots of a cache, which others change."""

    def __init__(
        self,
        slots: SlotLedger,
        index: PrefixIndex,
        owners: Mapping[int, RequestState],
        states: StateReuse | None,
    ) -> None:
        self._slots = slots
        self._index = index
        self._owners = owners
        self._states = states

    def find(self, request: RequestState, tokens: bytes) -> Finding:
        """Finds what of a request's tokens need not be computed."""
        most = request.max_reused
        slot, num_tokens, leader, num_awaited = None, 0, None, 0
        seen: set[int] = set()
        matches = list(self._index.match(tokens, request.options.cache_salt))
        for prefix in matches:
            num_shared = min(prefix.num_tokens, most)
            if num_shared <= num_tokens:
                break
            for candidate in prefix.slots - seen:
                num_valid = min(num_shared, self._slots.num_valid(candidate))
                if num_valid > num_tokens:
                    slot, num_tokens = candidate, num_valid
                owner = self._owners.get(candidate)
                if leader is None and num_valid < num_shared and owner is not None and _can_lead(owner, request):
                    leader, num_awaited = owner, num_shared
            seen |= prefix.slots
        found = Finding(slot, num_tokens, num_matched=num_tokens, num_in_place=num_tokens)
        if self._states is not None and slot is not None:
            found = _with_state(found, slot, self._states, matches, tokens, request.options.cache_salt)
        if num_awaited < found.num_tokens + _MIN_AWAITED_TOKENS:
            return found
        return replace(found, leader=leader, num_awaited=num_awaited)


def _with_state(
    found: Finding, slot: int, states: StateReuse, matches: Sequence[SharedPrefix], tokens: bytes, salt: str
) -> Finding:
    """Returns what of a match in `slot` can be reused with the states that there are."""
    state = states.find(matches, tokens, salt, found.num_matched)
    num_tokens = 0 if state is None else state.num_tokens
    num_in_place = max(num_tokens, states.reach_in_place(slot, found.num_matched))
    return replace(found, num_tokens=num_tokens, num_in_place=num_in_place, state=state)


def _can_lead(owner: RequestState, request: RequestState) -> bool:
    """Returns true if the owner may be the request's leader. It must have no leader itself: there must be no cycles."""
    is_computing = owner.slot is not None and owner.finish_reason is None
    return is_computing and owner.leader is None and owner is not request
