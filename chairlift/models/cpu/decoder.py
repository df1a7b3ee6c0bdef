"""Runs a decoder's forward pass in native code, in one call or some layers at a time."""

from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import DType
from chairlift.models.attention import BatchMetadata, find_head_obstacle
from chairlift.models.config import Layer, ModelConfig, ModelShape
from chairlift.models.cpu import structures
from chairlift.models.cpu.build import CpuKernelsUnavailable
from chairlift.models.cpu.library import load_library
from chairlift.models.cpu.packing import LANES
from chairlift.models.cpu.structures import Batch, CacheGroup, Model, Piece, States
from chairlift.models.cpu.weights import NativeWeights
from chairlift.models.decoder import Decoder
from chairlift.models.precision import Widths
from chairlift.models.side_by_side import kept_threads

if TYPE_CHECKING:
    from ctypes import _NamedFuncPointer

_MAX_HEAD_DIM = 512  # as csrc/rows.h has it
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_GROUPED_FORMATS = 2  # added to the above


def find_obstacle(model: ModelShape, dtype: DType, device: str, num_ranks: int) -> str | None:
    """Says why the kernels cannot run a model of that description and format on that device; None if they can.

    Compiles them, if that has not been done before.
    """
    if device != "cpu":
        return f"it runs on a CPU, and the device is {device}"
    if num_ranks > 1:
        return f"it computes in one process, and tensor_parallel_size is {num_ranks}"
    if dtype is DType.FLOAT16:
        return f"it computes in float32 or bfloat16, not {dtype}"
    if obstacle := find_head_obstacle(model.projected_head_dims, LANES, _MAX_HEAD_DIM):
        return obstacle
    if not isinstance(model, ModelConfig):
        return f"it runs the families that have a wiring of their own, and {model.architecture} has none"
    if obstacle := _find_block_obstacle(model.layers):
        return obstacle
    try:
        load_library(None)
    except CpuKernelsUnavailable as error:
        return str(error)
    return None


def _find_block_obstacle(layers: Sequence[Layer]) -> str | None:
    foreign = sorted({block.name for layer in layers for block in layer if block.native is None})
    if foreign:
        return f"it has no code for blocks like {', '.join(foreign)}"
    pairs = (pair for layer in layers for pair in pairwise((block.role, block.native) for block in layer))
    if any(first == second for first, second in pairs):
        return "it has no code for two blocks of a kind side by side"
    return None


@dataclass(frozen=True, slots=True)
class NativeStage:
    """A pass between two pieces: the residual stream, and the batch as native code is given it."""

    stream: torch.Tensor  # float32 [T, hidden], a view of what the next piece reads and changes in place; others follow
    batch: Batch
    layer_inputs: torch.Tensor | None = None  # float32 [T, layers * size], which the first piece completes


