"""The continuous-batching KV cache: a pool of slots, a tensor per device for layers of equal shape, and borrowed views.

Calls for one request, in order: `claim`, `fetch` and `step` for its prompt (whole or in chunks), `fetch` and `step` per
decode launch, `release`. Vocabulary and shapes follow MAX's continuous batching cache. `step` is `commit` for callers
that hold the views of a fetch. The engine's scheduler, which knows no tensors, reserves and commits before the runner
computes, so lengths grow in one place only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.cache.layout import CacheLayout, Kept, KVCacheParams, Place, StateParams
from chairlift.cache.ledger import SlotLedger
from chairlift.cache.memory import AllocateBlocks, MappedMemory, allocate_blocks
from chairlift.cache.state_books import StateBooks
from chairlift.cache.states import SlotStates, StateMemory
from chairlift.cache.transfer import copy_in
from chairlift.device import send
from chairlift.plan import Job, Reservation, SlotCopy, SlotLoad, StateCopy, StateScrub

_INDEX_BYTES = 4  # cache_lengths and lookup_table are int32: what the attention kernels take


@dataclass(frozen=True, slots=True)
class InputSymbol:
    """Name, dtype and dims of one input of a forward; a dim is a number or the name of one that varies."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class ContinuousBatchingKVCacheCollection:
    """One device's cache as a forward pass sees it: the blocks, and where its rows are in them. Owns nothing.

    Keys and values of row i occupy `blocks[lookup_table[i], :, layer, :cache_lengths[i]]`; the forward appends after
    them. Everything beyond is stale and must never be read. If layers differ, `blocks` is the tensor of the first
    group of equal layers, and `places` tells where the planes of each are; the two getters know.
    """

    blocks: torch.Tensor  # [n_slots, 2, num_layers, max_seq_len, n_kv_heads_per_device, head_dim]
    cache_lengths: torch.Tensor  # int32 [batch], on the device: tokens committed before this forward
    lookup_table: torch.Tensor  # int32 [batch], on the device: row -> slot
    is_cache_empty: bool  # True only if every row has length 0
    max_seq_length: int  # most new tokens of any row
    max_cache_length: int  # largest length of any row after this forward
    reservation: Reservation | None = None  # the host's side of the fetch; `step` needs it
    further_blocks: tuple[torch.Tensor, ...] = ()  # of the other groups, in order
    places: tuple[Place | None, ...] | None = None  # by layer; None: layers are alike, and `blocks` has all of them
    states: SlotStates | None = None  # None: no layer has a recurrent state

    def get_key_cache(self, layer_idx: int) -> torch.Tensor:
        """Keys of one layer: a strided view `[n_slots, max_seq_len, heads, head_dim]`, no copy.

        IndexError if there is no such layer, or if it keeps nothing.
        """
        return self._layer(0, layer_idx)

    def get_value_cache(self, layer_idx: int) -> torch.Tensor:
        """Values of one layer, likewise."""
        return self._layer(1, layer_idx)

    def cache_length(self, batch_idx: int) -> int:
        """Tokens of that row before this forward. Waits for the device."""
        return int(self.cache_lengths[batch_idx])

    def _layer(self, kv_idx: int, layer_idx: int) -> torch.Tensor:
        num_layers = self.blocks.shape[2] if self.places is None else len(self.places)
        if not 0 <= layer_idx < num_layers:
            raise IndexError(f"layer {layer_idx} is not in [0, {num_layers})")
        if self.places is None:
            return self.blocks[:, kv_idx, layer_idx]
        place = self.places[layer_idx]
        if place is None:
            raise IndexError(f"layer {layer_idx} keeps no keys and values")
        return place.view((self.blocks, *self.further_blocks)[place.group], kv_idx)


