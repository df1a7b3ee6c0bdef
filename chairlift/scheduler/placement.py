"""Decides which slot a request gets, and which prefix of its prompt is reused from a slot and not computed.

A request that ends leaves its slot warm. A new one gets, in this order:

1. the warm slot that shares the longest prefix with it, in place, if few other tokens in that slot would be lost, if
   that slot would be evicted next anyway, or if there is no memory for another slot beside it;
2. a free slot, or the least recently used warm one, into which the longest prefix is copied from the slot that holds
   it, warm or running. A copy costs bandwidth, not compute.

It gets memory for all its tokens at once, and for more as it grows. When memory runs out, warm slots are shrunk from
their ends, the least recently used first; prefixes that a running request reads there go last.

At least one token is left to compute, so that there are logits. If a prompt in prefill shares an even longer prefix,
the request waits in its slot for that leader, and then copies the prefix: equal prompts are computed once. If a longer
one was saved, it waits for the disk (`restoring.py`).
"""

from collections.abc import Callable

from chairlift.cache.budget import CHUNK_TOKENS, CacheUse, chunks_of
from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, pack_tokens
from chairlift.params import FinishReason
from chairlift.plan import StepPlan
from chairlift.scheduler.drafting import MAX_CONTINUATION, MAX_CONTINUATIONS
from chairlift.scheduler.finding import Finder, Finding
from chairlift.scheduler.request import Contents, RequestState
from chairlift.scheduler.restoring import NothingSaved, Restoring, SavedPrefixes
from chairlift.scheduler.state_reuse import StateReuse
from chairlift.scheduler.worth import SlotWorth

_MAX_LOST_TOKENS = 64  # after a shared prefix in a warm slot: saving no more is not worth a copy
_KEPT_WHEN_IDLE = 0.1  # share of memory that idle warm slots keep: a chat resumed after a pause is not recomputed
_MAX_KEPT_WHEN_IDLE = 8192  # tokens: 250 MB of a 1 B model
_RUNNING_PER_GROWING = 4  # by simulation: with more chunks kept for growth fewer run, with fewer more are preempted
_MIN_SHRUNK_TOKENS = 512  # taken from a warm slot at a time, if it has them


