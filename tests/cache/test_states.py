"""Recurrent states: where they are, and that a slot's state is that of its tokens whatever happens to the slot."""

from itertools import count

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.cache import ContinuousBatchingKVCacheManager as Manager
from chairlift.cache import KVCacheParams
from chairlift.cache.layout import CacheLayout, StateParams
from chairlift.cache.state_books import StateBooks
from chairlift.cache.states import SlotStates, StatePlace
from chairlift.plan import StateCopy, StateScrub

KEPT = KVCacheParams(torch.float32, n_kv_heads=1, head_dim=2)
STATES = [None, StateParams(3, 2), StateParams(1, 1)]  # by layer
NUM_SLOTS, SLOT_LEN, MAX_TENTATIVE = 4, 24, 3


def make(num_snapshots: int = 0, devices: int = 1) -> Manager:
    params = KVCacheParams(torch.float32, devices, 2, devices)
    return Manager(
        params, NUM_SLOTS, SLOT_LEN, 3, ["cpu"] * devices, None, STATES, num_snapshots, max_tentative=MAX_TENTATIVE
    )


def mixed(state: float, token: float) -> float:
    """A recurrence that any change of order, number or start of its inputs shows in; exact in float32."""
    return (31 * state + token + 1) % 8191


def state_of(tokens: list[int]) -> float:
    state = 0.0
    for token in tokens:
        state = mixed(state, token)
    return state


def recur(states: SlotStates, inputs: list[list[int]]) -> None:
    """Does what a forward pass does, with states whose elements all are `mixed` of the tokens, the inputs."""
    for row, slot in enumerate(states.slots):
        position = states.starts[row] - states.num_replayed[row]
        state = float(states.live[slot, 0]) if position else 0.0
        pending = states.pending[slot, : states.num_replayed[row], 0].tolist()
        num_taken = len(inputs[row]) - states.num_tentative[row]
        for token in (*pending, *inputs[row][:num_taken]):
            state = mixed(state, token)
        states.live[slot] = state
        for place, token in enumerate(inputs[row][num_taken:]):
            states.pending[slot, place] = token


def run(cache: Manager, rows: dict[int, list[int]], tentative: int = 0) -> SlotStates:
    """One step with these new tokens of each slot."""
    inputs = cache.fetch(list(rows), [len(each) for each in rows.values()], 1, [tentative] * len(rows))
    for each in inputs:
        assert each.states is not None
        recur(each.states, list(rows.values()))
    cache.step([len(each) for each in rows.values()], inputs)
    assert inputs[0].states is not None
    return inputs[0].states


# Layout and sizes


def test_each_layer_has_a_range_of_the_row() -> None:
    layout = CacheLayout.of(KEPT, 3, STATES)
    assert layout.states is not None
    assert layout.states.places == (None, StatePlace(0, 3, 0, 2), StatePlace(3, 1, 2, 1))
    assert (layout.states.row_bytes, layout.states.slot_bytes(3)) == (16, 16 + 3 * 12)
    assert not layout.is_plain
    assert CacheLayout.of(KEPT, 3, [None] * 3).states is None


def test_states_count_in_the_size() -> None:
    cache = make(num_snapshots=5)
    (memory,) = cache.state_memories
    assert list(memory.live.shape) == [NUM_SLOTS + 5, 4]
    assert list(memory.pending.shape) == [NUM_SLOTS, MAX_TENTATIVE, 3]
    without = Manager.estimated_memory_size(KEPT, NUM_SLOTS, SLOT_LEN, 3, ["cpu"])
    size = Manager.estimated_memory_size(KEPT, NUM_SLOTS, SLOT_LEN, 3, ["cpu"], STATES, 5, MAX_TENTATIVE)
    assert size - without == memory.live.nbytes + memory.pending.nbytes
    slot_bytes = without // NUM_SLOTS + 16 + 3 * 12
    fitting = [
        Manager.infer_optimal_batch_size(KEPT, SLOT_LEN, 3, 2 * slot_bytes - less, ["cpu"], STATES, MAX_TENTATIVE)
        for less in (0, 1)
    ]
    assert fitting == [2, 1]


def test_states_of_other_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="num_layers is 2, but the states of 3 layers are described"):
        CacheLayout.of(KEPT, 2, STATES)
    with pytest.raises(ValueError, match="num_inputs must be at least 1, not 0"):
        StateParams(4, 0)


def test_without_states_a_forward_gets_none_and_nothing_is_tentative() -> None:
    cache = Manager(KEPT, 2, SLOT_LEN, 1, ["cpu"])
    slots = cache.claim(1)
    assert cache.fetch(slots)[0].states is None
    cache.abandon(slots)
    with pytest.raises(ValueError, match="only be tentative if layers have recurrent states"):
        cache.fetch(slots, [2], 1, [1])


