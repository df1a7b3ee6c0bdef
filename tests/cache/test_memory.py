"""The memory behind slots: how devices share it, that it comes with what is written, and who holds how much of it."""

import mmap
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.cache.budget import CacheUse, Scrub
from chairlift.cache.ledger import SlotLedger
from chairlift.cache.memory import DenseMemory, MappedMemory, allocate_blocks

# --- KVCacheParams


@pytest.mark.parametrize(("n_devices", "heads_each"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_devices_share_the_heads_evenly(n_devices: int, heads_each: int) -> None:
    params = KVCacheParams(torch.bfloat16, n_kv_heads=6, head_dim=8, n_devices=n_devices)
    assert params.n_kv_heads_per_device == heads_each


@pytest.mark.parametrize(("n_kv_heads", "n_devices"), [(6, 4), (3, 2), (2, 3)])
def test_heads_that_cannot_be_shared_evenly_are_refused_with_both_numbers(n_kv_heads: int, n_devices: int) -> None:
    with pytest.raises(ValueError, match=rf"\({n_kv_heads}\).*\({n_devices}\)"):
        KVCacheParams(torch.float32, n_kv_heads, head_dim=8, n_devices=n_devices)


@pytest.mark.parametrize("field", ["n_kv_heads", "head_dim", "n_devices"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_count_below_one_is_refused_by_name(field: str, value: int) -> None:
    counts = {"n_kv_heads": 4, "head_dim": 8, "n_devices": 1, field: value}
    with pytest.raises(ValueError, match=f"^{field} must be at least 1, not {value}$"):
        KVCacheParams(torch.float32, **counts)


def test_params_cannot_be_changed() -> None:
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=8)
    with pytest.raises(FrozenInstanceError):
        params.head_dim = 16  # type: ignore[misc]


# --- tensors


CPU = torch.device("cpu")
SHAPE = [4, 2, 3, 256, 2, 16]  # a token takes 128 bytes of each of 6 planes, which are 8 pages each
RAGGED = [4, 2, 3, 100, 2, 17]  # pages have tokens of two planes
mapped_only = pytest.mark.skipif(sys.platform != "linux", reason="mappings without reservation are Linux's")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPE, RAGGED])
def test_blocks_are_dense_zeros_of_their_shape_and_format(shape: list[int], dtype: torch.dtype) -> None:
    blocks = allocate_blocks(shape, dtype, CPU).blocks
    assert (list(blocks.shape), blocks.dtype, blocks.is_contiguous()) == (shape, dtype, True)
    assert not blocks.any()


@pytest.mark.parametrize("kind", [DenseMemory, pytest.param(MappedMemory, marks=mapped_only)])
@pytest.mark.parametrize("shape", [SHAPE, RAGGED])
@pytest.mark.parametrize("start", [0, 1, 32, 33, 64, 95, 99])
def test_what_is_cleared_reads_as_zeros_and_nothing_else_does(
    kind: type[DenseMemory | MappedMemory], shape: list[int], start: int
) -> None:
    is_dense = kind is DenseMemory
    memory = DenseMemory(shape, torch.float32, CPU) if is_dense else MappedMemory(shape, torch.float32)
    memory.blocks.fill_(7)
    for slot in (1, 3):
        memory.clear(slot, start, 96)
    expected = torch.full(shape, 7.0)
    expected[[1, 3], :, :, start : 96 if is_dense else None] = 0  # where it costs nothing, to the end of the slot
    assert torch.equal(memory.blocks, expected)


@mapped_only
def test_only_what_is_written_is_resident() -> None:
    memory = MappedMemory([32, 2, 16, 131_072, 8, 64], torch.bfloat16)  # 128 GiB
    assert memory.num_resident() == 0
    memory.blocks[31, :, :, :64] = 1  # 64 KiB in each of 32 planes
    assert memory.num_resident() == memory.num_touched() == 2 * 2**20 == memory.most_resident(64)
    assert memory.blocks[31, 1, 15, 63, 7, 63] == 1


@mapped_only
def test_reading_takes_no_memory() -> None:
    memory = MappedMemory([4, 2, 16, 4096, 8, 64], torch.bfloat16)
    assert not memory.blocks[2].any()
    assert (memory.num_resident(), memory.num_touched()) == (0, memory.blocks[2].nbytes)


@mapped_only
def test_whole_pages_of_what_is_cleared_are_given_back() -> None:
    memory = MappedMemory(SHAPE, torch.float32)
    memory.blocks.fill_(7)
    assert memory.num_resident() == 4 * 6 * 8 * mmap.PAGESIZE
    memory.clear(2, 128, 160)
    assert memory.num_resident() == (3 * 6 * 8 + 6 * 4) * mmap.PAGESIZE
    memory.clear(2, 127, 160)  # the page with token 127 has earlier ones, too
    assert memory.num_resident() == (3 * 6 * 8 + 6 * 4) * mmap.PAGESIZE
    memory.clear(2, 0, 160)
    assert memory.num_resident() == 3 * 6 * 8 * mmap.PAGESIZE


@mapped_only
def test_memory_goes_with_the_last_tensor() -> None:
    blocks = MappedMemory(SHAPE, torch.float32).blocks
    blocks.fill_(3)
    keys = blocks[0, 0]
    del blocks
    assert (keys == 3).all()


@mapped_only
def test_addresses_that_cannot_be_had_are_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"2097152\.0 GiB of addresses cannot be reserved"):
        MappedMemory([2**20, 2, 16, 2**16, 8, 64], torch.bfloat16)


