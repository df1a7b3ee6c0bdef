"""The flash_attn backend passes the package's functions what they need: checked on a CPU by a plain reference."""

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.config import AttentionBackend
from chairlift.errors import ConfigurationError
from chairlift.models.attention import BatchMetadata, load_backend
from tests.support import flash_attn_reference

HEADS, KV_HEADS, HEAD_DIM, LAYER = 6, 2, 64, 1


def outputs_of(
    backend: AttentionBackend, cached: list[int], new: list[int], num_decode_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output [T, Hq, D] and all blocks afterwards, over the same random contents for every backend."""
    params = KVCacheParams(torch.bfloat16, KV_HEADS, HEAD_DIM)
    manager = ContinuousBatchingKVCacheManager(params, 8, 512, 2, ["cpu"])
    generator = torch.Generator().manual_seed(3)
    manager.blocks[0].copy_(torch.randn(manager.blocks[0].shape, generator=generator))
    slots = [7, 0, 3, 5, 2][: len(cached)]
    for slot, length in zip(slots, cached, strict=True):
        manager.claim_slot(slot)
        if length:
            manager.step([length], manager.fetch([slot], [length]))
    inputs = manager.fetch(slots, new)[0]
    offsets = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length, length + count) for length, count in zip(cached, new, strict=True)])
    batch = BatchMetadata(offsets, positions, tuple(slots), tuple(new), tuple(cached), num_decode_rows)
    query = torch.randn(sum(new), HEADS, HEAD_DIM, generator=generator).bfloat16()
    key = torch.randn(sum(new), KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
    value = torch.randn(sum(new), KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
    attend = load_backend(backend, HEAD_DIM, torch.bfloat16).prepare(batch, inputs)
    return attend(LAYER, query, key, value), manager.blocks[0]


@pytest.mark.parametrize(
    ("cached", "new", "num_decode_rows"),
    [
        ([5, 0, 300, 511], [1, 1, 1, 1], 4),
        ([0, 0], [40, 7], 0),
        ([17, 255, 0, 100], [1, 1, 20, 33], 2),
    ],
    ids=["decode", "prefill", "mixed, chunk over cached context"],
)
def test_flash_attn_computes_and_appends_what_torch_does(
    cached: list[int], new: list[int], num_decode_rows: int
) -> None:
    expected, expected_blocks = outputs_of(AttentionBackend.TORCH, cached, new, num_decode_rows)
    with flash_attn_reference.installed():
        actual, blocks = outputs_of(AttentionBackend.FLASH_ATTN, cached, new, num_decode_rows)
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(blocks, expected_blocks)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "words"),
    [
        (64, torch.float32, "bfloat16 or float16, not torch.float32"),
        (264, torch.bfloat16, "up to 256"),
        (60, torch.bfloat16, "divisible by 8"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(head_dim: int, dtype: torch.dtype, words: str) -> None:
    with flash_attn_reference.installed(), pytest.raises(ConfigurationError, match=words):
        load_backend(AttentionBackend.FLASH_ATTN, head_dim, dtype)