class CpuDecoder:
    """A forward pass (`attention.Forward`) whose results are the same, bit for bit, whatever else is in the batch.

    Takes the weights out of `model`, which is unusable afterwards, so that at most one matrix is in memory twice, or
    one layer if there are `calibration_ids`. Matrices in groups of integers are multiplied as they are, but as bfloat16
    on AMX, and others in the model's number format, or if there are `widths` rounded to so many bits. Its layers can be
    run some at a time (`forward.LayeredForward`). ValueError for heads that the kernels do not take, and blocks that
    they lack.

    `calibration_ids`, int64 `[sequences, tokens]`: they are run to find out which inputs matter, so the model has
    rotary tables for as many positions; None: all inputs of a product are alike.
    """

    def __init__(
        self,
        model: Decoder,
        max_seq_len: int,
        *,
        widths: Widths | None = None,
        calibration_ids: torch.Tensor | None = None,
        isa: str | None = None,
    ) -> None:
        obstacle = find_head_obstacle(model.config.projected_head_dims, LANES, _MAX_HEAD_DIM)
        if obstacle := obstacle or _find_block_obstacle(model.config.layers):
            raise ValueError(obstacle)
        library = load_library(isa)
        self._forward, self._logits = library.chairlift_forward, library.chairlift_logits
        self._forward.argtypes = [POINTER(Model), POINTER(Batch), POINTER(Piece), c_int, c_void_p, c_int]
        self._logits.argtypes = [POINTER(Model), c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int]
        self._forward.restype = self._logits.restype = c_int64
        self._config = model.config
        self._dtype = model.dtype
        with kept_threads():
            self._weights = NativeWeights(model, max_seq_len, widths, calibration_ids)
        self._model = self._weights.model
        self._format = self._format_for(self._weights.has_groups)
        self._head_format = self._format_for(self._model.head.num_bits <= 8)
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def _format_for(self, has_groups: bool) -> int:
        return _FORMATS[self._dtype] + (_GROUPED_FORMATS if has_groups else 0)

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self._weights.num_bytes

    def step_bytes(self, num_tokens: int, num_rows: int, cache_tokens: int) -> int:
        """Memory that steps take, with up to so many tokens, sampled rows, and tokens in the cache.

        A step has no more than these together: a prompt of all its tokens; one decode row over the whole cache, whose
        keys are divided among the threads, with a result for each chunk of keys; and logits.
        """
        num_threads = torch.get_num_threads()
        passes: int = self._logits(self._model, None, num_rows, self._head_format, None, None, num_threads)
        passes += self._pass_bytes(num_tokens, 0) + self._pass_bytes(1, cache_tokens)
        hidden = num_tokens * self._config.hidden_size * self._dtype.itemsize
        if (inputs := self._config.layer_inputs) is not None:
            hidden += num_tokens * inputs.num_layers * inputs.size * torch.float32.itemsize
        return passes + hidden + num_rows * self._config.vocab_size * torch.float32.itemsize

    def _pass_bytes(self, num_new: int, num_cached: int) -> int:
        """Workspace for one row."""
        offsets, cached = (torch.tensor(each, dtype=torch.int32) for each in ([0, num_new], [num_cached]))
        row = Batch(
            num_rows=1,
            num_tokens=num_new,
            row_offsets=structures.address_of(offsets),
            cache_lengths=structures.address_of(cached),
        )
        whole = self._piece(0, self.num_layers, is_first=True)
        num_bytes: int = self._forward(self._model, row, whole, self._format, None, torch.get_num_threads())
        return num_bytes

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`; appends keys and values to the slots."""
        hidden = torch.empty(len(input_ids), self._config.hidden_size, dtype=self._dtype)
        piece = self._piece(0, self.num_layers, is_first=True, hidden=hidden.data_ptr())
        layer_inputs = self._layer_inputs_of(input_ids)
        piece.layer_inputs = structures.address_of(layer_inputs)
        self._call(self._forward, _batch_of(batch, input_ids, cache), piece, self._format)
        return hidden

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    def enter(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> NativeStage:
        """See `forward.LayeredForward`."""
        hidden_size = self._config.hidden_size
        num_streams = self._config.num_streams or 1
        rows = torch.empty(num_streams, len(input_ids), hidden_size + -hidden_size % LANES)
        stage = NativeStage(
            rows[0, :, :hidden_size], _batch_of(batch, input_ids, cache), self._layer_inputs_of(input_ids)
        )
        self._run(stage, self._piece(0, 0, is_first=True))
        return stage

    def run(self, stage: NativeStage, first_layer: int, count: int) -> NativeStage:
        """See `forward.LayeredForward`. Changes the stage in place."""
        if not 0 <= first_layer <= first_layer + count <= self.num_layers:
            raise IndexError(f"{count} layers from {first_layer} on are not in [0, {self.num_layers})")
        self._run(stage, self._piece(first_layer, count))
        return stage

    def leave(self, stage: NativeStage) -> torch.Tensor:
        """See `forward.LayeredForward`."""
        hidden = torch.empty(stage.stream.shape, dtype=self._dtype)
        self._run(stage, self._piece(self.num_layers, 0, hidden=hidden.data_ptr()))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        logits = torch.empty(len(hidden), self._config.vocab_size)
        if len(hidden):
            address = structures.address_of(hidden)
            self._call(self._logits, address, len(hidden), self._head_format, logits.data_ptr())
        return logits

    def _layer_inputs_of(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """int64 `[T]` -> float32 `[T, layers * size]`: the second embeddings of the tokens."""
        made = self._weights.layer_inputs
        if made is None:
            return None
        if len(input_ids) and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self._config.vocab_size:
            raise self._unknown_token()
        with torch.inference_mode():
            return made.look_up(input_ids, self._dtype).flatten(1).float()

    def _unknown_token(self) -> IndexError:
        return IndexError(f"token ids must be below {self._config.vocab_size}, and not negative")

    def _piece(self, first_layer: int, count: int, *, is_first: bool = False, hidden: int | None = None) -> Piece:
        first, end = (self._weights.first_sublayers[layer] for layer in (first_layer, first_layer + count))
        return Piece(is_first=is_first, first_sublayer=first, num_sublayers=end - first, hidden=hidden)

    def _run(self, stage: NativeStage, piece: Piece) -> None:
        piece.residual = stage.stream.data_ptr()
        piece.layer_inputs = structures.address_of(stage.layer_inputs)
        self._call(self._forward, stage.batch, piece, self._format)

    def _call(self, function: "_NamedFuncPointer", *arguments: object) -> None:
        """Calls it once to learn the workspace's size, then to compute."""
        num_threads = torch.get_num_threads()
        num_bytes = function(self._model, *arguments, None, num_threads)
        if num_bytes > self._workspace.nbytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8)
        if function(self._model, *arguments, self._workspace.data_ptr(), num_threads) < 0:
            raise self._unknown_token()


def _batch_of(batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection) -> Batch:
    common = cache.reservation.common_prefixes if cache.reservation else ()
    common_slots = torch.tensor([prefix.slot for prefix in common], dtype=torch.int32) if common else None
    common_lengths = torch.tensor([prefix.num_tokens for prefix in common], dtype=torch.int32) if common else None
    groups = [_group_of(blocks) for blocks in (cache.blocks, *cache.further_blocks)]
    address_of = structures.address_of
    arguments = Batch(
        num_rows=len(batch.slots),
        num_tokens=len(input_ids),
        input_ids=address_of(input_ids),
        row_offsets=address_of(batch.row_offsets),
        slots=address_of(cache.lookup_table),
        cache_lengths=address_of(cache.cache_lengths),
        common_slots=address_of(common_slots),
        common_lengths=address_of(common_lengths),
        num_groups=len(groups),
        groups=(CacheGroup * len(groups))(*groups),
    )
    arguments.sources = (batch, input_ids, cache, common_slots, common_lengths)
    if cache.states is not None:
        states = cache.states.read_ends()
        counts = [torch.tensor(each, dtype=torch.int32) for each in (states.num_replayed, states.num_tentative)]
        live, pending = states.live, states.pending
        strides = (live.stride(0), *pending.stride()[:2])
        arguments.states = States(*map(address_of, (live, pending)), *strides, *map(address_of, counts))
        arguments.sources += (*counts,)
    return arguments


def _group_of(blocks: torch.Tensor) -> CacheGroup:
    slot, kind, plane, token = blocks.stride()[:4]
    return CacheGroup(structures.address_of(blocks), slot, kind, plane, token)
