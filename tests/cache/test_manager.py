"""The manager, call by call: what each does, what each refuses, and that a refusal changes nothing.

Calls in any order, right and wrong ones: test_model_based.py.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from chairlift.cache import CacheFull, ContinuousBatchingKVCacheManager, InputSymbol, KVCacheParams
from chairlift.errors import ChairliftError

Manager = ContinuousBatchingKVCacheManager

PARAMS = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=8)
SPLIT = KVCacheParams(torch.bfloat16, n_kv_heads=4, head_dim=8, n_devices=2)


def make_manager(num_slots: int = 16, max_seq_len: int = 32) -> Manager:
    return Manager(PARAMS, num_slots, max_seq_len, num_layers=3, devices=["cpu"])


def grow(manager: Manager, lengths: dict[int, int]) -> None:
    """Commits that many tokens to those claimed slots."""
    manager.step(list(lengths.values()), manager.fetch(list(lengths), list(lengths.values())))


def books(manager: Manager) -> tuple[int, dict[int, int]]:
    """Free slots, and the length of every claimed one."""
    claimed = [seq_id for seq_id in range(manager.max_cache_batch_size) if manager.contains(seq_id)]
    return manager.slots_remaining, {seq_id: manager.cache_length_of(seq_id) for seq_id in claimed}


# Shapes and sizes


@pytest.mark.parametrize(("params", "devices", "heads_each"), [(PARAMS, ["cpu"], 4), (SPLIT, ["cpu", "cpu"], 2)])
def test_each_device_has_zeroed_blocks_of_all_slots_for_its_heads(
    params: KVCacheParams, devices: list[str], heads_each: int
) -> None:
    manager = Manager(params, 16, 32, num_layers=3, devices=devices)
    assert manager.block_shape(5) == [5, 2, 3, 32, heads_each, 8]
    assert manager.devices == [torch.device("cpu")] * len(devices)
    assert len({blocks.data_ptr() for blocks in manager.blocks}) == len(devices)
    for blocks in manager.blocks:
        assert (list(blocks.shape), blocks.dtype) == (manager.block_shape(16), params.dtype)
        assert blocks.count_nonzero() == 0


@pytest.mark.parametrize("devices", [[], ["cpu", "cpu"]])
def test_as_many_devices_as_the_params_say_are_needed(devices: list[str]) -> None:
    with pytest.raises(ValueError, match=f"n_devices is 1, but {len(devices)} devices"):
        Manager(PARAMS, 16, 32, num_layers=3, devices=devices)


def test_a_cache_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers must be at least 1, not 0"):
        Manager(PARAMS, 16, 32, num_layers=0, devices=["cpu"])


@pytest.mark.parametrize(("params", "devices"), [(PARAMS, ["cpu"]), (SPLIT, ["cpu", "cpu"])])
def test_the_estimate_is_the_size_of_the_tensors(params: KVCacheParams, devices: list[str]) -> None:
    manager = Manager(params, 5, 32, num_layers=3, devices=devices)
    inputs = manager.fetch(manager.claim(5))
    num_bytes = sum(c.blocks.nbytes + c.cache_lengths.nbytes + c.lookup_table.nbytes for c in inputs)
    assert Manager.estimated_memory_size(params, 5, 32, 3, devices) == num_bytes


@pytest.mark.parametrize(
    ("params", "devices", "available_bytes", "num_slots"),
    [
        # A slot takes 2 x 3 layers x 32 tokens x 4 heads x 8 x 4 bytes, and 8 of length and lookup.
        *(
            (PARAMS, ["cpu"], 7 * 24584, 7),
            (PARAMS, ["cpu"], 7 * 24584 - 1, 6),
            (PARAMS, ["cpu"], 7 * 24584 + 24583, 7),
        ),
        *((PARAMS, ["cpu"], 24583, 0), (PARAMS, ["cpu"], 0, 0), (PARAMS, ["cpu"], -1, 0)),
        # The same in 2 bytes, the heads on two devices, length and lookup on both.
        *((SPLIT, ["cpu", "cpu"], 7 * 2 * 6152, 7), (SPLIT, ["cpu", "cpu"], 7 * 2 * 6152 - 1, 6)),
    ],
)
def test_as_many_slots_are_inferred_as_fit_to_the_byte(
    params: KVCacheParams, devices: list[str], available_bytes: int, num_slots: int
) -> None:
    assert Manager.infer_optimal_batch_size(params, 32, 3, available_bytes, devices) == num_slots


def test_input_symbols_name_the_four_inputs_of_each_device() -> None:
    one = (
        InputSymbol("blocks", torch.bfloat16, ("num_slots", 2, 3, 32, 2, 8)),
        InputSymbol("cache_lengths", torch.int32, ("batch_size",)),
        InputSymbol("lookup_table", torch.int32, ("batch_size",)),
        InputSymbol("is_cache_empty", torch.bool, ()),
    )
    assert Manager(SPLIT, 16, 32, num_layers=3, devices=["cpu", "cpu"]).input_symbols() == [one, one]


# claim, claim_slot, contains, release


def test_claims_and_releases_of_sixteen_slots() -> None:
    manager = make_manager(16)
    first = manager.claim(5)
    assert manager.slots_remaining == 11
    second = manager.claim(3)
    assert manager.slots_remaining == 8
    assert len({*first, *second}) == 8
    assert all(0 <= seq_id < 16 for seq_id in first + second)
    for num_left, seq_id in enumerate([first[2], second[0], first[0]], start=9):
        manager.release(seq_id)
        assert manager.slots_remaining == num_left
    with pytest.raises(ValueError, match=f"slot {first[2]} is not claimed"):
        manager.release(first[2])
    assert manager.slots_remaining == 11
    manager.check()


def test_claiming_more_than_are_free_says_how_many_and_claims_none() -> None:
    manager = make_manager(16)
    manager.claim(12)
    with pytest.raises(CacheFull, match="asked for 5 cache slots, 4 are free") as caught:
        manager.claim(5)
    assert (caught.value.num_asked, caught.value.num_free) == (5, 4)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ChairliftError)
    assert manager.slots_remaining == 4
    assert len(manager.claim(4)) == 4


# fetch


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.fetch([0, 8]), r"slot 8 is not in \[0, 8\)"),
        (lambda m: m.fetch([0, -1]), r"slot -1 is not in \[0, 8\)"),
        (lambda m: m.fetch([0, 5]), "slot 5 is not claimed"),
        (lambda m: m.fetch([2, 0, 2]), "slot 2 is given twice"),
        (lambda m: m.fetch([0, 3]), "slot 3 is in flight"),
        (lambda m: m.fetch([0, 1], [1, 3]), "slot 1 would overrun: 30 tokens held, 3 new .* make 33, .* holds 32"),
        (lambda m: m.fetch([0, 1], None, num_steps=3), "slot 1 would overrun: 30 tokens held, 1 new and 2 further"),
        (lambda m: m.fetch([0, 1], [2, 2], num_steps=2), "slot 1 would overrun"),
        (lambda m: m.fetch([0, 2], [1, -1]), "slot 2: cannot write -1 tokens"),
        (lambda m: m.fetch([0, 2], [1]), "2 sequences, but new_tokens has 1"),
        (lambda m: m.fetch([0, 2], num_steps=0), "num_steps must be at least 1, not 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refused_fetch_names_the_slot_and_changes_nothing(call: Callable[[Manager], object], said: str) -> None:
    manager = make_manager(8)
    manager.claim(4)
    grow(manager, {0: 7, 1: 30})
    in_flight = manager.fetch([3])
    before = books(manager)
    with pytest.raises(ValueError, match=said):
        call(manager)
    assert books(manager) == before == (4, {0: 7, 1: 30, 2: 0, 3: 0})
    manager.step([1, 1, 1], manager.fetch([2, 0, 1]))  # none of them was left in flight
    manager.step([1], in_flight)  # and the one that was still is
    assert books(manager) == (4, {0: 8, 1: 31, 2: 1, 3: 1})
    manager.check()


# step


@pytest.mark.parametrize(
    ("valid_lengths", "said"),
    [
        ([1], "2 rows are in flight, but valid_lengths has 1"),
        ([1, 1, 1], "2 rows are in flight, but valid_lengths has 3"),
        ([4, -1], "slot 1: cannot commit -1 tokens"),
        ([4, 7], "slot 1: cannot commit 7 tokens, 6 were reserved"),
    ],
)
def test_a_refused_step_commits_nothing_and_leaves_the_rows_in_flight(valid_lengths: list[int], said: str) -> None:
    manager = make_manager()
    manager.claim(2)
    inputs = manager.fetch([0, 1], [4, 4], num_steps=3)
    with pytest.raises(ValueError, match=said):
        manager.step(valid_lengths, inputs)
    assert books(manager) == (14, {0: 0, 1: 0})
    manager.step([6, 6], inputs)
    assert books(manager) == (14, {0: 6, 1: 6})


def test_inputs_that_no_fetch_gave_cannot_be_committed() -> None:
    manager = make_manager()
    manager.claim(1)
    foreign = [replace(collection, reservation=None) for collection in manager.fetch([0])]
    for inputs in ([], foreign):
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


@pytest.mark.parametrize(("params", "devices"), [(PARAMS, ["cpu"]), (SPLIT, ["cpu", "cpu"])])
def test_a_prefix_is_copied_in_all_layers_keys_and_values_on_every_device_and_nothing_else_is(
    params: KVCacheParams, devices: list[str]
) -> None:
    manager = Manager(params, 4, 32, num_layers=3, devices=devices)
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
    manager = Manager(PARAMS, 3, 32, num_layers=3, devices=["cpu"])
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


def test_an_interrupt_amid_what_is_owed_leaves_none_of_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(PARAMS, 3, 32, num_layers=3, devices=["cpu"])
    manager.blocks[0].normal_()
    (memory,) = manager.memories
    clear, scrubbed = memory.clear, []

    def interrupted(slot: int, start: int, end: int) -> None:
        scrubbed.append(slot)
        if len(scrubbed) == 2:
            raise KeyboardInterrupt
        clear(slot, start, end)

    monkeypatch.setattr(memory, "clear", interrupted)
    for slot in manager.claim(3):
        manager.hold(slot, 32)
        manager.scrub(slot, 0)
    with pytest.raises(KeyboardInterrupt):
        manager.settle()
    manager.settle()
    assert scrubbed == [0, 1, 1, 2]
    assert not manager.blocks[0].any()