@mapped_only
def test_checking_a_cache_finds_memory_that_the_books_do_not_know() -> None:
    params = KVCacheParams(torch.float32, n_kv_heads=2, head_dim=16)
    manager = ContinuousBatchingKVCacheManager(params, 4, 4096, 3, ["cpu"], max_tokens=4096)
    (slot,) = manager.claim(1)
    inputs = manager.fetch([slot], [100])
    manager.blocks[0][slot, :, :, :100] = 1
    manager.step([100], inputs)
    manager.check_memory()
    manager.blocks[0][slot, :, :, 128] = 1
    with pytest.raises(AssertionError, match="bytes are resident, and the books say 98304 at most"):
        manager.check_memory()


# --- slots of which not all can be full


def ledger_of(num_chunks: int, num_slots: int = 4, max_seq_len: int = 256) -> SlotLedger:
    return SlotLedger(num_slots, max_seq_len, 64 * num_chunks)


def write(ledger: SlotLedger, slot: int, num_tokens: int) -> None:
    ledger.commit([num_tokens], ledger.reserve([slot], [num_tokens]))


def use_of(ledger: SlotLedger) -> tuple[int, int, int]:
    """Chunks that are held by claimed slots, by warm ones, and by none."""
    ledger.check()
    use = ledger.budget.use
    return use.num_running // 64, use.num_warm // 64, use.num_free // 64


def test_a_claimed_slot_holds_nothing_until_it_is_written() -> None:
    ledger = ledger_of(8)
    slot, other = ledger.claim(2)
    assert use_of(ledger) == (0, 0, 8)
    write(ledger, slot, 1)
    assert use_of(ledger) == (1, 0, 7)
    write(ledger, slot, 63)
    assert use_of(ledger) == (1, 0, 7)
    write(ledger, slot, 1)
    write(ledger, other, 129)
    assert use_of(ledger) == (5, 0, 3)


def test_what_was_asked_for_is_held_before_it_is_written() -> None:
    ledger = ledger_of(8)
    (slot,) = ledger.claim(1)
    assert ledger.hold(slot, 200) == 0
    assert (use_of(ledger), ledger.budget.limits[slot]) == ((4, 0, 4), 256)
    assert ledger.hold(slot, 10) == 0
    assert use_of(ledger) == (4, 0, 4)  # nobody asks for less


