"""Recurrent states: which one a prompt goes on from, and which are kept for later prompts.

Keys and values of any number of first tokens can be reused, but a state only exists where one was kept:

    prompt    |==================================|- - - - - - - -|
              0          state          matched in a slot      its end
                           |~~~~ again ~~~~|

So a prompt goes on from the longest state within what a slot holds of it: a snapshot, or the live state of a slot that
stands there. What follows up to there is computed again, with equal bits. If that is much, the prompt leaves a state
where the match ends (a junction), so that the third prompt with this beginning finds one. States are also kept at the
ends of prompts, where a follower waits for one, every `WAYPOINT_TOKENS` tokens, at the ends of chunks, and behind an
answer that may end early (`state_trails.py`).
"""

from collections.abc import Callable, Container, Sequence

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, SharedPrefix, count_tokens, cut_tokens, pack_tokens
from chairlift.cache.snapshots import StateSource
from chairlift.cache.state_books import PROMPT_TAIL, StateBooks
from chairlift.plan import MOST_ENDS, StateCopy, StepPlan
from chairlift.scheduler.request import RequestState
from chairlift.scheduler.state_trails import StateTrails

WAYPOINT_TOKENS = 1024
"""At least so many tokens lie between a waypoint and the state before it."""

_MIN_JUNCTION = 64  # tokens of a common beginning that are worth a state
_MOST_AGAIN = 10  # one token in so many of a match may be computed again without leaving a state there
_TAIL_SHARE = 16  # at most one token in so many of a prompt belongs to its tail
_MIN_NEW = 64  # tokens that a state at the end of a prompt must be ahead of the one before


