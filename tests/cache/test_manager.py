"""The manager, call by call: what each does, what each refuses, and that a refusal changes nothing.

What fetch gives, a borrowed view: what it shares with the blocks, and how a launch moves it on. Calls in any order,
right and wrong ones, and the numbers of a view: test_model_based.py.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from chairlift.cache import CacheFull, InputSymbol, KVCacheParams
from chairlift.cache import ContinuousBatchingKVCacheManager as Manager
from chairlift.cache.memory import DenseMemory
from chairlift.errors import ChairliftError

PARAMS = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=8)
SPLIT = KVCacheParams(torch.bfloat16, n_kv_heads=4, head_dim=8, n_devices=2)
on_one_device_and_two = pytest.mark.parametrize("params", [PARAMS, SPLIT], ids=["one device", "two"])


def make_manager(num_slots: int = 16, max_seq_len: int = 32, params: KVCacheParams = PARAMS) -> Manager:
    return Manager(params, num_slots, max_seq_len, num_layers=3, devices=["cpu"] * params.n_devices)


def grow(manager: Manager, lengths: dict[int, int]) -> None:
    """Commits that many tokens to those claimed slots."""
    manager.step(list(lengths.values()), manager.fetch(list(lengths), list(lengths.values())))


def books(manager: Manager) -> tuple[int, dict[int, int]]:
    """Free slots, and the length of every claimed one."""
    claimed = [seq_id for seq_id in range(manager.max_cache_batch_size) if manager.contains(seq_id)]
    return manager.slots_remaining, {seq_id: manager.cache_length_of(seq_id) for seq_id in claimed}


# Shapes and sizes


@on_one_device_and_two
def test_each_device_has_zeroed_blocks_of_all_slots_for_its_heads_as_estimated(params: KVCacheParams) -> None:
    manager = make_manager(params=params)
    assert manager.block_shape(5) == [5, 2, 3, 32, 4 // params.n_devices, 8]
    assert manager.devices == [torch.device("cpu")] * params.n_devices
    assert len({blocks.data_ptr() for blocks in manager.blocks}) == params.n_devices
    for blocks in manager.blocks:
        assert (list(blocks.shape), blocks.dtype) == (manager.block_shape(16), params.dtype)
        assert blocks.count_nonzero() == 0
    inputs = manager.fetch(manager.claim(16))
    num_bytes = sum(c.blocks.nbytes + c.cache_lengths.nbytes + c.lookup_table.nbytes for c in inputs)
    assert Manager.estimated_memory_size(params, 16, 32, 3, manager.devices) == num_bytes


@pytest.mark.parametrize(
    ("num_layers", "devices", "said"),
    [
        (3, [], "n_devices is 1, but 0 devices"),
        (3, ["cpu", "cpu"], "n_devices is 1, but 2 devices"),
        (0, ["cpu"], "num_layers must be at least 1, not 0"),
    ],
)
def test_a_cache_that_makes_no_sense_is_refused(num_layers: int, devices: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Manager(PARAMS, 16, 32, num_layers, devices)


@pytest.mark.parametrize(
    ("params", "available_bytes", "num_slots"),
    [
        # A slot takes 2 x 3 layers x 32 tokens x 4 heads x 8 x 4 bytes, and 8 of length and lookup.
        *((PARAMS, 7 * 24584, 7), (PARAMS, 7 * 24584 - 1, 6), (PARAMS, 7 * 24584 + 24583, 7)),
        *((PARAMS, 24583, 0), (PARAMS, 0, 0), (PARAMS, -1, 0)),
        # The same in 2 bytes, the heads on two devices, length and lookup on both.
        *((SPLIT, 7 * 2 * 6152, 7), (SPLIT, 7 * 2 * 6152 - 1, 6)),
    ],
)
def test_as_many_slots_are_inferred_as_fit(params: KVCacheParams, available_bytes: int, num_slots: int) -> None:
    assert Manager.infer_optimal_batch_size(params, 32, 3, available_bytes, ["cpu"] * params.n_devices) == num_slots


def test_input_symbols_name_the_four_inputs_of_each_device() -> None:
    one = (
        InputSymbol("blocks", torch.bfloat16, ("num_slots", 2, 3, 32, 2, 8)),
        InputSymbol("cache_lengths", torch.int32, ("batch_size",)),
        InputSymbol("lookup_table", torch.int32, ("batch_size",)),
        InputSymbol("is_cache_empty", torch.bool, ()),
    )
    assert make_manager(params=SPLIT).input_symbols() == [one, one]


# Refusals


def test_claiming_more_than_are_free_says_how_many_and_claims_none() -> None:
    manager = make_manager(16)
    manager.claim(12)
    with pytest.raises(CacheFull, match="asked for 5 cache slots, 4 are free") as caught:
        manager.claim(5)
    assert (caught.value.num_asked, caught.value.num_free, manager.slots_remaining) == (5, 4, 4)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ChairliftError)


def test_a_refused_fetch_changes_nothing() -> None:
    manager = make_manager(8)
    manager.claim(4)
    grow(manager, {0: 7, 1: 30})
    in_flight = manager.fetch([3])
    for rows, counts, said in (([0, 3], [1, 1], "slot 3 is in flight"), ([0, 1], [1, 3], "slot 1 would overrun")):
        with pytest.raises(ValueError, match=said):
            manager.fetch(rows, counts)
        assert books(manager) == (4, {0: 7, 1: 30, 2: 0, 3: 0})
    manager.step([1, 1, 1], manager.fetch([2, 0, 1]))  # none of them was left in flight
    manager.step([1], in_flight)  # and the one that was still is
    assert books(manager) == (4, {0: 8, 1: 31, 2: 1, 3: 1})
    manager.check()


def test_inputs_that_no_fetch_gave_cannot_be_committed() -> None:
    manager = make_manager()
    manager.claim(1)
    for inputs in ([], [replace(collection, reservation=None) for collection in manager.fetch([0])]):
        with pytest.raises(ValueError, match="do not come from fetch"):
            manager.step([1], inputs)
    assert books(manager)[1] == {0: 0}


# Many threads, two devices


def test_threads_may_use_the_manager_at_the_same_time() -> None:
    manager = Manager(SPLIT, 5, 16, num_layers=1, devices=["cpu", "cpu"])
    switch_interval = sys.getswitchinterval()
    owners: dict[int, int] = {}  # slot -> thread; setdefault is atomic

    def serve(thread: int) -> int:
        num_served = 0
        while num_served < 20:
            try:
                rows = manager.claim(2)
            except CacheFull:
                continue
            assert [owners.setdefault(seq_id, thread) for seq_id in rows] == [thread, thread]
            manager.step([5, 2], manager.fetch(rows, [5, 3]))
            inputs = manager.fetch(rows[::-1])
            assert [collection.cache_lengths.tolist() for collection in inputs] == [[2, 5], [2, 5]]
            manager.step([1, 1], inputs)
            assert [manager.cache_length_of(seq_id) for seq_id in rows] == [6, 3]
            manager.check()
            for seq_id in rows:
                del owners[seq_id]
                manager.release(seq_id)
            num_served += 1
        return num_served

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(serve, range(4))) == [20, 20, 20, 20]
    finally:
        sys.setswitchinterval(switch_interval)
    assert books(manager) == (5, {})
    manager.check()


# Copies


@on_one_device_and_two
def test_a_prefix_is_copied_in_all_layers_on_every_device_and_nothing_else_is(params: KVCacheParams) -> None:
    manager = make_manager(4, params=params)
    for blocks in manager.blocks:
        blocks.normal_()
    before = [blocks.clone() for blocks in manager.blocks]
    source, target = manager.claim(2)
    grow(manager, {source: 9})
    manager.copy_prefix(source, target, 7)
    assert manager.cache_length_of(target) == 7
    manager.settle()
    for blocks, old in zip(manager.blocks, before, strict=True):
        assert torch.equal(blocks[target, :, :, :7], old[source, :, :, :7])
        assert torch.equal(blocks[target, :, :, 7:], old[target, :, :, 7:])
        others = [slot for slot in range(4) if slot != target]
        assert torch.equal(blocks[others], old[others])


def test_what_the_books_owe_the_blocks_is_done_in_order_before_anything_is_fetched() -> None:
    manager = make_manager(3)
    (blocks,) = manager.blocks
    blocks.normal_()
    before = blocks.clone()
    source, target, reader = manager.claim(3)
    grow(manager, {source: 9})
    manager.copy_prefix(source, target, 7)
    manager.scrub(source, 2)
    manager.scrub(target, 5)
    assert torch.equal(blocks, before)
    manager.fetch([reader])
    assert torch.equal(blocks[target, :, :, :5], before[source, :, :, :5])
    assert torch.equal(blocks[source, :, :, :2], before[source, :, :, :2])
    assert not blocks[target, :, :, 5:].any()
    assert not blocks[source, :, :, 2:].any()
    assert not manager.owed


def test_an_interrupt_amid_what_is_owed_leaves_none_of_it_out() -> None:
    scrubbed: list[int] = []

    class InterruptedMemory(DenseMemory):
        def clear(self, slot: int, start: int, end: int) -> None:
            scrubbed.append(slot)
            if len(scrubbed) == 2:
                raise KeyboardInterrupt
            super().clear(slot, start, end)

    manager = Manager(PARAMS, 3, 32, num_layers=3, devices=["cpu"], allocate=InterruptedMemory)
    manager.blocks[0].normal_()
    for slot in manager.claim(3):
        manager.grow(slot, 32)
        manager.scrub(slot, 0)
    with pytest.raises(KeyboardInterrupt):
        manager.settle()
    manager.settle()
    assert scrubbed == [0, 1, 1, 2]
    assert not manager.blocks[0].any()


# What fetch gives: views


def with_lengths(n_devices: int = 1) -> Manager:
    """Eight slots of 16 tokens, 4 heads of 8 in all; slots 0 to 5 are claimed, with 0, 1, ..., 5 tokens."""
    manager = make_manager(8, 16, replace(PARAMS, n_devices=n_devices))
    manager.claim(6)
    grow(manager, {slot: slot for slot in range(6)})
    return manager


def offsets(*row_lengths: int) -> torch.Tensor:
    """int32 `[batch + 1]`: where rows of these lengths begin and end."""
    return torch.tensor([0, *row_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def test_indices_are_int32_on_the_device_and_the_rest_is_on_the_host() -> None:
    (collection,) = with_lengths().fetch([4, 0, 2])  # without counts: a token for each
    assert collection.lookup_table.dtype == collection.cache_lengths.dtype == torch.int32
    assert collection.lookup_table.device == collection.cache_lengths.device == collection.blocks.device
    assert type(collection.is_cache_empty) is bool
    numbers = [collection.max_seq_length, collection.max_cache_length, *map(collection.cache_length, range(3))]
    assert (numbers, {type(number) for number in numbers}) == ([1, 5, 4, 0, 2], {int})


def test_a_fetch_is_a_picture_that_later_commits_do_not_change() -> None:
    manager = with_lengths()
    (collection,) = manager.fetch([2, 3], [4, 4])
    manager.step([4, 4], [collection])
    assert collection.cache_lengths.tolist() == [2, 3]
    assert manager.fetch([2, 3])[0].cache_lengths.tolist() == [6, 7]


def test_key_and_value_caches_are_views_of_the_blocks() -> None:
    manager = with_lengths()
    (collection,) = manager.fetch([5])
    keys, values = collection.get_key_cache(1), collection.get_value_cache(2)
    assert keys.shape == values.shape == (8, 16, 4, 8)
    assert keys.stride() == values.stride() == (2 * 3 * 16 * 4 * 8, 4 * 8, 8, 1)
    keys[5, 7], values[5, 7] = 2.0, 3.0
    assert (manager.blocks[0][5, 0, 1, 7] == 2.0).all()
    assert (manager.blocks[0][5, 1, 2, 7] == 3.0).all()
    assert manager.blocks[0].sum() == 4 * 8 * 2.0 + 4 * 8 * 3.0
    assert (manager.fetch([4])[0].get_key_cache(1)[5, 7] == 2.0).all()
    for layer in (-1, 3, 100):
        for get in (collection.get_key_cache, collection.get_value_cache):
            with pytest.raises(IndexError, match=rf"layer {layer} is not in \[0, 3\)"):
                get(layer)


def test_lengths_advance_by_the_rows_of_the_previous_step() -> None:
    manager = with_lengths()
    first = manager.fetch([4, 0, 2], [1, 3, 2], num_steps=3)
    second = manager.increment_cache_lengths(first, offsets(1, 3, 2))
    third = manager.increment_cache_lengths(second, offsets(1, 1, 1))
    views = [inputs[0] for inputs in (first, second, third)]
    assert [view.cache_lengths.tolist() for view in views] == [[4, 0, 2], [5, 3, 4], [6, 4, 5]]
    assert [(view.max_seq_length, view.max_cache_length) for view in views] == [(3, 5), (1, 6), (1, 7)]


def test_the_next_step_is_not_empty_and_keeps_rows_types_and_blocks() -> None:
    manager = with_lengths()
    (first,) = inputs = manager.fetch([0], [3], num_steps=2)
    (second,) = manager.increment_cache_lengths(inputs, offsets(3))
    assert (first.is_cache_empty, second.is_cache_empty, second.lookup_table.tolist()) == (True, False, [0])
    assert second.blocks is first.blocks is manager.blocks[0]
    assert second.cache_lengths.dtype == torch.int32


def test_the_ledger_does_not_move_before_the_launch_is_committed() -> None:
    manager = with_lengths()
    inputs = manager.fetch([4, 0], num_steps=3)
    for _ in range(2):
        inputs = manager.increment_cache_lengths(inputs, offsets(1, 1))
        assert (manager.cache_length_of(4), manager.cache_length_of(0)) == (4, 0)
        manager.check()
    manager.step([3, 2], inputs)  # the inputs of the last step commit the launch, as those of the first would
    assert (manager.cache_length_of(4), manager.cache_length_of(0)) == (7, 2)


def test_all_devices_move_on_together_each_in_its_own_blocks() -> None:
    manager = with_lengths(n_devices=2)
    first = manager.fetch([4, 0], [1, 3], num_steps=2)
    second = manager.increment_cache_lengths(first, offsets(1, 3))
    assert [collection.cache_lengths.tolist() for collection in second] == [[5, 3], [5, 3]]
    for inputs in (first, second):
        assert all(view.blocks is blocks for view, blocks in zip(inputs, manager.blocks, strict=True))
