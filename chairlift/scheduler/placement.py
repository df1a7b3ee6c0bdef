"""Which slot a request gets, and how much of its prompt need not be computed because some slot holds it.

A request that ends leaves its slot warm. A new one gets, in this order:

1. the warm slot that shares the longest prefix with it, as it is, if little else in that slot would be lost, or if it
   would be the next to go anyhow;
2. a free slot, or the least recently used warm one, into which the longest prefix is copied from the slot that holds
   it, warm or running. A copy moves bytes that otherwise would have to be computed, layer by layer.

At least one token is left to compute, so that there are logits. If a prompt is being computed that shares even more,
the request sits in its slot for that step, and then copies it: equal prompts are computed once.
"""

from dataclasses import dataclass

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, pack_tokens
from chairlift.scheduler.plan import SlotCopy
from chairlift.scheduler.request import Request

_MAX_LOST_TOKENS = 64  # behind a shared prefix in a warm slot: fewer are not worth a copy
_MIN_AWAITED_TOKENS = 16  # fewer are sooner computed than waited for


@dataclass(frozen=True, slots=True)
class Unproven:
    """Contents of a slot that nobody has sampled from, from a token on: whether they are numbers is not known."""

    slot: int
    start: int


@dataclass(frozen=True, slots=True)
class _Finding:
    """Where a request's longest prefix is, and whose prompt, being computed, will be a longer one."""

    slot: int | None = None
    num_tokens: int = 0
    leader: Request | None = None


class Placement:
    """Gives requests their slots, and keeps what slots of earlier ones hold in mind."""

    def __init__(self, slots: SlotLedger, enable_prefix_caching: bool) -> None:
        self._slots = slots
        self._index = PrefixIndex() if enable_prefix_caching else None
        self._owners: dict[int, Request] = {}
        self._num_to_prove: dict[int, int] = {}  # by target of a copy not made yet: tokens known to be numbers

    def place(self, request: Request) -> SlotCopy | None:
        """A slot for the request, which there must be, and what has to be copied into it first."""
        tokens = pack_tokens(request.token_ids)
        finding = self._find(request, tokens)
        slot = self._choose(finding)
        if slot is not None:
            self._slots.claim_slot(slot, finding.num_tokens)
            request.num_reused = finding.num_tokens
        else:
            (slot,) = self._slots.claim(1)
            request.num_reused = 0
        request.slot = slot
        request.num_computed = request.num_reused_proven = request.num_reused
        request.is_proven = request.has_bad_surplus = False
        self._owners[slot] = request
        if self._index is not None:
            self._index.insert(slot, tokens, request.options.cache_salt)
        return self._follow_or_copy(request, finding)

    def follow(self, request: Request) -> SlotCopy | None:
        """For a request that waited: what has to be copied into its slot, unless it has to wait for somebody else."""
        return self._follow_or_copy(request, self._find(request, pack_tokens(request.token_ids)))

    def note_copied(self, copy: SlotCopy) -> None:
        """What was planned has been done: before that nobody may count on it."""
        self._owners[copy.target].num_reused_proven = self._num_to_prove.pop(copy.target)

    def release(self, request: Request, *, is_spoilt: bool = False) -> Unproven | None:
        """Its slot is warm, as far as what is in it is known to be numbers; the rest of it is returned.

        `is_spoilt`: what it holds may be no numbers, and so may be what it was copied from.
        """
        slot = request.slot
        assert slot is not None, f"{request.request_id} has no slot to release"
        num_kept = request.num_proven
        if is_spoilt:
            num_kept = 0
            if request.grammar is None:  # or the grammar may have failed, which is no reason to distrust the others
                self._forget_warm()
        is_doubtful = is_spoilt or request.has_bad_surplus or request.num_computed > num_kept
        unproven = Unproven(slot, num_kept) if is_doubtful else None
        if self._index is None:
            num_kept = 0
        elif num_kept:
            self._index.insert(slot, pack_tokens(request.token_ids[:num_kept]), request.options.cache_salt)
        else:
            self._index.remove(slot)
        self._slots.release(slot, num_kept)
        del self._owners[slot]
        self._num_to_prove.pop(slot, None)
        request.slot = request.leader = None
        return unproven

    def check(self) -> None:
        """Asserts that the index knows what the books know."""
        self._slots.check()
        warm = self._slots.warm
        if self._index is not None:
            self._index.check()
            assert self._index.slots <= set(warm) | set(self._owners), "a free slot has a prefix"
            assert set(warm) <= self._index.slots, "a warm slot is not known"
        else:
            assert not warm, "a slot is warm though nothing is reused"
        assert all(request.slot == slot for slot, request in self._owners.items()), "a slot has another owner"

    def _find(self, request: Request, tokens: bytes) -> _Finding:
        if self._index is None or request.wants_prompt_scored:
            return _Finding()
        most = len(request.token_ids) - 1
        slot, num_tokens, leader, num_awaited = None, 0, None, 0
        seen: set[int] = set()
        for prefix in self._index.match(tokens, request.options.cache_salt):
            num_shared = min(prefix.num_tokens, most)
            if num_shared <= num_tokens:
                break
            for candidate in prefix.slots - seen:
                num_valid = min(num_shared, self._slots.num_valid(candidate))
                if num_valid > num_tokens:
                    slot, num_tokens = candidate, num_valid
                owner = self._owners.get(candidate)
                if leader is None and num_valid < num_shared and owner is not None and self._can_lead(owner, request):
                    leader, num_awaited = owner, num_shared
            seen |= prefix.slots
        if num_awaited < num_tokens + _MIN_AWAITED_TOKENS:
            leader = None
        return _Finding(slot, num_tokens, leader)

    def _can_lead(self, owner: Request, request: Request) -> bool:
        """Only who waits for nobody leads: so nobody waits for himself."""
        return owner is not request and owner.leader is None and _is_computing(owner)

    def _follow_or_copy(self, request: Request, finding: _Finding) -> SlotCopy | None:
        request.leader = finding.leader
        if finding.leader is not None:
            return None  # the whole prefix will be copied in one piece
        return self._copy(request, finding)

    def _choose(self, finding: _Finding) -> int | None:
        """The warm slot that the request gets as it is; None if it gets another."""
        warm = self._slots.warm
        if finding.slot not in warm:
            return None
        is_next_to_go = not self._slots.num_free and next(iter(warm)) == finding.slot
        is_little_lost = warm[finding.slot] - finding.num_tokens <= _MAX_LOST_TOKENS
        return finding.slot if is_next_to_go or is_little_lost else None

    def _copy(self, request: Request, finding: _Finding) -> SlotCopy | None:
        """The prefix that was found comes into the request's slot, if it is longer than what is there."""
        target = request.slot
        assert target is not None, "a request is placed before anything is copied for it"
        if finding.slot is None or finding.num_tokens <= request.num_computed:  # as it is of its own slot
            return None
        owner = self._owners.get(finding.slot)
        self._num_to_prove[target] = finding.num_tokens if owner is None else min(owner.num_proven, finding.num_tokens)
        self._slots.copy_prefix(finding.slot, target, finding.num_tokens)
        request.num_computed = request.num_reused = finding.num_tokens
        request.num_reused_proven = 0
        return SlotCopy(finding.slot, target, finding.num_tokens)

    def _forget_warm(self) -> None:
        if self._index is not None:
            for slot in self._slots.warm:
                self._index.remove(slot)
        self._slots.free_warm()


def _is_computing(owner: Request) -> bool:
    return owner.slot is not None and owner.finish_reason is None