# A slot's life


def test_a_row_says_where_its_state_stands_and_what_to_replay() -> None:
    cache = make()
    (slot,) = cache.claim(1)
    states = run(cache, {slot: [5, 6, 7, 8]}, tentative=2)
    assert (states.starts, states.num_new, states.num_replayed, states.num_tentative) == ((0,), (4,), (0,), (2,))
    cache.rewind(slot, 1)
    states = run(cache, {slot: [9]})
    assert (states.slots, states.starts, states.num_replayed) == ((slot,), (3,), (1,))
    assert states.live[slot].tolist() == [state_of([5, 6, 7, 9])] * 4


def test_more_steps_follow_without_replay() -> None:
    cache = make()
    slots = cache.claim(2)
    run(cache, {slot: [1, 2] for slot in slots}, tentative=1)
    inputs = cache.fetch(slots, [1, 1], num_steps=2)
    (later,) = cache.increment_cache_lengths(inputs, torch.tensor([0, 1, 2], dtype=torch.int32))
    first, second = inputs[0].states, later.states
    assert first is not None
    assert second is not None
    assert (first.starts, first.num_replayed) == ((2, 2), (1, 1))
    assert (second.starts, second.num_new, second.num_replayed, second.num_tentative) == (
        (3, 3),
        (1, 1),
        (0, 0),
        (0, 0),
    )


def test_surplus_steps_leave_a_state_that_nobody_can_use() -> None:
    cache = make()
    (slot,) = cache.claim(1)
    inputs = cache.fetch([slot], [4], num_steps=3)
    cache.step([4], inputs)
    with pytest.raises(ValueError, match="cannot go on after 4 tokens: its state has taken 0"):
        cache.fetch([slot])
    cache.release(slot, 4)
    cache.claim_slot(slot)
    assert run(cache, {slot: [3]}).live[slot].tolist() == [state_of([3])] * 4


@pytest.mark.parametrize(
    ("new", "steps", "tentative", "most"), [(2, 1, 3, 2), (9, 1, 4, 3), (1, 2, 1, 0), (1, 1, -1, 1)]
)
def test_only_a_few_of_the_new_tokens_can_be_tentative(new: int, steps: int, tentative: int, most: int) -> None:
    cache = make()
    (slot,) = cache.claim(1)
    with pytest.raises(ValueError, match=f"{tentative} of {new} new tokens cannot be tentative, {most} can"):
        cache.fetch([slot], [new], steps, [tentative])
    with pytest.raises(ValueError, match="1 sequences, but num_tentative has 2 entries"):
        cache.fetch([slot], [new], steps, [0, 0])
    cache.fetch([slot], [new], steps)  # it is not in flight


def test_a_copied_prefix_needs_a_copied_state() -> None:
    cache = make(num_snapshots=1)
    source, target = cache.claim(2)
    run(cache, {source: [1, 2, 3]})
    snapshot = NUM_SLOTS
    cache.owed.append(StateCopy(source, snapshot))
    run(cache, {source: [4]})
    cache.copy_prefix(source, target, 3)
    with pytest.raises(ValueError, match="its state has taken 0"):
        cache.fetch([target])
    cache.copy_state(snapshot, target)
    assert run(cache, {target: [7]}).live[target].tolist() == [state_of([1, 2, 3, 7])] * 4
    plain = Manager(KEPT, 1, SLOT_LEN, 1, ["cpu"])
    plain.claim(1)
    with pytest.raises(ValueError, match="no state can be copied to slot 0, since no layer has one"):
        plain.copy_state(0, 0)


def test_a_slot_that_is_claimed_anew_still_has_the_state_until_something_is_computed() -> None:
    cache = make()
    source, other = cache.claim(2)
    run(cache, {source: [1, 2, 3]})
    cache.copy_prefix(source, other, 3)
    cache.release(source, 3)
    cache.claim_slot(source)
    cache.copy_prefix(other, source, 3)
    cache.copy_state(source, source)
    assert run(cache, {source: [4]}).live[source].tolist() == [state_of([1, 2, 3, 4])] * 4


def test_an_abandoned_row_has_no_state_left() -> None:
    cache = make()
    (slot,) = cache.claim(1)
    run(cache, {slot: [1, 2]})
    cache.fetch([slot])
    cache.abandon([slot])
    with pytest.raises(ValueError, match="its state has taken 0"):
        cache.fetch([slot])


def test_every_device_has_the_states() -> None:
    cache = make(devices=2)
    (slot,) = cache.claim(1)
    run(cache, {slot: [1, 2]})
    assert [memory.live[slot].tolist() for memory in cache.state_memories] == [[state_of([1, 2])] * 4] * 2