def test_a_slot_that_is_given_back_holds_what_stays_valid() -> None:
    ledger = ledger_of(8)
    slot, other = ledger.claim(2)
    write(ledger, slot, 200)
    write(ledger, other, 64)
    ledger.release(slot, 100)
    ledger.release(other)
    assert use_of(ledger) == (0, 2, 6)
    ledger.claim_slot(slot, 60)
    assert use_of(ledger) == (1, 0, 7)


def test_memory_stays_where_it_was_until_it_is_wanted_elsewhere() -> None:
    ledger = ledger_of(4)
    first, second = ledger.claim(2)
    write(ledger, first, 256)
    ledger.release(first)
    assert list(ledger.owed) == []
    write(ledger, second, 64)
    assert list(ledger.owed) == [Scrub(first, 0, 256)]  # 16 chunks at a time, or all that there are
    write(ledger, second, 192)
    assert list(ledger.owed) == [Scrub(first, 0, 256)]


def test_of_a_warm_slot_the_rest_is_given_back_when_memory_is_wanted() -> None:
    ledger = ledger_of(5)
    first, second = ledger.claim(2)
    write(ledger, first, 256)
    ledger.release(first, 70)
    write(ledger, second, 150)
    assert list(ledger.owed) == [Scrub(first, 128, 256)]
    assert use_of(ledger) == (3, 2, 0)


def test_what_warm_slots_must_give_up_is_said_and_nothing_changes() -> None:
    ledger = ledger_of(5)
    first, second = ledger.claim(2)
    write(ledger, first, 200)
    ledger.release(first, 200)
    assert ledger.hold(second, 190) == 128
    assert use_of(ledger) == (0, 4, 1)
    ledger.shrink_warm(first, 128)
    assert ledger.hold(second, 190) == 0
    assert (use_of(ledger), list(ledger.owed)) == ((3, 2, 0), [Scrub(first, 128, 256)])
    assert ledger.warm == {first: 128}


def test_rows_for_which_there_is_no_memory_are_refused_all_or_none() -> None:
    ledger = ledger_of(5)
    slots = ledger.claim(3)
    write(ledger, slots[0], 256)
    with pytest.raises(ValueError, match=r"slot 1, 2: there is no memory for more tokens: 256 of 320 are held by cl"):
        ledger.reserve(slots[1:], [64, 1])
    assert use_of(ledger) == (4, 0, 1)
    ledger.reserve(slots[1:2], [64])
    assert use_of(ledger) == (5, 0, 0)


def test_further_steps_need_memory_too() -> None:
    ledger = ledger_of(4)
    (slot,) = ledger.claim(1)
    write(ledger, slot, 63)
    ledger.reserve([slot], [1], num_steps=2)
    assert use_of(ledger) == (2, 0, 2)


def test_a_copy_needs_memory_of_its_own() -> None:
    ledger = ledger_of(4, max_seq_len=192)
    first, second = ledger.claim(2)
    write(ledger, first, 192)
    with pytest.raises(ValueError, match="slot 1: there is no memory"):
        ledger.copy_prefix(first, second, 65)
    ledger.copy_prefix(first, second, 64)
    assert use_of(ledger) == (4, 0, 0)


def test_all_that_nobody_holds_can_be_given_back() -> None:
    ledger = ledger_of(16)
    slots = ledger.claim(3)
    for slot in slots:
        write(ledger, slot, 200)
    ledger.release(slots[0])
    ledger.release(slots[1], 64)
    ledger.give_back()
    assert list(ledger.owed) == [Scrub(slots[1], 64, 256), Scrub(slots[0], 0, 256)]
    ledger.give_back()
    assert len(ledger.owed) == 2
    assert use_of(ledger) == (4, 1, 11)


def test_a_budget_that_no_full_slot_fits_into_is_refused() -> None:
    assert SlotLedger(4, 100, 128).budget.use == CacheUse(num_tokens=128)
    with pytest.raises(ValueError, match="a cache of 127 tokens cannot hold a sequence of 100 tokens in chunks of 64"):
        SlotLedger(4, 100, 127)
    assert SlotLedger(4, 100).budget.use == CacheUse(num_tokens=512)  # without budget: all that fits