class StateReuse:
    """Finds, copies and keeps states for a scheduler whose slots have them."""

    def __init__(self, slots: SlotLedger, states: StateBooks) -> None:
        self._slots = slots
        self._states = states
        self._max_tail = min(PROMPT_TAIL, states.max_tentative)
        self._distances = list[int]()
        self._trails = StateTrails(slots, states)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the states that are kept beside those of slots."""
        return len(self._states.snapshots) * self._states.row_bytes

    def count_kept(self, index: PrefixIndex) -> dict[int, int]:
        """Counts by slot the kept states from which a prompt can go on that begins with what the slot holds."""
        kept = {slot: self._states.snapshots.count(*index.entry(slot)) for slot in index.slots}
        return {slot: count for slot, count in kept.items() if count}

    def take_distances(self) -> list[int]:
        """Returns how far states were from the ends of matches, for the prompts that matched since the last call."""
        distances, self._distances = self._distances, []
        return distances

    def find(self, matches: Sequence[SharedPrefix], tokens: bytes, salt: str, num_matched: int) -> StateSource | None:
        """Finds the longest state of at most `num_matched` tokens. `matches`: slots by what they share, longest first.

        None if there is none, so that nothing can be reused.
        """
        found = self._states.snapshots.find(tokens, salt, num_matched)
        for prefix in matches:
            longest = min(prefix.num_tokens, num_matched)
            if found is not None and longest <= found.num_tokens:
                break
            for slot in prefix.slots:
                position = self._states.position(slot)
                if 0 < position <= longest and (found is None or position > found.num_tokens):
                    found = StateSource(slot, position)
        return found

    def reach_in_place(self, slot: int, num_matched: int) -> int:
        """Counts the tokens of `num_matched` to which a slot can bring its own state, with its pending inputs."""
        states = self._states
        return min(states.reach(slot), num_matched) if states.position(slot) <= num_matched else 0

    def positions(self, slot: int, tokens: bytes, salt: str) -> list[int]:
        """Lists how many of these tokens, those of a warm slot, the states have taken that are worth saving."""
        kept = self._states.snapshots.lengths(tokens, salt)
        own = self._states.position(slot)
        return sorted(kept | ({own} if own else set()))

    def row_after(self, slot: int, tokens: bytes, salt: str) -> int | None:
        """Finds the row of the state that has taken exactly these tokens of a warm slot; None if there is none."""
        num_tokens = count_tokens(tokens)
        if self._states.position(slot) == num_tokens:
            return slot
        kept = self._states.snapshots.find(tokens, salt, num_tokens)
        return kept.row if kept is not None and kept.num_tokens == num_tokens else None

    def begin(self, request: RequestState) -> None:
        """Prepares a request that has just got its slot."""
        num_tokens = len(request.token_ids)
        request.prompt_tail = max(1, min(self._max_tail, num_tokens // _TAIL_SHARE))
        request.state_marks = ()

    def reuse_in_place(self, request: RequestState, tokens: bytes, source: StateSource | None) -> None:
        """Gives a request that got a warm slot with some of its tokens the state after these.

        If that is the slot's own, it is kept before the new tokens move it, unless another prompt with the same
        beginning has little to compute again without it.
        """
        slot = request.slot
        assert slot is not None, f"{request.request_id} has no slot yet"
        length, position = self._slots.cache_length_of(slot), self._states.position(slot)
        if position <= length <= self._states.reach(slot):
            own, salt = cut_tokens(tokens, position), request.options.cache_salt
            before = self._states.snapshots.find(own, salt, position)
            if _is_worth_a_state(length - (before.num_tokens if before is not None else 0), length):
                self._keep(slot, own, salt)
            return
        assert source is not None, f"slot {slot} is reused without a state"
        self.copy_to(slot, source)

    def copy_to(self, slot: int, source: StateSource) -> None:
        """Copies a state to a slot that has been given the tokens that it has taken."""
        if source.row >= self._slots.num_slots:
            self._states.snapshots.use(source.row)
        assert self._slots.cache_length_of(slot) == source.num_tokens, f"slot {slot} and its state differ"
        self._slots.copy_state(source.row, slot)

    def note_match(self, request: RequestState, num_matched: int) -> None:
        """Has a prompt leave a state where its match ends, if much of it must be computed again without one."""
        num_again = num_matched - request.num_computed
        if num_matched:
            self._distances.append(num_again)
        if _is_worth_a_state(num_again, num_matched):
            self._mark(request, num_matched)

    def mark_for_follower(self, leader: RequestState, num_tokens: int) -> None:
        """Has a leader leave a state for a prompt that shares so many tokens with it."""
        self._mark(leader, num_tokens)

    def keep_after(self, plan: StepPlan, owner_of: Callable[[int], RequestState], reusable: Container[int]) -> None:
        """Keeps the states that the prompts and answers in a plan, which has begun, leave behind.

        `reusable`: slots whose tokens others may reuse.
        """
        self._trails.extend(plan, owner_of, reusable)
        for row in plan.rows[plan.num_decode_rows :]:
            if row.guess or row.slot not in reusable:
                continue
            request, position = owner_of(row.slot), self._states.position(row.slot)
            tokens, salt = pack_tokens(request.token_ids[:position]), request.options.cache_salt
            is_marked = any(row.start < mark <= request.num_computed for mark in request.state_marks)
            if is_marked:
                request.state_marks = tuple(mark for mark in request.state_marks if mark > request.num_computed)
                self._keep(row.slot, tokens, salt)
            elif row.is_sampled:
                self._keep(row.slot, tokens, salt, min_new=_MIN_NEW)
            else:
                self._keep(row.slot, tokens, salt, min_new=WAYPOINT_TOKENS, is_waypoint=True)

    def forget(self, request: RequestState, above: int) -> None:
        """Forgets kept states that have taken more than `above` tokens of a request, which may be at fault."""
        self._states.snapshots.forget(pack_tokens(request.token_ids), request.options.cache_salt, above)

    def release(self, request: RequestState, num_sound: int, *, is_reusable: bool) -> None:
        """Sets the books right for a request that releases its slot, whose first `num_sound` tokens are sound.

        `is_reusable`: others may reuse them.
        """
        self.stop_at_end(request)
        self.forget_unsound(request, num_sound)
        self._trails.end(request, num_sound - request.contents.has_bad_surplus if is_reusable else 0)

    def stop_at_end(self, request: RequestState) -> None:
        """Records that a request's state stopped before its end token, if launches see to that."""
        if self._states.stops_at_ends and request.has_end_token and len(request.end_token_ids) <= MOST_ENDS:
            assert request.slot is not None, f"{request.request_id} has no slot"
            self._slots.stop_state(request.slot, request.num_computed)

    def forget_unsound(self, request: RequestState, num_sound: int) -> None:
        """Forgets the states beyond the sound tokens of a request that releases its slot.

        If its last launch failed, that may have moved the slot's state halfway, and left one behind.
        """
        has_failed = request.contents.has_bad_surplus
        if has_failed and request.slot is not None:
            self._slots.forget_state(request.slot)
        if has_failed or num_sound < request.num_computed:
            self.forget(request, above=num_sound - has_failed)

    def trim(self, index: PrefixIndex) -> None:
        """Forgets the kept states whose tokens no slot holds any more, since nobody can go on from them."""

        def is_held(tokens: bytes, salt: str) -> bool:
            num_tokens = count_tokens(tokens)
            longest = next(iter(index.match(tokens, salt)), None)
            if longest is None or longest.num_tokens < num_tokens:
                return False
            return any(self._slots.num_valid(slot) >= num_tokens for slot in longest.slots)

        self._states.snapshots.keep_only(is_held)

    def forget_all(self) -> None:
        """Forgets all kept states, and the live ones that wait for a copy, which may be repeated too late."""
        self._states.snapshots.clear()
        self._trails.clear()
        for job in self._slots.owed:
            if isinstance(job, StateCopy) and job.target < self._slots.num_slots:
                self._states.cut(job.target, 0)

    def _mark(self, request: RequestState, num_tokens: int) -> None:
        if num_tokens > request.num_computed and num_tokens not in request.state_marks:
            request.state_marks = (*request.state_marks, num_tokens)

    def _keep(self, slot: int, tokens: bytes, salt: str, *, min_new: int = 1, is_waypoint: bool = False) -> None:
        snapshots, position = self._states.snapshots, self._states.position(slot)
        if not position or not snapshots.capacity:
            return
        before = snapshots.find(tokens, salt, position)
        if before is not None and before.num_tokens > position - min_new:
            if before.num_tokens == position and not is_waypoint:
                snapshots.use(before.row)
            return
        if before is None and position < min_new:
            return
        row = snapshots.add(tokens, salt, is_waypoint=is_waypoint)
        if row is not None:
            self._slots.keep_state(slot, row)


def _is_worth_a_state(num_again: int, num_matched: int) -> bool:
    """Returns true if so many tokens of a match are too many for prompts like this to compute again and again."""
    return num_matched >= _MIN_JUNCTION and (num_again * _MOST_AGAIN > num_matched or num_again >= _MIN_NEW)
