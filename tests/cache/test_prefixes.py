"""The radix tree over slots, against comparing everything; and where beginnings can be read that were copied."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import CommonPrefix, CommonPrefixes, PrefixIndex, pack_tokens


def index_of(**slots: list[int]) -> PrefixIndex:
    """Slots by name: `s4=[1, 2]` is slot 4 with the tokens 1 and 2."""
    index = PrefixIndex()
    for name, tokens in slots.items():
        index.insert(int(name[1:]), pack_tokens(tokens))
    index.check()
    return index


def matches(index: PrefixIndex, tokens: list[int], salt: str = "") -> list[tuple[int, set[int]]]:
    return [(prefix.num_tokens, set(prefix.slots)) for prefix in index.match(pack_tokens(tokens), salt)]


def test_an_empty_index_finds_nothing() -> None:
    assert matches(PrefixIndex(), [1, 2, 3]) == []


def test_the_longest_prefix_comes_first_and_shorter_ones_hold_more_slots() -> None:
    index = index_of(s0=[1, 2, 3, 4], s1=[1, 2, 3, 9], s2=[1, 5], s3=[7])
    assert matches(index, [1, 2, 3, 4, 5]) == [(4, {0}), (3, {0, 1}), (1, {0, 1, 2})]


def test_a_prefix_may_end_in_the_middle_of_an_edge() -> None:
    assert matches(index_of(s0=[1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 9]) == [(4, {0})]


def test_what_is_looked_for_may_be_shorter_than_what_is_there() -> None:
    assert matches(index_of(s0=[1, 2, 3], s1=[1, 2, 4]), [1]) == [(1, {0, 1})]


def test_nothing_of_what_begins_otherwise_is_found() -> None:
    assert matches(index_of(s0=[1, 2, 3]), [2, 3]) == []


def test_tokens_are_compared_whole() -> None:
    assert matches(index_of(s0=[0x01020304, 5]), [0x01020305, 5]) == []
    assert matches(index_of(s0=[7, 0x0A0B]), [7, 0x0B0A]) == [(1, {0})]


def test_equal_slots_share_a_node_and_leave_one_by_one() -> None:
    index = index_of(s0=[1, 2], s1=[1, 2])
    assert matches(index, [1, 2, 3]) == [(2, {0, 1})]
    index.remove(0)
    index.check()
    assert matches(index, [1, 2, 3]) == [(2, {1})]
    index.remove(1)
    index.check()
    assert matches(index, [1, 2, 3]) == []


def test_one_slot_may_begin_like_a_whole_other_one() -> None:
    index = index_of(s0=[1, 2], s1=[1, 2, 3])
    assert matches(index, [1, 2, 3]) == [(3, {1}), (2, {0, 1})]


def test_a_slot_inserted_again_holds_its_new_tokens_only() -> None:
    index = index_of(s0=[1, 2, 3])
    index.insert(0, pack_tokens([4, 5]))
    index.check()
    assert matches(index, [1, 2, 3]) == []
    assert matches(index, [4, 5]) == [(2, {0})]


def test_to_remove_a_slot_that_is_not_there_changes_nothing() -> None:
    index = index_of(s0=[1])
    index.remove(5)
    assert matches(index, [1]) == [(1, {0})]


def test_a_split_is_undone_when_it_tells_nothing_apart() -> None:
    index = index_of(s0=[1, 2, 3, 4], s1=[1, 2, 9])
    index.remove(1)
    assert matches(index, [1, 2, 3, 4]) == [(4, {0})]


def test_what_was_inserted_under_one_salt_is_not_found_under_another() -> None:
    index = PrefixIndex()
    index.insert(0, pack_tokens([1, 2]), "a")
    index.insert(1, pack_tokens([1, 2]), "b")
    index.check()
    assert matches(index, [1, 2], "a") == [(2, {0})]
    assert matches(index, [1, 2], "b") == [(2, {1})]
    assert matches(index, [1, 2]) == []
    index.remove(0)
    index.check()
    assert matches(index, [1, 2], "a") == []


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
        self.known[slot] = (salt, tokens)

    @rule(slot=SLOTS)
    def remove(self, slot: int) -> None:
        self.index.remove(slot)
        self.known.pop(slot, None)

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


# --- beginnings of slots that were copied from each other


def test_a_copy_can_be_read_where_it_came_from() -> None:
    common = CommonPrefixes()
    common.note_copy(0, 1, 200)
    assert (common.of(1), common.of(0)) == (CommonPrefix(0, 200), CommonPrefix(0, 0))


def test_a_copy_of_a_copy_is_read_where_the_first_came_from() -> None:
    common = CommonPrefixes()
    common.note_copy(0, 1, 300)
    common.note_copy(1, 2, 300)
    common.note_copy(1, 3, 200)
    assert (common.of(2), common.of(3)) == (CommonPrefix(0, 300), CommonPrefix(0, 200))


def test_a_copy_of_more_than_its_source_had_copied_is_read_in_its_source() -> None:
    common = CommonPrefixes()
    common.note_copy(0, 1, 200)
    common.note_copy(1, 2, 500)
    assert common.of(2) == CommonPrefix(1, 500)


def test_when_the_first_goes_the_longest_copy_takes_its_part() -> None:
    common = CommonPrefixes()
    for target, num_tokens in ((1, 200), (2, 400), (3, 300)):
        common.note_copy(0, target, num_tokens)
    common.cut(0, 250)
    assert [common.of(slot) for slot in (1, 2, 3)] == [CommonPrefix(0, 200), CommonPrefix(2, 0), CommonPrefix(2, 300)]


def test_a_slot_has_in_common_what_is_left_of_it() -> None:
    common = CommonPrefixes()
    common.note_copy(0, 1, 400)
    common.cut(1, 200)
    assert common.of(1) == CommonPrefix(0, 200)
    common.cut(1, 127)
    assert common.of(1) == CommonPrefix(1, 0)
    assert not common


def test_short_prefixes_are_not_noted() -> None:
    common = CommonPrefixes()
    common.note_copy(0, 1, 127)
    assert not common


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
