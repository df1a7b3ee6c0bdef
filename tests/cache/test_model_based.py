"""Random sequences of calls, right ones and wrong ones, against a model of dictionaries."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.cache import (
    CacheFull,
    ContinuousBatchingKVCacheCollection,
    ContinuousBatchingKVCacheManager,
    KVCacheParams,
)

NUM_SLOTS = 5
MAX_SEQ_LEN = 12

seq_ids = st.integers(-1, NUM_SLOTS)  # one beyond either end
claimable = st.integers(0, NUM_SLOTS - 1)


@dataclass(frozen=True)
class Launch:
    """A fetch that was answered."""

    rows: list[int]
    num_reserved: list[int]
    inputs: list[ContinuousBatchingKVCacheCollection]


class Cache(RuleBasedStateMachine):
    """`lengths` holds claimed slots and their tokens, `warm` slots in the order of their use and what is valid in them,
    `flying` the launches under way, `landed` those of the past.
    """

    def __init__(self) -> None:
        super().__init__()
        params = KVCacheParams(torch.float32, n_kv_heads=2, head_dim=2, n_devices=2)
        self.manager = ContinuousBatchingKVCacheManager(params, NUM_SLOTS, MAX_SEQ_LEN, 1, ["cpu", "cpu"])
        self.lengths: dict[int, int] = {}
        self.warm: dict[int, int] = {}
        self.flying: list[Launch] = []
        self.landed: list[Launch] = []

    @rule(num_wanted=st.integers(-1, 4))
    def claim(self, num_wanted: int) -> None:
        num_free = NUM_SLOTS - len(self.lengths)
        if num_wanted < 0:
            with pytest.raises(ValueError, match="-1"):
                self.manager.claim(num_wanted)
        elif num_wanted > num_free:
            with pytest.raises(CacheFull, match=f"asked for {num_wanted} cache slots, {num_free} are free"):
                self.manager.claim(num_wanted)
        else:
            free = sorted(set(range(NUM_SLOTS)) - set(self.lengths) - set(self.warm))
            claimed = self.manager.claim(num_wanted)
            assert claimed == [*free, *self.warm][:num_wanted], "free slots first, then the least recently used"
            for seq_id in claimed:
                self.warm.pop(seq_id, None)
            self.lengths.update(dict.fromkeys(claimed, 0))

    @rule(seq_id=seq_ids, num_kept=st.integers(-1, 6))
    def claim_slot(self, seq_id: int, num_kept: int) -> None:
        is_claimable = seq_id not in self.lengths and 0 <= seq_id < NUM_SLOTS
        if not is_claimable or not 0 <= num_kept <= self.warm.get(seq_id, 0):
            with pytest.raises(ValueError, match=f"slot {seq_id} (is|has)"):
                self.manager.claim_slot(seq_id, num_kept)
        else:
            self.manager.claim_slot(seq_id, num_kept)
            self.warm.pop(seq_id, None)
            self.lengths[seq_id] = num_kept

    @rule(source=claimable, goal=claimable, num_tokens=st.integers(-1, 6))
    def copy_prefix(self, source: int, goal: int, num_tokens: int) -> None:
        num_valid = self.lengths.get(source, self.warm.get(source, 0))
        is_possible = goal in self.lengths and goal not in self._in_flight() and source != goal
        if not is_possible or not 0 <= num_tokens <= num_valid:
            with pytest.raises(ValueError, match=r"^slot \d"):
                self.manager.copy_prefix(source, goal, num_tokens)
        else:
            self.manager.copy_prefix(source, goal, num_tokens)
            self.lengths[goal] = num_tokens
            if source in self.warm:
                self.warm[source] = self.warm.pop(source)

    @rule(rows=st.lists(st.tuples(seq_ids, st.integers(-1, 6)), min_size=1, max_size=3), num_steps=st.integers(1, 3))
    def fetch_anything(self, rows: list[tuple[int, int]], num_steps: int) -> None:
        self._fetch([seq_id for seq_id, _ in rows], [count for _, count in rows], num_steps)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), num_steps=st.integers(1, 3))
    def fetch_claimed(self, data: st.DataObject, num_steps: int) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True))
        counts = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
        self._fetch(rows, counts, num_steps)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        launch = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        valid = [data.draw(st.integers(0, reserved)) for reserved in launch.num_reserved]
        self.manager.step(valid, launch.inputs)
        for seq_id, count in zip(launch.rows, valid, strict=True):
            self.lengths[seq_id] += count
        self.landed.append(launch)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), excess=st.integers(1, 3))
    def step_too_much(self, data: st.DataObject, excess: int) -> None:
        launch = data.draw(st.sampled_from(self.flying))
        with pytest.raises(ValueError, match=f"slot {launch.rows[-1]}: cannot commit"):
            self.manager.step([*launch.num_reserved[:-1], launch.num_reserved[-1] + excess], launch.inputs)

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def step_again(self, data: st.DataObject) -> None:
        launch = data.draw(st.sampled_from(self.landed))
        with pytest.raises(ValueError, match="is not in flight"):
            self.manager.step([0] * len(launch.rows), launch.inputs)

    @rule(seq_id=seq_ids, num_kept=st.integers(-1, 6))
    def release(self, seq_id: int, num_kept: int) -> None:
        is_idle = seq_id in self.lengths and seq_id not in self._in_flight()
        if not is_idle or not 0 <= num_kept <= self.lengths[seq_id]:
            with pytest.raises(ValueError, match=f"slot {seq_id} (is|has)"):
                self.manager.release(seq_id, num_kept)
        else:
            self.manager.release(seq_id, num_kept)
            del self.lengths[seq_id]
            if num_kept:
                self.warm[seq_id] = num_kept

    @rule(seq_id=claimable, num_tokens=st.integers(-1, 6))
    def rewind(self, seq_id: int, num_tokens: int) -> None:
        is_idle = seq_id in self.lengths and seq_id not in self._in_flight()
        if not is_idle or not 0 <= num_tokens <= self.lengths[seq_id]:
            with pytest.raises(ValueError, match=f"slot {seq_id}(:| is)"):
                self.manager.rewind(seq_id, num_tokens)
        else:
            self.manager.rewind(seq_id, num_tokens)
            self.lengths[seq_id] -= num_tokens

    @rule(seq_id=claimable, num_kept=st.integers(-1, 6))
    def shrink_warm(self, seq_id: int, num_kept: int) -> None:
        if not 0 <= num_kept <= self.warm.get(seq_id, -1):
            with pytest.raises(ValueError, match=f"slot {seq_id} (is|has)"):
                self.manager.shrink_warm(seq_id, num_kept)
        else:
            self.manager.shrink_warm(seq_id, num_kept)
            self.warm[seq_id] = num_kept
            if not num_kept:
                del self.warm[seq_id]

    @invariant()
    def the_books_agree(self) -> None:
        self.manager.check()
        assert self.manager.slots_remaining == NUM_SLOTS - len(self.lengths)
        assert list(self.manager.warm.items()) == list(self.warm.items())
        assert self.manager.num_free == NUM_SLOTS - len(self.lengths) - len(self.warm)
        for seq_id in range(-1, NUM_SLOTS + 1):
            assert self.manager.contains(seq_id) == (seq_id in self.lengths)
            assert self.manager.num_valid(seq_id) == self.lengths.get(seq_id, self.warm.get(seq_id, 0))
        assert {seq_id: self.manager.cache_length_of(seq_id) for seq_id in self.lengths} == self.lengths

    def teardown(self) -> None:
        self.manager.check_memory()

    def _in_flight(self) -> set[int]:
        return {seq_id for launch in self.flying for seq_id in launch.rows}

    def _is_legal(self, rows: list[int], counts: list[int], num_steps: int) -> bool:
        return (
            len(set(rows)) == len(rows)
            and set(rows) <= set(self.lengths) - self._in_flight()
            and min(counts) >= 0
            and all(
                self.lengths[seq_id] + count + num_steps - 1 <= MAX_SEQ_LEN
                for seq_id, count in zip(rows, counts, strict=True)
            )
        )

    def _fetch(self, rows: list[int], counts: list[int], num_steps: int) -> None:
        if not self._is_legal(rows, counts, num_steps):
            with pytest.raises(ValueError, match=r"^slot -?\d+"):
                self.manager.fetch(rows, counts, num_steps)
            return
        inputs = self.manager.fetch(rows, counts, num_steps)
        lengths = [self.lengths[seq_id] for seq_id in rows]
        for collection in inputs:
            assert collection.lookup_table.tolist() == rows
            assert collection.cache_lengths.tolist() == lengths
            assert collection.is_cache_empty == (set(lengths) == {0})
            assert collection.max_seq_length == max(counts)
            assert collection.max_cache_length == max(map(sum, zip(lengths, counts, strict=True)))
        self.flying.append(Launch(rows, [count + num_steps - 1 for count in counts], inputs))


TestCache = Cache.TestCase
TestCache.settings = settings(stateful_step_count=30)