def test_memory_of_states_that_nobody_needs_is_given_back() -> None:
    cache = make(num_snapshots=1)
    warm, free = cache.claim(2)
    run(cache, {warm: [1, 2, 3], free: [4, 5]}, tentative=1)
    cache.release(warm, 3)
    cache.release(free, 0)
    cache.give_back()
    assert [job for job in cache.owed if isinstance(job, StateScrub)] == [StateScrub(free)]
    cache.settle()
    (memory,) = cache.state_memories
    assert memory.live[free].tolist() == [0] * 4
    assert not memory.pending[free].any()
    cache.claim_slot(warm, 3)
    assert run(cache, {warm: [9]}).live[warm].tolist() == [state_of([1, 2, 3, 9])] * 4


class Slots(RuleBasedStateMachine):
    """`tokens` holds what claimed slots have, `warm` what is valid in others."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(num_snapshots=2)
        self.tokens: dict[int, list[int]] = {}
        self.warm: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}
        self.numbers = count()

    @precondition(lambda self: len(self.tokens) < NUM_SLOTS)
    @rule()
    def claim(self) -> None:
        (slot,) = self.cache.claim(1)
        self.warm.pop(slot, None)
        self.tokens[slot] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_new=st.integers(1, 5), tentative=st.integers(0, 3), num_wrong=st.integers(0, 3))
    def compute(self, data: st.DataObject, num_new: int, tentative: int, num_wrong: int) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        slots = [slot for slot in slots if self._can_go_on(slot, num_new)]
        tentative = min(tentative, num_new)
        new = {slot: [next(self.numbers) % 97 for _ in range(num_new)] for slot in slots}
        run(self.cache, new, tentative)
        for slot, tokens in new.items():
            self.tokens[slot] += tokens
            num_back = min(num_wrong, tentative)
            self.cache.rewind(slot, num_back)
            del self.tokens[slot][len(self.tokens[slot]) - num_back :]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_lost=st.integers(0, 4))
    def release(self, data: st.DataObject, num_lost: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = self.tokens.pop(slot)
        kept = tokens[: max(len(tokens) - num_lost, 0)]
        self.cache.release(slot, len(kept))
        if kept:
            self.warm[slot] = kept

    @precondition(lambda self: self.warm)
    @rule(data=st.data(), num_lost=st.integers(0, 4))
    def claim_in_place(self, data: st.DataObject, num_lost: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.warm)))
        tokens = self.warm.pop(slot)
        self.tokens[slot] = tokens[: max(len(tokens) - num_lost, 0)]
        self.cache.claim_slot(slot, len(self.tokens[slot]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), snapshot=st.integers(0, 1))
    def keep(self, data: st.DataObject, snapshot: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.snapshots[snapshot] = self.tokens[slot][: self._books.position(slot)]
        self.cache.owed.append(StateCopy(slot, NUM_SLOTS + snapshot))

    @precondition(lambda self: self.tokens and self.snapshots)
    @rule(data=st.data(), snapshot=st.integers(0, 1))
    def restore(self, data: st.DataObject, snapshot: int) -> None:
        slot, tokens = data.draw(st.sampled_from(sorted(self.tokens))), self.snapshots.get(snapshot, [])
        if tokens and self.tokens[slot][: len(tokens)] == tokens:
            self.cache.rewind(slot, len(self.tokens[slot]) - len(tokens))
            self.cache.copy_state(NUM_SLOTS + snapshot, slot)
            self.tokens[slot] = list(tokens)

    @invariant()
    def states_are_those_of_the_tokens(self) -> None:
        self.cache.check()
        self.cache.settle()
        (memory,) = self.cache.state_memories
        for slot, tokens in {**self.tokens, **self.warm}.items():
            position, reach = self._books.position(slot), self._books.reach(slot)
            assert 0 <= position <= reach <= len(tokens)
            assert not position or float(memory.live[slot, 3]) == state_of(tokens[:position])
            assert memory.pending[slot, : reach - position, 2].tolist() == tokens[position:reach]
        for snapshot, tokens in self.snapshots.items():
            assert not tokens or float(memory.live[NUM_SLOTS + snapshot, 0]) == state_of(tokens)

    @property
    def _books(self) -> StateBooks:
        assert self.cache.states is not None
        return self.cache.states

    def _can_go_on(self, slot: int, num_new: int) -> bool:
        length = len(self.tokens[slot])
        return length + num_new <= SLOT_LEN and self._books.position(slot) <= length <= self._books.reach(slot)


TestSlots = Slots.TestCase
TestSlots.settings = settings(stateful_step_count=30)
