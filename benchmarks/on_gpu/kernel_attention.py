"""Attention over slots: our kernels, flash-attn 2 and 3, with two orders of what a slot holds."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.kernels import decode_attention, prefill_attention, slot_append
from on_gpu.kernel_bench import Bench, Work

_PLANES, _TOKENS = "layer by layer", "token by token"  # what is adjacent in a slot
_NUM_COMPARED = 4  # rows
_FLASH_ATTN_3 = "fa3_fwd_interface"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The heads of a model, and how many layers share the slots."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows that decode over what their slots hold."""

    sizes: Sizes
    query: torch.Tensor  # [B, Hq, D]
    blocks: torch.Tensor  # [B, 2, layers, S, Hkv, D]
    lengths: torch.Tensor  # int32 [B]
    slots: torch.Tensor  # int32 [B]

    def keys_and_values(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of a layer: `[B, S, Hkv, D]`."""
        layer = index % self.sizes.num_layers
        return self.blocks[:, 0, layer], self.blocks[:, 1, layer]

    def wanted(self) -> torch.Tensor:
        """Returns what the first layer's attention is for some rows: float32 `[rows, Hq, D]`."""
        keys, values = self.keys_and_values(0)
        group = self.sizes.num_heads // self.sizes.num_kv_heads
        rows = []
        for row in range(len(self.lengths))[self.compared]:
            length, slot = int(self.lengths[row]), int(self.slots[row])
            k, v = (each[slot, :length].float().repeat_interleave(group, 1) for each in (keys, values))
            weights = (torch.einsum("hd,nhd->hn", self.query[row].float(), k) * self.sizes.scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(rows)

    @property
    def compared(self) -> slice:
        """Some rows, from the first on."""
        return slice(None, None, -(-len(self.lengths) // _NUM_COMPARED))

    @property
    def num_bytes(self) -> int:
        """Keys and values of all rows."""
        per_token = 2 * self.sizes.num_kv_heads * self.sizes.head_dim * self.blocks.element_size()
        return int(self.lengths.sum()) * per_token


def measure(bench: Bench, *, is_tiny: bool) -> None:
    """Decode steps of one long row, of many, and of rows of very different lengths; then prompts."""
    sizes = Sizes(2, 4, 2, 32) if is_tiny else Sizes(8, 32, 8, 128)
    dtype = torch.float16 if is_tiny else torch.bfloat16  # Triton's interpreter multiplies bfloat16's bits
    for case, (lengths, slot_len) in _cases(is_tiny=is_tiny).items():
        for order in (_PLANES, _TOKENS):
            decoding = _decoding(sizes, lengths, slot_len, order, dtype, bench.device)
            wanted = decoding.wanted()
            for kernel, work in _decoders(decoding):
                bench.run(f"{case}, {order}", kernel, work, wanted, decoding.num_bytes, decoding.compared)
    _measure_prompts(bench, sizes, dtype, is_tiny=is_tiny)


def _cases(*, is_tiny: bool) -> Mapping[str, tuple[list[int], int]]:
    """Lengths of the rows, and tokens of a slot."""
    if is_tiny:
        return {"4 uneven": ([1, 70, 33, 5], 128)}
    return {
        "1 x 140": ([140], 2048),
        "32 x 1,060": ([1060] * 32, 2048),
        "256 x 1,060": ([1060] * 256, 1536),
        "32 of 100 to 4,000": ([100 + 3900 * row * row // 961 for row in range(32)], 4096),
    }


def _decoding(
    sizes: Sizes, lengths: list[int], slot_len: int, order: str, dtype: torch.dtype, device: torch.device
) -> Decoding:
    inner = sizes.num_kv_heads, sizes.head_dim
    if order == _PLANES:
        blocks = torch.randn(len(lengths), 2, sizes.num_layers, slot_len, *inner, dtype=dtype, device=device)
    else:
        stored = torch.randn(len(lengths), slot_len, 2, sizes.num_layers, *inner, dtype=dtype, device=device)
        blocks = stored.permute(0, 2, 3, 1, 4, 5)
    query = torch.randn(len(lengths), sizes.num_heads, sizes.head_dim, dtype=dtype, device=device)
    slots = torch.randperm(len(lengths), device=device).int()
    return Decoding(sizes, query, blocks, torch.tensor(lengths, dtype=torch.int32, device=device), slots)


def _decoders(decoding: Decoding) -> Iterator[tuple[str, Work]]:
    """Each kernel that is there. What all layers of a step share is made beforehand."""
    sizes, query = decoding.sizes, decoding.query
    chunks = decode_attention.plan_chunks(decoding.lengths, decoding.slots, sizes.num_kv_heads)

    def ours(index: int) -> torch.Tensor:
        return decode_attention.attend(query, *decoding.keys_and_values(index), chunks, scale=sizes.scale)

    yield "triton", ours
    for name, kernel in _flash_attn().items():
        yield name, functools.partial(_flash_decode, decoding, kernel)


def _flash_attn() -> dict[str, Callable[..., Any]]:
    """`flash_attn_with_kvcache` of each version that is installed."""
    if not torch.cuda.is_available():
        return {}
    modules = {"flash-attn 2": "flash_attn", "flash-attn 3": _FLASH_ATTN_3}
    found = {name: module for name, module in modules.items() if importlib.util.find_spec(module) is not None}
    return {name: importlib.import_module(module).flash_attn_with_kvcache for name, module in found.items()}


def _flash_decode(decoding: Decoding, kernel: Callable[..., Any], index: int) -> torch.Tensor:
    keys, values = decoding.keys_and_values(index)
    lengths, slots = decoding.lengths, decoding.slots
    output = kernel(decoding.query[:, None], keys, values, cache_seqlens=lengths, cache_batch_idx=slots, causal=True)
    return torch.as_tensor(output)[:, 0]


def _measure_prompts(bench: Bench, sizes: Sizes, dtype: torch.dtype, *, is_tiny: bool) -> None:
    """Prompts that were just appended to their slots."""
    num_rows, length = (2, 40) if is_tiny else (8, 1024)
    inner = sizes.num_kv_heads, sizes.head_dim
    blocks = torch.zeros(num_rows, 2, 1, length, *inner, dtype=dtype, device=bench.device)
    num_tokens = num_rows * length
    query = torch.randn(num_tokens, sizes.num_heads, sizes.head_dim, dtype=dtype, device=bench.device)
    key, value = (torch.randn(num_tokens, *inner, dtype=dtype, device=bench.device) for _ in range(2))
    tokens = torch.arange(num_tokens, device=bench.device, dtype=torch.int32)
    slots, positions = tokens // length, tokens % length
    keys, values = blocks[:, 0, 0], blocks[:, 1, 0]

    def append(_index: int) -> torch.Tensor:
        slot_append.append(keys, values, key, value, slots, positions)
        return blocks[:, :, 0].transpose(0, 1)  # a view, since a copy would be timed, too

    moved = 2 * 2 * key.nbytes  # keys and values, read and written
    bench.run(f"append {num_rows} x {length}", "triton", append, torch.stack((key, value)).view(2, *keys.shape), moved)
    rows = torch.arange(num_rows, device=bench.device, dtype=torch.int32)
    lengths = torch.full_like(rows, length)
    offsets = torch.arange(num_rows + 1, device=bench.device, dtype=torch.int32) * length
    wanted = _causal(sizes, query[:length], key[:length], value[:length])

    def ours(_index: int) -> torch.Tensor:
        return prefill_attention.attend(query, keys, values, offsets, lengths, rows, length, scale=sizes.scale)

    case = f"prompts {num_rows} x {length}"
    bench.run(case, "triton", ours, wanted, rows=slice(length))
    for name, kernel in _flash_attn().items():

        def theirs(_index: int, kernel: Callable[..., Any] = kernel) -> torch.Tensor:
            shaped = query.view(num_rows, length, *query.shape[1:])
            output = kernel(shaped, keys, values, cache_seqlens=lengths, cache_batch_idx=rows, causal=True)
            return torch.as_tensor(output).view_as(query)

        bench.run(case, name, theirs, wanted, rows=slice(length))


def _causal(sizes: Sizes, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One prompt's attention in float32."""
    group = sizes.num_heads // sizes.num_kv_heads
    k, v = (each.float().repeat_interleave(group, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * sizes.scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
