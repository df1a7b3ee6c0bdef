"""The radix tree over slots, against comparing everything; and where beginnings can be read that were copied."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import CommonPrefixes, PrefixIndex, pack_tokens
from chairlift.plan import CommonPrefix


def index_of(slots: dict[int, list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for slot, tokens in slots.items():
        index.insert(slot, pack_tokens(tokens))
    index.check()
    return index


def matches(index: PrefixIndex, tokens: list[int], salt: str = "") -> list[tuple[int, set[int]]]:
    return [(prefix.num_tokens, set(prefix.slots)) for prefix in index.match(pack_tokens(tokens), salt)]


@pytest.mark.parametrize(
    ("slots", "tokens", "found"),
    [
        ({}, [1, 2, 3], []),
        (
            {0: [1, 2, 3, 4], 1: [1, 2, 3, 9], 2: [1, 5], 3: [7]},
            [1, 2, 3, 4, 5],
            [(4, {0}), (3, {0, 1}), (1, {0, 1, 2})],
        ),
        ({0: [1, 2, 3, 4, 5, 6]}, [1, 2, 3, 4, 9], [(4, {0})]),  # in the middle of an edge
        ({0: [1, 2, 3], 1: [1, 2, 4]}, [1], [(1, {0, 1})]),
        ({0: [1, 2, 3]}, [2, 3], []),
        ({0: [0x01020304, 5]}, [0x01020305, 5], []),  # tokens are compared whole
        ({0: [7, 0x0A0B]}, [7, 0x0B0A], [(1, {0})]),
        ({0: [1, 2], 1: [1, 2]}, [1, 2, 3], [(2, {0, 1})]),
        ({0: [1, 2], 1: [1, 2, 3]}, [1, 2, 3], [(3, {1}), (2, {0, 1})]),
    ],
)
def test_the_longest_prefix_comes_first_and_shorter_ones_hold_more_slots(
    slots: dict[int, list[int]], tokens: list[int], found: list[tuple[int, set[int]]]
) -> None:
    assert matches(index_of(slots), tokens) == found


def test_a_split_is_undone_when_it_tells_nothing_apart_and_a_slot_holds_its_new_tokens_only() -> None:
    index = index_of({0: [1, 2, 3, 4], 1: [1, 2, 9]})
    index.remove(1)
    index.remove(5)  # is not there, which changes nothing
    index.check()
    assert matches(index, [1, 2, 3, 4]) == [(4, {0})]
    index.insert(0, pack_tokens([4, 5]), "a")
    assert (matches(index, [1, 2, 3]), matches(index, [4, 5]), matches(index, [4, 5], "a")) == ([], [], [(2, {0})])


def test_what_follows_a_prefix_comes_from_the_newest_slots_and_a_slot_that_is_cut_is_no_newer() -> None:
    index = index_of({0: [1, 2, 3, 4], 1: [1, 2, 5, 6, 7], 2: [1, 2], 3: [1, 2, 8]})
    index.insert(4, pack_tokens([1, 2, 9]), "a")
    index.cut(0, 3)
    prefix = pack_tokens([1, 2])
    assert index.following(prefix, "", 4, 2) == [[8], [5, 6], [3]]
    assert index.following(prefix, "", 1, 1) == [[8]]
    assert (index.following(prefix, "a", 4, 4), index.following(prefix, "b", 4, 4)) == ([[9]], [])
    assert index.following(pack_tokens([1, 2, 9]), "", 4, 4) == []


TOKENS = st.lists(st.integers(0, 2), max_size=8)
SLOTS = st.integers(0, 5)
SALTS = st.sampled_from(["", "x"])


class Comparison(RuleBasedStateMachine):
    """The index beside a dictionary of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.known: dict[int, tuple[str, list[int]]] = {}

    @rule(slot=SLOTS, tokens=TOKENS, salt=SALTS)
    def insert(self, slot: int, tokens: list[int], salt: str) -> None:
        self.index.insert(slot, pack_tokens(tokens), salt)
        self.known.pop(slot, None)
        self.known[slot] = (salt, tokens)  # the newest last

    @rule(slot=SLOTS)
    def remove(self, slot: int) -> None:
        self.index.remove(slot)
        self.known.pop(slot, None)

    @rule(slot=SLOTS, num_tokens=st.integers(0, 4))
    def cut(self, slot: int, num_tokens: int) -> None:
        if slot in self.known:
            self.index.cut(slot, num_tokens)
            salt, tokens = self.known[slot]
            self.known[slot] = (salt, tokens[:num_tokens])
            if not num_tokens:
                del self.known[slot]

    @rule(tokens=TOKENS, salt=SALTS, num_slots=st.integers(1, 3), num_tokens=st.integers(1, 3))
    def following(self, tokens: list[int], salt: str, num_slots: int, num_tokens: int) -> None:
        size = len(tokens)
        alike = [own for its, own in self.known.values() if its == salt and own[:size] == tokens and len(own) > size]
        newest = [own[size : size + num_tokens] for own in alike[::-1][:num_slots]]
        found = self.index.following(pack_tokens(tokens), salt, num_slots, num_tokens)
        assert found == (newest if tokens else [])

    @rule(tokens=TOKENS, salt=SALTS)
    def match(self, tokens: list[int], salt: str) -> None:
        shared = {slot: _num_shared(own, tokens) for slot, (its, own) in self.known.items() if its == salt}
        found = matches(self.index, tokens, salt)
        best: dict[int, int] = {}
        for num_tokens, slots in found:
            for slot in slots:
                best.setdefault(slot, num_tokens)
        assert best == {slot: num for slot, num in shared.items() if num}
        assert [num for num, _ in found] == sorted((num for num, _ in found), reverse=True)

    @invariant()
    def holds(self) -> None:
        self.index.check()
        assert self.index.slots == set(self.known)


