"""Memory that comes with what is written, and goes with what is given back."""

import mmap
import sys

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.cache.memory import DenseMemory, MappedMemory, allocate_blocks

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
    assert memory.num_resident() == 2 * 2**20 == memory.most_resident(64)
    assert memory.blocks[31, 1, 15, 63, 7, 63] == 1


@mapped_only
def test_reading_takes_no_memory() -> None:
    memory = MappedMemory([4, 2, 16, 4096, 8, 64], torch.bfloat16)
    assert not memory.blocks[2].any()
    assert memory.num_resident() == 0


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
