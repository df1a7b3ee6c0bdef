"""The memory behind slots: how devices share it, and that it comes with what is written."""

import mmap
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.cache.memory import DenseMemory, MappedMemory, allocate_blocks


def test_devices_share_the_heads_evenly() -> None:
    params = [KVCacheParams(torch.bfloat16, n_kv_heads=6, head_dim=8, n_devices=count) for count in (1, 2, 3, 6)]
    assert [each.n_kv_heads_per_device for each in params] == [6, 3, 2, 1]
    with pytest.raises(FrozenInstanceError):
        params[0].head_dim = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        *(((heads, 8, devices), rf"\({heads}\).*\({devices}\)") for heads, devices in ((6, 4), (3, 2), (2, 3))),
        *(((count, 8, 1), f"^n_kv_heads must be at least 1, not {count}$") for count in (0, -2)),
        *(((4, count, 1), f"^head_dim must be at least 1, not {count}$") for count in (0, -2)),
        *(((4, 8, count), f"^n_devices must be at least 1, not {count}$") for count in (0, -2)),
    ],
)
def test_counts_that_make_no_sense_are_refused_by_name_and_number(counts: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KVCacheParams(torch.float32, *counts)


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
def test_only_what_is_cleared_becomes_zeros(
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
    memory = MappedMemory([4, 2, 16, 256, 8, 64], torch.bfloat16)
    assert not memory.blocks[2].any()  # reading takes no memory
    assert (memory.num_resident(), memory.num_touched()) == (0, memory.blocks[2].nbytes)
    memory = MappedMemory([32, 2, 16, 131_072, 8, 64], torch.bfloat16)  # 128 GiB
    memory.blocks[31, :, :, :64] = 1  # 64 KiB in each of 32 planes
    assert memory.num_resident() == memory.num_touched() == 2 * 2**20 == memory.most_resident(64)
    assert memory.blocks[31, 1, 15, 63, 7, 63] == 1


@mapped_only
def test_whole_pages_of_what_is_cleared_are_given_back() -> None:
    memory = MappedMemory(SHAPE, torch.float32)
    memory.blocks.fill_(7)
    assert memory.num_resident() == 4 * 6 * 8 * mmap.PAGESIZE
    for start, num_left in ((128, 4), (127, 4), (0, 0)):  # the page with token 127 has earlier ones, too
        memory.clear(2, start, 160)
        assert memory.num_resident() == (3 * 6 * 8 + 6 * num_left) * mmap.PAGESIZE


@mapped_only
def test_memory_goes_with_the_last_tensor() -> None:
    blocks = MappedMemory(SHAPE, torch.float32).blocks
    blocks.fill_(3)
    keys = blocks[0, 0]
    del blocks
    assert (keys == 3).all()


@mapped_only
def test_addresses_that_cannot_be_had_are_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"2\.00 PiB of addresses cannot be reserved"):
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