def _num_shared(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


TestComparison = Comparison.TestCase
TestComparison.settings = settings(stateful_step_count=40)


COMMON: dict[str, tuple[list[tuple[int, ...]], dict[int, tuple[int, int]]]] = {
    # Copies (source, target, tokens) and cuts (slot, tokens) in order; then a slot and a length for each slot.
    "a copy is read where it came from": ([(0, 1, 200)], {1: (0, 200), 0: (0, 0)}),
    "a copy of a copy where the first came from": ([(0, 1, 300), (1, 2, 300), (1, 3, 200)], {2: (0, 300), 3: (0, 200)}),
    "a copy of more than its source had copied in that": ([(0, 1, 200), (1, 2, 500)], {2: (1, 500)}),
    "when the first goes, the longest copy takes its part": (
        [(0, 1, 200), (0, 2, 400), (0, 3, 300), (0, 250)],
        {1: (0, 200), 2: (2, 0), 3: (2, 300)},
    ),
    "what is left of a slot": ([(0, 1, 400), (1, 200)], {1: (0, 200)}),
    "nothing, if that is short": ([(0, 1, 400), (1, 200), (1, 127)], {}),
    "nothing of short copies": ([(0, 1, 127)], {}),
}


@pytest.mark.parametrize(("events", "expected"), COMMON.values(), ids=COMMON.keys())
def test_a_prefix_in_common_is_read_where_it_first_was(
    events: list[tuple[int, ...]], expected: dict[int, tuple[int, int]]
) -> None:
    common = CommonPrefixes()
    for event in events:
        if len(event) == 3:
            common.note_copy(*event)
        else:
            common.cut(*event)
    assert {slot: common.of(slot) for slot in expected} == {s: CommonPrefix(*each) for s, each in expected.items()}
    assert bool(common) == bool(expected)


def test_a_reservation_says_what_its_rows_have_in_common() -> None:
    ledger = SlotLedger(4, 512)
    first, second, third = ledger.claim(3)
    ledger.commit([300], ledger.reserve([first], [300]))
    assert ledger.reserve([third]).common_prefixes == ()
    ledger.copy_prefix(first, second, 200)
    assert ledger.reserve([second, first]).common_prefixes == (CommonPrefix(first, 200), CommonPrefix(first, 0))


class Contents(RuleBasedStateMachine):
    """A ledger beside what its slots hold: whatever is said to be in common is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SlotLedger(5, 2000)
        self.contents: dict[int, list[int]] = {slot: [] for slot in range(5)}
        self.num_written = 0

    @property
    def claimed(self) -> list[int]:
        return [slot for slot in range(5) if self.ledger.contains(slot)]

    @rule()
    def claim(self) -> None:
        if self.ledger.slots_remaining:
            (slot,) = self.ledger.claim(1)
            self.contents[slot] = []

    @rule(data=st.data(), kept=st.integers(0, 400))
    def claim_warm(self, data: st.DataObject, kept: int) -> None:
        if self.ledger.warm:
            slot = data.draw(st.sampled_from(sorted(self.ledger.warm)))
            num_kept = min(kept, self.ledger.warm[slot])
            self.ledger.claim_slot(slot, num_kept)
            del self.contents[slot][num_kept:]

    @rule(data=st.data(), count=st.integers(1, 300))
    def write(self, data: st.DataObject, count: int) -> None:
        fits = [slot for slot in self.claimed if self.ledger.cache_length_of(slot) + count <= 2000]
        if fits:
            slot = data.draw(st.sampled_from(fits))
            self.ledger.commit([count], self.ledger.reserve([slot], [count]))
            self.contents[slot] += range(self.num_written, self.num_written + count)
            self.num_written += count

    @rule(data=st.data(), num_tokens=st.integers(0, 600))
    def copy(self, data: st.DataObject, num_tokens: int) -> None:
        if self.claimed:
            target = data.draw(st.sampled_from(self.claimed))
            source = data.draw(st.sampled_from([slot for slot in range(5) if slot != target]))
            num_tokens = min(num_tokens, self.ledger.num_valid(source))
            self.ledger.copy_prefix(source, target, num_tokens)
            self.contents[target] = self.contents[source][:num_tokens]

    @rule(data=st.data(), kept=st.integers(0, 600))
    def release(self, data: st.DataObject, kept: int) -> None:
        if self.claimed:
            slot = data.draw(st.sampled_from(self.claimed))
            num_kept = min(kept, self.ledger.cache_length_of(slot))
            self.ledger.release(slot, num_kept)
            del self.contents[slot][num_kept:]

    @rule(slots=st.sets(st.integers(0, 5)))
    def free_warm(self, slots: set[int]) -> None:
        for slot in slots & self.ledger.warm.keys():
            self.contents[slot] = []
            self.ledger.shrink_warm(slot, 0)

    @invariant()
    def holds(self) -> None:
        self.ledger.check()
        for slot in range(5):
            common = self.ledger._common.of(slot)
            assert self.contents[slot][: common.num_tokens] == self.contents[common.slot][: common.num_tokens]
            assert len(self.contents[slot]) >= common.num_tokens


TestContents = Contents.TestCase
TestContents.settings = settings(stateful_step_count=40)
