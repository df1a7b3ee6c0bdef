"""The radix tree over slots: longest common prefixes, by literal examples and against comparing everything."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift.cache.prefixes import PrefixIndex, pack_tokens


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
