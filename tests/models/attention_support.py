"""Batches of sequences in cache slots, with what plain attention over padded copies makes of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.models.attention import AttentionConfig, Backend, BatchMetadata, PaddedBatch, Projections
from chairlift.models.attention.torch_sdpa import TorchBackend

NUM_LAYERS = 3
LAYER = 2
NUM_SLOTS = 32
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
POISON = 1e4  # finite, as the cache promises, and enough to ruin any output that it touches
CPU = torch.device("cpu")


Layers = Mapping[int, AttentionConfig]


def layers(scale: float, windows: Sequence[int | None] = (None,) * NUM_LAYERS, softcap: float | None = None) -> Layers:
    """Returns what attention computes in layers that differ in their windows only."""
    return {index: AttentionConfig(scale, window, softcap) for index, window in enumerate(windows)}


def plain(head_dim: int) -> Layers:
    """Scores divided by sqrt(head_dim), and every key seen."""
    return layers(head_dim**-0.5)


@dataclass(frozen=True)
class Row:
    """One sequence: where it lies, what its slot holds, what is new."""

    slot: int
    num_cached: int
    num_new: int


@dataclass(frozen=True)
class Tokens:
    """Queries, keys and values of sequences from their beginnings, padded: `[B, L, H, D]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def shard(self, device: int, n_devices: int) -> "Tokens":
        """The heads of one device."""
        return Tokens(*(x.chunk(n_devices, dim=2)[device] for x in self.parts))

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(*(x.to(device) for x in self.parts))

    def rows(self, which: list[int]) -> "Tokens":
        return Tokens(*(x[which] for x in self.parts))

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def new_parts(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what `attend` takes: query, key and value of the rows' new tokens, `[T, H, D]` each."""
        return new_parts(self.query, rows), new_parts(self.key, rows), new_parts(self.value, rows)


def random_tokens(
    rows: Sequence[Row], heads: int = 4, kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float32
) -> Tokens:
    generator, longest = torch.Generator().manual_seed(len(rows)), max(row.num_cached + row.num_new for row in rows)
    shapes = [(len(rows), longest, num_heads, head_dim) for num_heads in (heads, kv_heads, kv_heads)]
    return Tokens(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


def reference(tokens: Tokens, layers: Layers | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of layer `LAYER` over all earlier tokens, in float32: `[B, L, Hq, D]`. None: plain attention."""
    config = (layers or plain(tokens.query.shape[-1]))[LAYER]
    query, key, value = (x.float().transpose(1, 2) for x in (tokens.query, tokens.key, tokens.value))
    group_size = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
    scores = query @ key.transpose(2, 3) * config.scale
    if config.softcap is not None:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    ages = torch.arange(scores.shape[2])[:, None] - torch.arange(scores.shape[3])
    is_hidden = (ages < 0) | (ages >= (config.window or len(ages)))
    scores = scores.masked_fill(is_hidden.to(scores.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    attended: torch.Tensor = scores.softmax(-1)[..., : key.shape[2]] @ value
    return attended.transpose(1, 2)


def new_parts(padded: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The new tokens of all rows end to end: `[B, L, H, D] -> [T, H, D]`."""
    return torch.cat([padded[i, row.num_cached : row.num_cached + row.num_new] for i, row in enumerate(rows)])


def batch_of(rows: Sequence[Row], device: torch.device = CPU) -> BatchMetadata:
    """Rows of one new token that come first are decode rows."""
    num_new = [row.num_new for row in rows]
    return BatchMetadata(
        row_offsets=torch.tensor([0, *accumulate(num_new)], dtype=torch.int32, device=device),
        positions=torch.cat([row.num_cached + torch.arange(row.num_new) for row in rows]).to(device),
        slots=tuple(row.slot for row in rows),
        num_new_tokens=tuple(num_new),
        num_cached_tokens=tuple(row.num_cached for row in rows),
        num_decode_rows=next((i for i, count in enumerate(num_new) if count > 1), len(rows)),
    )


def padded_batch_of(
    rows: Sequence[Row],
    num_tokens: int,
    max_decode_rows: int,
    max_prompts: int,
    scratch: int,
    device: torch.device = CPU,
) -> PaddedBatch:
    """The rows in a step that is padded to so many tokens, with room for as many prompts beside the padding."""
    num_decode = batch_of(rows).num_decode_rows
    num_padding = num_tokens - sum(row.num_new for row in rows)
    prompts = [*rows[num_decode:], Row(scratch, 0, num_padding)]
    prompts += [Row(scratch, 0, 0)] * (max_prompts + 1 - len(prompts))
    all_rows = [*rows[:num_decode], *prompts]
    decoding = [*rows[:num_decode], *[Row(scratch, 0, 1)] * (max_decode_rows - num_decode)]

    def ints(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    return PaddedBatch(
        token_slots=ints(row.slot for row in all_rows for _ in range(row.num_new)).long(),
        positions=torch.cat([row.num_cached + torch.arange(row.num_new) for row in all_rows]).to(device),
        decodes=torch.arange(max_decode_rows, device=device) < num_decode,
        decode_slots=ints(row.slot for row in decoding),
        decode_lengths=ints(row.num_cached + 1 for row in decoding),
        prompt_offsets=ints(accumulate((row.num_new for row in prompts), initial=num_decode)),
        prompt_slots=ints(row.slot for row in prompts),
        prompt_lengths=ints(row.num_cached + row.num_new for row in prompts),
        max_new_tokens=num_tokens,
    )


def make_cache(
    rows: Sequence[Row],
    tokens: Tokens,
    num_slots: int = NUM_SLOTS,
    background: float = 0.0,
    n_devices: int = 1,
    page_size: int = 1,
    margin: int = 5,
) -> ContinuousBatchingKVCacheManager:
    """A cache in which the rows' slots hold their cached tokens, and every other element is `background`.

    It lies where the tokens do; slots hold `margin` more tokens than are needed, rounded up to whole pages.
    """
    longest, num_kv_heads, head_dim = tokens.key.shape[1:]
    slot_len = -(-(longest + margin) // page_size) * page_size
    params = KVCacheParams(tokens.key.dtype, num_kv_heads, head_dim, n_devices)
    devices = [tokens.key.device] * n_devices
    manager = ContinuousBatchingKVCacheManager(params, num_slots, slot_len, NUM_LAYERS, devices)
    for blocks in manager.blocks:
        blocks.fill_(background)
    for i, row in enumerate(rows):
        manager.claim_slot(row.slot)
        inputs = manager.fetch([row.slot], [row.num_cached])
        for device, collection in enumerate(inputs):
            shard, held = tokens.shard(device, n_devices), slice(row.num_cached)
            collection.get_key_cache(LAYER)[row.slot, held] = shard.key[i, held]
            collection.get_value_cache(LAYER)[row.slot, held] = shard.value[i, held]
        manager.step([row.num_cached], inputs)
    return manager


def attend(
    manager: ContinuousBatchingKVCacheManager,
    rows: Sequence[Row],
    tokens: Tokens,
    backend: Backend | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the rows' new tokens, which are committed; heads of all devices: `[T, Hq, D]`.

    `backend` None: plain attention in torch, in place.
    """
    backend = backend or TorchBackend(plain(tokens.query.shape[-1]))
    inputs = manager.fetch([row.slot for row in rows], [row.num_new for row in rows])
    outputs = []
    for device, collection in enumerate(inputs):
        attend_layer = backend.prepare(batch_of(rows, collection.blocks.device), collection)
        outputs.append(attend_layer(LAYER, Projections(*tokens.shard(device, len(inputs)).new_parts(rows), sinks)))
    manager.step([row.num_new for row in rows], inputs)
    return torch.cat(outputs, dim=1)


def assert_near(output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[output.dtype]
    torch.testing.assert_close(output.float(), expected.float(), rtol=tolerance, atol=tolerance)


DECODE = [Row(7, 3, 1), Row(2, 0, 1), Row(30, 40, 1), Row(3, 17, 1)]
PREFILL = [Row(12, 0, 9), Row(4, 25, 6), Row(31, 1, 2)]
BATCHES = {
    "decode": DECODE,
    "decode, dense slots": [Row(slot, 5 + slot, 1) for slot in range(6)],
    "decode, sparse slots": [Row(31, 11, 1), Row(0, 4, 1), Row(5, 29, 1)],
    "decode, sparse and dense": [Row(slot, 20 - slot % 7, 1) for slot in (20, 2, 21, 0, 31, 1, 12, 23)],
    "decode, one row": [Row(9, 13, 1)],
    "prefill": PREFILL,
    "prefill, one row": [Row(5, 0, 30)],
    "prefill of one token after others": [Row(5, 0, 4), Row(8, 0, 1), Row(3, 6, 1)],
    "mixed": [*DECODE, *PREFILL],
}