class Placement:
    """Assigns slots to requests, and tracks what the slots of earlier ones hold."""

    def __init__(self, slots: SlotLedger, enable_prefix_caching: bool, saved: SavedPrefixes | None = None) -> None:
        """`saved`: prefixes that can be read from disk; None: there are none."""
        self._slots = slots
        self._foreign = slots.claimed  # claimed for other purposes
        self.has_other_ranks = False  # which sample as well, without the masks of grammars
        self._is_reusing = enable_prefix_caching  # otherwise no slot gets into the index, or stays warm
        self._index = PrefixIndex()
        self._owners: dict[int, RequestState] = {}
        self.states: StateReuse | None = None  # None: no layer has a recurrent state, or none is reused
        if slots.states is not None and enable_prefix_caching:
            self.states = StateReuse(slots, slots.states)
        self.restoring = Restoring(slots, saved or NothingSaved())
        self.worth = SlotWorth(slots, self._index)
        self._finder = Finder(slots, self._index, self._owners, self.states)

    @property
    def owners(self) -> list[RequestState]:
        """Requests that have a slot, and those that ended while a launch still writes to theirs."""
        return list(self._owners.values())

    @property
    def owner_of(self) -> Callable[[int], RequestState]:
        """Finds the owner of a slot. KeyError if it has none."""
        return self._owners.__getitem__

    @property
    def cache_use(self) -> CacheUse:
        """Tells what the cache's memory is used for."""
        return self._slots.budget.use

    def place(self, request: RequestState) -> None:
        """Gives the request a slot, one of which must be available, and reuses its longest prefix in any slot."""
        tokens = pack_tokens(request.token_ids)
        finding = self._find(request, tokens)
        if request.drafter is not None and not request.num_preemptions:
            salt = request.options.cache_salt
            continuations = self._index.following(tokens, salt, MAX_CONTINUATIONS, MAX_CONTINUATION)
            request.drafter.add_continuations(request.token_ids, continuations)
        slot = _choose(finding, len(request.token_ids), self._slots)
        if slot is None:
            (slot,) = self._slots.claim(1)
            num_reused = 0
        else:
            num_reused = finding.num_in_place
            self._slots.claim_slot(slot, num_reused)
        self.worth.note_owner(slot, num_reused)
        self.restoring.note_owner(slot, num_reused)
        request.slot = slot
        request.is_recurrent = self._slots.states is not None
        if request.grammar is not None and (request.is_recurrent or self.has_other_ranks):
            request.needs_newest_token = True  # a state cannot return from another token, and those ranks have another
        if self.states is not None:
            self.states.begin(request)
            if num_reused:
                self.states.reuse_in_place(request, tokens, finding.state)
        request.reuse(num_reused)
        request.contents, request.has_counts = Contents(num_reused), False
        self._owners[slot] = request
        if self._is_reusing:
            self._index.insert(slot, tokens, request.options.cache_salt)
        has_memory = self.provide(request, len(request.token_ids), spared=finding.slot)
        assert has_memory, f"{request.request_id} was given a slot without memory"
        self.follow(request, finding)

    def has_memory_for(self, request: RequestState, num_running: int) -> bool:
        """Returns true if a request can be placed so that some of the running ones can still grow by a chunk."""
        budget = self._slots.budget
        if budget.is_ample:
            return True
        # A single request can grow into all memory that others freed, so it needs memory for its tokens only.
        num_growing = num_running // _RUNNING_PER_GROWING + 1 if num_running else 0
        return chunks_of(len(request.token_ids)) + num_growing <= budget.num_obtainable

    def provide(self, request: RequestState, num_tokens: int, spared: int | None = None) -> bool:
        """Gives a request's slot memory for `num_tokens` tokens. False if other requests hold too much of it.

        `spared`: a warm slot that is not shrunk.
        """
        slot = request.slot
        assert slot is not None, f"{request.request_id} grows without a slot"
        num_missing = self._slots.grow(slot, num_tokens)
        if num_missing:
            self._shrink_warm(num_missing, spared)
            num_missing = self._slots.grow(slot, num_tokens)
        request.num_held = self._slots.budget.limits[slot]
        return not num_missing

    def follow(self, request: RequestState, finding: Finding | None = None) -> None:
        """Makes a request wait for a leader or, if there is none (any more), copies the prefix that was found."""
        tokens = pack_tokens(request.token_ids)
        finding = finding or self._find(request, tokens)
        request.leader = finding.leader
        if finding.leader is None:  # otherwise the whole prefix will be copied in one piece
            self._copy(request, finding)
            if self.states is not None:
                self.states.note_match(request, finding.num_matched)
            self.restoring.begin(request, tokens)
        elif self.states is not None:
            self.states.mark_for_follower(finding.leader, finding.num_awaited)

    def count_kept_states(self) -> dict[int, int]:
        """Counts by slot the recurrent states that are kept of its tokens; slots without any are left out."""
        return {} if self.states is None else self.states.count_kept(self._index)

    def keep_states(self, plan: StepPlan) -> None:
        """Keeps recurrent states that the prompts in a plan leave, once it counts as begun."""
        if self.states is not None:
            self.states.keep_after(plan, self.owner_of, self._index)

    def release(self, request: RequestState) -> None:
        """Takes the request's slot: its sound tokens stay warm, and the rest is scrubbed."""
        slot, contents = request.slot, request.contents
        assert slot is not None, f"{request.request_id} has no slot to release"
        self.restoring.drop(request)
        if request.error is not None:
            self._forget_sources(request)
        start = contents.to_scrub(request.num_computed)
        if start is not None:
            self._slots.scrub(slot, start)
        num_kept = contents.num_sound(request.num_computed)
        if self.states is not None:
            self.states.release(request, num_kept, is_reusable=slot in self._index)
        if slot not in self._index:  # its tokens must not be reused
            num_kept = 0
        elif num_kept:
            self._index.insert(slot, pack_tokens(request.token_ids[:num_kept]), request.options.cache_salt)
        else:
            self._index.remove(slot)
        self._slots.release(slot, num_kept)
        self.worth.note_release(slot)
        del self._owners[slot]
        request.slot = request.leader = None

    def step_back(self, request: RequestState, num_tokens: int) -> None:
        """Uncounts a row's newest tokens, which must be computed again or were guessed wrongly."""
        assert request.slot is not None, f"{request.request_id} goes on without a slot"
        self._slots.rewind(request.slot, num_tokens)
        request.num_computed -= num_tokens

    def scrub_surplus(self, request: RequestState) -> None:
        """Scrubs what a row computed beyond the tokens that it keeps, before it continues from there."""
        assert request.slot is not None, f"{request.request_id} goes on without a slot"
        self._slots.scrub(request.slot, request.num_computed)
        request.contents.surplus_scrubbed()

    def abandon(self) -> None:
        """After a failed or interrupted step: ends all owners, and frees and scrubs their slots."""
        self.restoring.drop_all()
        for request in self.owners:
            request.finish_reason = request.finish_reason or FinishReason.ABORT
            request.slot = request.leader = None
            request.num_launches = request.num_pending = 0
        for slot in self._slots.claimed - self._foreign:
            self._slots.abandon([slot])
            self._slots.scrub(slot, 0)
            self._slots.release(slot)
            self._index.remove(slot)
        self._owners.clear()
        if self.states is not None:
            self.states.forget_all()

    def forget_prefixes(self) -> None:
        """Empties the index, so that neither new requests nor those that wait for a leader reuse anything.

        Owners keep their slots, which will not become warm, since they are no longer in the index.
        """
        self._index.clear()
        self.restoring.drop_all()
        if self.states is not None:
            self.states.forget_all()
        for slot in self._slots.warm:
            self._slots.shrink_warm(slot, 0)

    def trim(self) -> None:
        """To be called after some time without work: frees memory, except for a small share for the latest prompts."""
        use = self._slots.budget.use
        num_kept = min(int(_KEPT_WHEN_IDLE * use.num_tokens), _MAX_KEPT_WHEN_IDLE)
        self._shrink_warm(use.num_warm - num_kept, None)
        if self.states is not None:
            self.states.trim(self._index)
        self._slots.give_back()

    def check(self) -> None:
        """Asserts that index, owners and ledger agree."""
        self._slots.check()
        self.restoring.check()
        self._index.check()
        warm = set(self._slots.warm)
        assert warm <= self._index.slots <= warm | set(self._owners), "a warm slot is not known, or a free one is"
        assert self._is_reusing or not warm, "a slot is warm though nothing is reused"
        assert self._slots.claimed - self._foreign == set(self._owners), "a claimed slot has no owner"
        for slot, request in self._owners.items():
            assert request.slot == slot, f"slot {slot} has another owner"
            _check_owner(request, slot, self._slots)

    def _find(self, request: RequestState, tokens: bytes) -> Finding:
        return self._finder.find(request, tokens)

    def _shrink_warm(self, num_missing: int, spared: int | None) -> None:
        """Frees memory for `num_missing` tokens in warm slots, as far as they have it."""
        for spares_read in (True, False):
            for slot, num_valid in self._slots.warm.items():
                if num_missing <= 0:
                    return
                if slot == spared:
                    continue
                num_read = self._slots.num_read_by_others(slot) if spares_read else 0
                num_whole = (num_valid - max(num_missing, _MIN_SHRUNK_TOKENS)) // CHUNK_TOKENS * CHUNK_TOKENS
                num_kept = max(num_whole, num_read, 0)
                num_missing -= CHUNK_TOKENS * (chunks_of(num_valid) - chunks_of(num_kept))
                self._slots.shrink_warm(slot, num_kept)
                self._index.cut(slot, num_kept)

    def _copy(self, request: RequestState, finding: Finding) -> None:
        """Copies the prefix that was found into the request's slot, if it is longer than what is there."""
        source, target, num_tokens = finding.slot, request.slot, finding.num_tokens
        assert target is not None, "a request is placed before anything is copied for it"
        if source is None or num_tokens <= request.num_computed:  # also if the slot is reused in place
            return
        owner = self._owners.get(source)
        num_sound = num_tokens if owner is None else owner.contents.num_sound(owner.num_computed)
        self._slots.copy_prefix(source, target, num_tokens)
        self.worth.note_copy(source)
        if finding.state is not None and self.states is not None:
            self.states.copy_to(target, finding.state)
        request.reuse(num_tokens)
        request.contents.copied(min(num_sound, num_tokens))

    def _forget_sources(self, request: RequestState) -> None:
        """Frees the warm slots that hold what a failed row had reused, because they may be the cause.

        A token was sampled from every warm slot, so it holds no NaN; but an infinite key may spoil one query and not
        another. Slots that share less with the row, or have another salt, are kept: if they are bad, the next request
        that fails because of them frees them.
        """
        if self.states is not None:
            self.states.forget(request, above=request.num_reused if request.may_allow_nothing else 0)
        if not request.num_reused or request.may_allow_nothing:
            return
        self.restoring.forget(request)
        tokens = pack_tokens(request.token_ids[: request.num_reused])
        warm = self._slots.warm
        matches = self._index.match(tokens, request.options.cache_salt)
        doubtful = next((each.slots & warm.keys() for each in matches if each.num_tokens == request.num_reused), set())
        for slot in doubtful:
            self._index.remove(slot)
            self._slots.shrink_warm(slot, 0)


