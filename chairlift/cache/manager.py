"""The continuous-batching KV cache: a pool of slots, one tensor per device, handed out as borrowed views.

The order of a request's calls: `claim`, `fetch` and `step` for its prompt (in one piece or in chunks), `fetch` and
`step` per decode launch, `release`. Vocabulary and shapes follow MAX's continuous batching cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.cache.ledger import SlotLedger
from chairlift.cache.params import KVCacheParams

_INDEX_BYTES = 4  # cache_lengths and lookup_table are int32: what the attention kernels take


@dataclass(frozen=True, slots=True)
class InputSymbol:
    """Name, dtype and dims of one input of a forward; a dim is a number or the name of one that varies."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


class ContinuousBatchingKVCacheManager:
    """Owns the blocks of every device and, through its ledger, the books of the slots. Thread-safe."""

    def __init__(
        self,
        params: KVCacheParams,
        max_cache_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[torch.device | str],
    ) -> None:
        if len(devices) != params.n_devices:
            raise ValueError(f"params.n_devices is {params.n_devices}, but {len(devices)} devices are given")
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, not {num_layers}")
        self.params = params
        self.max_cache_batch_size = max_cache_batch_size
        self.max_seq_len = max_seq_len
        self.num_layers = num_layers
        self.devices = [torch.device(device) for device in devices]
        self.ledger = SlotLedger(max_cache_batch_size, max_seq_len)
        # Zeroed: attention kernels multiply masked elements by zero, which a NaN in stale memory would survive.
        self.blocks = [
            torch.zeros(self.block_shape(max_cache_batch_size), dtype=params.dtype, device=device)
            for device in self.devices
        ]

    def block_shape(self, n_sequences: int) -> list[int]:
        """`[n_sequences, 2, num_layers, max_seq_len, n_kv_heads_per_device, head_dim]`; 2: keys and values."""
        return _block_shape(self.params, n_sequences, self.max_seq_len, self.num_layers)

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams,
        max_cache_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[torch.device | str],
    ) -> int:
        """Bytes over all devices: blocks, lengths and lookup."""
        return max_cache_batch_size * _slot_bytes(params, max_seq_len, num_layers) * len(devices)

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParams,
        max_seq_len: int,
        num_layers: int,
        available_bytes: int,
        devices: Sequence[torch.device | str],
    ) -> int:
        """Slots that fit into `available_bytes`, the sum over the devices; each slot has a shard on every one."""
        return max(0, available_bytes) // (_slot_bytes(params, max_seq_len, num_layers) * len(devices))

    def input_symbols(self) -> list[tuple[InputSymbol, ...]]:
        """Per device the four inputs that `fetch` provides to a forward."""
        block_dims: list[int | str] = [*self.block_shape(self.max_cache_batch_size)]
        block_dims[0] = "num_slots"
        symbols = (
            InputSymbol("blocks", self.params.dtype, tuple(block_dims)),
            InputSymbol("cache_lengths", torch.int32, ("batch_size",)),
            InputSymbol("lookup_table", torch.int32, ("batch_size",)),
            InputSymbol("is_cache_empty", torch.bool, ()),
        )
        return [symbols for _ in self.devices]

    @property
    def slots_remaining(self) -> int:
        """Slots that can still be claimed: free and warm ones."""
        return self.ledger.num_claimable

    def contains(self, seq_id: int) -> bool:
        """True if the slot is claimed; False also for ids out of range."""
        return self.ledger.contains(seq_id)

    def cache_length_of(self, seq_id: int) -> int:
        """Committed tokens of a claimed slot. ValueError if it is not claimed."""
        return self.ledger.length_of(seq_id)

    def claim(self, batch_size: int) -> list[int]:
        """Unique ids of `batch_size` slots, each of length 0. `CacheFull` (and nothing claimed) if there are fewer."""
        return self.ledger.claim(batch_size)

    def claim_slot(self, seq_id: int, num_kept: int = 0) -> None:
        """Claims that very slot, of a warm one with its first `num_kept` tokens. ValueError as in the ledger."""
        self.ledger.claim_slot(seq_id, num_kept)

    def release(self, seq_id: int, num_kept: int = 0) -> None:
        """The slot is free again, or warm if its first `num_kept` tokens are to stay valid. ValueError if it is not
        claimed, in flight, or has fewer tokens.
        """
        self.ledger.release(seq_id, num_kept)

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """The target, claimed and not in flight, begins with the source's first tokens from now on, and ends with them.

        ValueError as in `SlotLedger.copy_prefix`, before anything changes.
        """
        self.ledger.copy_prefix(source, target, num_tokens)
        self.copy_blocks(source, target, num_tokens)

    def copy_blocks(self, source: int, target: int, num_tokens: int) -> None:
        """Keys and values of all layers in one strided copy, on the device; the books are the caller's business."""
        for blocks in self.blocks:
            blocks[target, :, :, :num_tokens].copy_(blocks[source, :, :, :num_tokens])

    def scrub(self, seq_id: int, start: int = 0) -> None:
        """Overwrites a slot from a token on with zeros: attention multiplies even what it does not look at."""
        for blocks in self.blocks:
            blocks[seq_id, :, :, start:].zero_()

    def fetch(
        self, seq_ids: Sequence[int], new_tokens: Sequence[int] | None = None, num_steps: int = 1
    ) -> list[ContinuousBatchingKVCacheCollection]:
        """One view per device, rows in the order given.

        `new_tokens[i]` tokens of row i are about to be written (1 each if None), then one more in each of
        `num_steps - 1` further steps. ValueError as in `SlotLedger.reserve`, before anything changes.
        """
        reservation = self.ledger.reserve(seq_ids, new_tokens, num_steps)
        first = [reserved - (num_steps - 1) for reserved in reservation.num_reserved]
        lengths = torch.tensor(reservation.lengths, dtype=torch.int32)
        slots = torch.tensor(reservation.seq_ids, dtype=torch.int32)
        return [
            ContinuousBatchingKVCacheCollection(
                blocks=blocks,
                cache_lengths=lengths.to(device, non_blocking=True),
                lookup_table=slots.to(device, non_blocking=True),
                is_cache_empty=not any(reservation.lengths),
                max_seq_length=max(first, default=0),
                max_cache_length=max(map(sum, zip(reservation.lengths, first, strict=True)), default=0),
                reservation=reservation,
            )
            for device, blocks in zip(self.devices, self.blocks, strict=True)
        ]

    def increment_cache_lengths(
        self, kv_cache_inputs: Sequence[ContinuousBatchingKVCacheCollection], row_offsets: torch.Tensor
    ) -> list[ContinuousBatchingKVCacheCollection]:
        """The inputs of the next step of a multistep launch, computed on the device without waiting for it.

        `row_offsets`: int32 `[batch + 1]`, where each row of the previous step began and ended. Lengths advance
        by that step's row lengths; the ledger does not move before `step`.
        """
        advance = row_offsets[1:] - row_offsets[:-1]
        return [
            replace(
                collection,
                cache_lengths=collection.cache_lengths
                + advance.to(collection.cache_lengths.device, torch.int32, non_blocking=True),
                is_cache_empty=False,
                max_seq_length=1,
                max_cache_length=collection.max_cache_length + 1,
            )
            for collection in kv_cache_inputs
        ]

    def step(self, valid_lengths: Sequence[int], inflight: Sequence[ContinuousBatchingKVCacheCollection]) -> None:
        """Commits: row i of that fetch grows by `valid_lengths[i]`, which may be fewer than were written.

        ValueError as in `SlotLedger.commit`, before anything changes.
        """
        reservation = inflight[0].reservation if inflight else None
        if reservation is None:
            raise ValueError("these cache inputs do not come from fetch")
        self.ledger.commit(valid_lengths, reservation)

    def check(self) -> None:
        """Asserts the invariants of the books."""
        self.ledger.check()


def _block_shape(params: KVCacheParams, n_sequences: int, max_seq_len: int, num_layers: int) -> list[int]:
    return [n_sequences, 2, num_layers, max_seq_len, params.n_kv_heads_per_device, params.head_dim]


def _slot_bytes(params: KVCacheParams, max_seq_len: int, num_layers: int) -> int:
    """One slot on one device: its blocks, its length and its lookup entry."""
    return math.prod(_block_shape(params, 1, max_seq_len, num_layers)) * params.dtype.itemsize + 2 * _INDEX_BYTES