class ContinuousBatchingKVCacheManager(SlotLedger):
    """The ledger and its tensors, the whole cache in one object. Thread-safe.

    The engine's scheduler sees this object as a `SlotLedger`, and claims, reserves, commits and releases its slots. The
    runner calls `perform` and `view`. `fetch` and `step` are for programs that use the cache by itself; the engine does
    not call them.
    """

    def __init__(
        self,
        params: KVCacheParams | Sequence[Kept],
        max_cache_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[torch.device | str],
        max_tokens: int | None = None,
        states: Sequence[StateParams | None] = (),
        num_snapshots: int = 0,
        max_tentative: int = 1,
        allocate: AllocateBlocks = allocate_blocks,
    ) -> None:
        """`params`: of all layers, or what each keeps. `max_tokens`: that all slots together may have memory for.

        `max_tokens` None: all can be full. `states`: recurrent states by layer, empty without any; `num_snapshots`:
        further rows for them; `max_tentative`: tokens of a row that can be taken back. `allocate`: makes the memory of
        each group of layers. ValueError for inconsistent numbers, and as in `CacheLayout.of`; MemoryError, or
        RuntimeError as torch does, if there is no memory.
        """
        self.layout = CacheLayout.of(params, num_layers, states)
        if len(devices) != self.layout.n_devices:
            raise ValueError(f"params.n_devices is {self.layout.n_devices}, but {len(devices)} devices are given")
        state_layout = self.layout.states
        books: StateBooks | None = None
        if state_layout is not None:
            num_bytes = state_layout.row_bytes * len(devices)
            books = StateBooks(max_cache_batch_size, max_tentative, num_snapshots, num_bytes)
        super().__init__(max_cache_batch_size, max_seq_len, max_tokens, books)
        self.places = None if self.layout.is_plain else self.layout.places
        self.num_layers = num_layers
        self.devices = [torch.device(device) for device in devices]
        # Zeros: attention kernels multiply masked elements by zero, which a NaN in stale memory would survive.
        shapes = [(group.block_shape(max_cache_batch_size, max_seq_len), group.params) for group in self.layout.groups]
        allocated = [[allocate(shape, each.dtype, device) for shape, each in shapes] for device in self.devices]
        self.memories = [memory for groups in allocated for memory in groups]
        self.blocks = [first.blocks for first, *_ in allocated]
        self._further_blocks = [tuple(memory.blocks for memory in further) for _, *further in allocated]
        self.state_memories = [
            StateMemory(state_layout.places, max_cache_batch_size, num_snapshots, max_tentative, device)
            for device in self.devices
            if state_layout is not None
        ]

    @property
    def max_cache_batch_size(self) -> int:
        """Slots, claimed or not."""
        return self.num_slots

    def block_shape(self, n_sequences: int) -> list[int]:
        """`[n_sequences, 2, num_layers, max_seq_len, n_kv_heads_per_device, head_dim]`; 2: keys and values.

        If layers differ, of the first group of equal ones.
        """
        return self.layout.groups[0].block_shape(n_sequences, self.max_seq_len)

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams | Sequence[Kept],
        max_cache_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[torch.device | str],
        states: Sequence[StateParams | None] = (),
        num_snapshots: int = 0,
        max_tentative: int = 1,
    ) -> int:
        """Bytes over all devices: blocks, lengths and lookup, and recurrent states with their snapshots."""
        layout = CacheLayout.of(params, num_layers, states)
        num_bytes = max_cache_batch_size * _slot_bytes(layout, max_seq_len, max_tentative)
        if layout.states is not None:
            num_bytes += num_snapshots * layout.states.row_bytes
        return num_bytes * len(devices)

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParams | Sequence[Kept],
        max_seq_len: int,
        num_layers: int,
        available_bytes: int,
        devices: Sequence[torch.device | str],
        states: Sequence[StateParams | None] = (),
        max_tentative: int = 1,
    ) -> int:
        """Slots that fit into `available_bytes`, the sum over the devices; each slot has a shard on every one."""
        layout = CacheLayout.of(params, num_layers, states)
        return max(0, available_bytes) // (_slot_bytes(layout, max_seq_len, max_tentative) * len(devices))

    def input_symbols(self) -> list[tuple[InputSymbol, ...]]:
        """Per device the four inputs that `fetch` provides to a forward, and the blocks of further groups."""
        blocks, *further = (
            InputSymbol(
                "blocks" if not index else f"further_blocks_{index}",
                group.params.dtype,
                ("num_slots", *group.block_shape(1, self.max_seq_len)[1:]),
            )
            for index, group in enumerate(self.layout.groups)
        )
        symbols = (
            blocks,
            InputSymbol("cache_lengths", torch.int32, ("batch_size",)),
            InputSymbol("lookup_table", torch.int32, ("batch_size",)),
            InputSymbol("is_cache_empty", torch.bool, ()),
            *further,
        )
        return [symbols for _ in self.devices]

    def fetch(
        self,
        seq_ids: Sequence[int],
        new_tokens: Sequence[int] | None = None,
        num_steps: int = 1,
        num_tentative: Sequence[int] | None = None,
    ) -> list[ContinuousBatchingKVCacheCollection]:
        """One view per device, rows in the order given. Performs pending copies and scrubs first.

        `new_tokens[i]` tokens of row i are about to be written (1 each if None), then one more in each of
        `num_steps - 1` further steps; `num_tentative[i]` of them may be taken back. ValueError as in
        `SlotLedger.reserve`, before anything changes.
        """
        reservation = self.reserve(seq_ids, new_tokens, num_steps, num_tentative)
        self.settle()
        return self.view(reservation, num_steps)

    def view(self, reservation: Reservation, num_steps: int = 1) -> list[ContinuousBatchingKVCacheCollection]:
        """Makes what `fetch` returns, for rows reserved already. Only this part allocates memory on the device.

        Pending copies and scrubs must have been performed.
        """
        first = [reserved - (num_steps - 1) for reserved in reservation.num_reserved]
        lengths = torch.tensor(reservation.lengths, dtype=torch.int32)
        slots = torch.tensor(reservation.seq_ids, dtype=torch.int32)
        return [
            ContinuousBatchingKVCacheCollection(
                blocks=blocks,
                cache_lengths=send(lengths, device),
                lookup_table=send(slots, device),
                is_cache_empty=not any(reservation.lengths),
                max_seq_length=max(first, default=0),
                max_cache_length=max(map(sum, zip(reservation.lengths, first, strict=True)), default=0),
                reservation=reservation,
                further_blocks=further,
                places=self.places,
                states=self.state_memories[index].view(reservation, num_steps) if self.state_memories else None,
            )
            for index, (device, blocks, further) in enumerate(
                zip(self.devices, self.blocks, self._further_blocks, strict=True)
            )
        ]

    def increment_cache_lengths(
        self, kv_cache_inputs: Sequence[ContinuousBatchingKVCacheCollection], row_offsets: torch.Tensor
    ) -> list[ContinuousBatchingKVCacheCollection]:
        """The inputs of the next step of a multistep launch, computed on the device without waiting for it.

        `row_offsets`: int32 `[batch + 1]`, where each row of the previous step began and ended. Lengths advance
        by that step's row lengths; the ledger changes only in `step`.
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
                states=None if collection.states is None else collection.states.next_step(),
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
        self.commit(valid_lengths, reservation)

    @property
    def is_elastic(self) -> bool:
        """Returns true if memory that is freed can be used for something else."""
        return all(isinstance(memory, MappedMemory) for memory in self.memories)

    def check_memory(self) -> None:
        """Asserts that no more memory is resident than the ledger says. May take milliseconds, so `check` omits it."""
        self.settle()
        with self._lock:
            num_tokens = [self.budget.num_backed_of(slot) for slot in range(self.num_slots)]
            for memory in self.memories:
                if isinstance(memory, MappedMemory):
                    most = sum(map(memory.most_resident, num_tokens))
                    if memory.num_touched() > most:
                        resident = memory.num_resident()
                        assert resident <= most, f"{resident} bytes are resident, and the books say {most} at most"

    def settle(self) -> None:
        """Performs the pending copies and scrubs. On a device they run after all work that was launched before."""
        with self._lock:
            while self.owed:
                self.perform([self.owed[0]])
                self.owed.popleft()  # last, so that an interrupted job is done again next time

    def perform(self, jobs: Iterable[Job]) -> None:
        """Performs these copies and scrubs, which are not pending (any more). See `settle`."""
        for job in jobs:
            if isinstance(job, SlotCopy):
                self._copy_blocks(job.source, job.target, job.num_tokens)
            elif isinstance(job, StateCopy):
                for states in self.state_memories:
                    states.copy(job.source, job.target)
            elif isinstance(job, StateScrub):
                for states in self.state_memories:
                    states.clear(job.row)
            elif isinstance(job, SlotLoad):
                copy_in(self, job)
            else:
                for memory in self.memories:
                    memory.clear(job.slot, job.start, job.end)

    def _copy_blocks(self, source: int, target: int, num_tokens: int) -> None:
        """Keys and values of all layers of a group in one strided copy."""
        for memory in self.memories:
            blocks = memory.blocks
            blocks[target, :, :, :num_tokens].copy_(blocks[source, :, :, :num_tokens])


def _slot_bytes(layout: CacheLayout, max_seq_len: int, max_tentative: int) -> int:
    """One slot on one device: its blocks, its length and its lookup entry, its state and its tentative inputs."""
    state_bytes = 0 if layout.states is None else layout.states.slot_bytes(max_tentative)
    return layout.slot_bytes(max_seq_len) + 2 * _INDEX_BYTES + state_bytes