def _choose(finding: Finding, num_tokens: int, slots: SlotLedger) -> int | None:
    """The warm slot that a request of `num_tokens` tokens takes in place; None if it gets another slot."""
    warm, budget = slots.warm, slots.budget
    if finding.slot not in warm:
        return None
    is_next_to_go = not slots.num_free and next(iter(warm)) == finding.slot
    is_little_lost = warm[finding.slot] - finding.num_in_place <= _MAX_LOST_TOKENS
    fits_beside = chunks_of(num_tokens) <= budget.num_obtainable - budget.num_warm_of(finding.slot)
    return finding.slot if is_next_to_go or is_little_lost or not fits_beside else None


def _check_owner(request: RequestState, slot: int, slots: SlotLedger) -> None:
    """Asserts that a request and its slot agree."""
    assert request.num_held == slots.budget.limits[slot], f"{request.request_id} and its memory"
    length = slots.cache_length_of(slot)
    has_ended = request.finish_reason is not None
    assert has_ended or length == request.num_computed, f"{request.request_id} and its slot"
    is_done = has_ended or request.is_yielding or request.num_pending
    assert request.num_launches or not is_done, f"{request.request_id} keeps a slot, or waits for no launch"
    if slots.states is not None and not has_ended:
        slots.states.num_replayed(slot, length)  # ValueError if its state does not lead there
