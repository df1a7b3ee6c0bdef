"""The whole forward pass in native code for CPUs: `models/decoder.py` at the speed of memory.

`csrc/` is compiled once per machine (`build`), weights are brought into its layout once (`packing`), and `CpuDecoder`
runs it. The torch model is the reference in tests.
"""

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_void_p

import torch
from torch import nn

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import DType, Quantization
from chairlift.models.attention import BatchMetadata, find_head_obstacle
from chairlift.models.blocks import Arrange, Block, Rotation
from chairlift.models.config import ModelConfig, ModelShape
from chairlift.models.cpu.build import CpuKernelsUnavailable, load_library
from chairlift.models.cpu.packing import LANES, PackedMatrix, pack, pack_grouped, rope_table
from chairlift.models.cpu.structures import Batch, Layer, Matrix, Model
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedWeight, quantize
from chairlift.models.layers import Linear, RMSNorm
from chairlift.models.rotary import RopeTable

__all__ = ["CpuDecoder", "CpuKernelsUnavailable", "find_obstacle", "load_library"]

_HEAD_DIM_ALIGNMENT = 32
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_GROUPED_FORMATS = 2  # added to the above


def find_obstacle(model: ModelShape, dtype: DType, device: str, num_ranks: int) -> str | None:
    """Why the kernels cannot run a model of that description and format on that device; None if they can.

    Compiles them, if that has not been done before.
    """
    if device != "cpu":
        return f"it runs on a CPU, and the device is {device}"
    if num_ranks > 1:
        return f"it computes in one process, and tensor_parallel_size is {num_ranks}"
    if dtype is DType.FLOAT16:
        return f"it computes in float32 or bfloat16, not {dtype}"
    if obstacle := find_head_obstacle(model.head_dims, _HEAD_DIM_ALIGNMENT):
        return obstacle
    if not isinstance(model, ModelConfig):
        return f"it runs the families that have a wiring of their own, and {model.architecture} has none"
    if differing := _differing_fields(model):
        return f"its layers must be alike, and this model's differ in {', '.join(differing)}"
    try:
        load_library(None)
    except CpuKernelsUnavailable as error:
        return str(error)
    return None


def _differing_fields(model: ModelConfig) -> list[str]:
    """The fields of `Model` that its layers do not agree on; layers of other blocks lack some."""
    shapes = [_native_shape(layer) for layer in model.layers]
    names = sorted({name for shape in shapes for name in shape})
    return [name for name in names if len({shape.get(name) for shape in shapes}) > 1]


def _native_shape(blocks: Sequence[Block]) -> dict[str, float]:
    return {name: value for block in blocks for name, value in block.native_shape().items()}


class CpuDecoder:
    """A forward pass (`attention.Forward`) whose results are the same, bit for bit, whatever else is in the batch.

    Takes the weights out of `model`, which is unusable afterwards, so that at most one matrix is in memory twice.
    Matrices in groups of integers are multiplied as they are, and others in the model's number format unless they are
    to be quantized. ValueError for heads that the kernels do not take, and layers that differ.
    """

    def __init__(
        self, model: Decoder, max_seq_len: int, *, quantization: Quantization | None = None, isa: str | None = None
    ) -> None:
        if obstacle := find_head_obstacle(model.config.head_dims, _HEAD_DIM_ALIGNMENT):
            raise ValueError(obstacle)
        if differing := _differing_fields(model.config):
            raise ValueError(f"its layers must be alike, and these differ in {', '.join(differing)}")
        library = load_library(isa)
        self._forward, self._logits = library.chairlift_forward, library.chairlift_logits
        self._forward.argtypes = [POINTER(Model), POINTER(Batch), c_int, c_void_p, c_void_p, c_int]
        self._logits.argtypes = [POINTER(Model), c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int]
        self._forward.restype = self._logits.restype = c_int64
        self._config = model.config
        self._dtype = model.dtype
        self._weights = _Weights(quantization)
        self._model = self._weights.take(model, max_seq_len)
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
        return passes + hidden + num_rows * self._config.vocab_size * torch.float32.itemsize

    def _pass_bytes(self, num_new: int, num_cached: int) -> int:
        """Workspace for one row."""
        offsets, cached = (torch.tensor(each, dtype=torch.int32) for each in ([0, num_new], [num_cached]))
        row = Batch(num_rows=1, num_tokens=num_new, row_offsets=_address(offsets), cache_lengths=_address(cached))
        num_bytes: int = self._forward(self._model, row, self._format, None, None, torch.get_num_threads())
        return num_bytes

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`; appends keys and values to the slots."""
        blocks = cache.blocks
        common = cache.reservation.common_prefixes if cache.reservation else ()
        common_slots = torch.tensor([prefix.slot for prefix in common], dtype=torch.int32) if common else None
        common_lengths = torch.tensor([prefix.num_tokens for prefix in common], dtype=torch.int32) if common else None
        arguments = Batch(
            num_rows=len(batch.slots),
            num_tokens=len(input_ids),
            input_ids=_address(input_ids),
            row_offsets=_address(batch.row_offsets),
            slots=_address(cache.lookup_table),
            cache_lengths=_address(cache.cache_lengths),
            common_slots=_address(common_slots),
            common_lengths=_address(common_lengths),
            blocks=_address(blocks),
            slot_stride=blocks.stride(0),
            value_offset=blocks.stride(1),
            layer_stride=blocks.stride(2),
            token_stride=blocks.stride(3),
        )
        hidden = torch.empty(len(input_ids), self._config.hidden_size, dtype=self._dtype)
        self._call(self._forward, arguments, self._format, hidden.data_ptr())
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        logits = torch.empty(len(hidden), self._config.vocab_size)
        if len(hidden):
            self._call(self._logits, _address(hidden), len(hidden), self._head_format, logits.data_ptr())
        return logits

    def _call(self, function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
        """Calls it once to learn the workspace's size, then to compute."""
        num_threads = torch.get_num_threads()
        num_bytes = function(self._model, *arguments, None, num_threads)
        if num_bytes > self._workspace.nbytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8)
        if function(self._model, *arguments, self._workspace.data_ptr(), num_threads) < 0:
            raise IndexError(f"token ids must be below {self._config.vocab_size}, and not negative")


def _as_they_are(rows: torch.Tensor) -> torch.Tensor:
    return rows


class _Weights:
    """A `Packer`, which keeps all that the kernels hold pointers to."""

    lanes = LANES

    def __init__(self, quantization: Quantization | None) -> None:
        self._quantization = quantization
        self._rotations: dict[RopeTable, Rotation] = {}
        self._kept: list[object] = []
        self.num_bytes = 0
        self.has_groups = False  # whether some matrices are integers in groups

    def take(self, model: Decoder, max_seq_len: int) -> Model:
        config = model.config
        head = self._matrix(model.lm_head, is_head=True)
        self._rotations = {
            key: Rotation(self._keep(rope_table(*key, max_seq_len)), table.shape[-1])
            for key, table in model.ropes.items()
        }
        layers = (Layer * config.num_layers)()
        self._kept.append(layers)
        for index, layer in enumerate(model.layers):
            layers[index] = Layer(**layer.pack(self))
            _give_back_memory()
        embedding = None if config.is_tied else self._keep(model.model.embed_tokens.weight.detach())
        del model.model.embed_tokens  # the last reference to a tied head, which is packed now
        return Model(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            embedding_scale=model.embedding_scale,
            residual_scale=config.residual_scale,
            logits_scale=1 / config.logits_divisor,
            logits_softcap=config.logits_softcap or 0.0,
            layers=layers,
            final_norm=self.norm(model.model.norm),
            embedding=embedding,
            head=head,
            **_native_shape(config.layers[0]),
        )

    def matrix(self, linear: Linear, arrange: Arrange = _as_they_are, *, num_exact: int = 0) -> Matrix:
        """See `Packer`."""
        return self._matrix(linear, arrange, num_exact=num_exact)

    def _matrix(
        self, linear: Linear, arrange: Arrange = _as_they_are, *, is_head: bool = False, num_exact: int = 0
    ) -> Matrix:
        bias = None if linear.bias is None else arrange(linear.bias)
        weight = linear.let_go()
        if isinstance(weight, torch.Tensor) and self._quantization is None:
            return self._place(pack(arrange(weight), bias))
        self.has_groups = True
        if isinstance(weight, GroupedWeight):
            weight = weight.map_rows(arrange)  # frees the rows in their first order
            return self._place(pack_grouped(weight, bias))
        is_narrow = self._quantization is Quantization.INT4 and not is_head
        rounded = quantize(weight, 4 if is_narrow else 8)
        residual = None
        if num_exact:
            last = rounded.rows(slice(-num_exact, None))
            lost = weight[-num_exact:].float() - last.dequantize()[:, : weight.shape[1]]
            residual = pack_grouped(quantize(lost, rounded.num_bits), has_byte_scales=is_narrow)
        return self._place(pack_grouped(rounded.map_rows(arrange), bias, has_byte_scales=is_narrow), residual)

    def _place(self, matrix: PackedMatrix, residual: PackedMatrix | None = None) -> Matrix:
        """`residual`: the rounding errors of the last columns, in the same format."""
        parts = ("panels", "scales", "offsets", "units")
        places = {name: self._keep(getattr(matrix, name)) for name in (*parts, "bias")}
        if residual is not None:
            places |= {f"residual_{name}": self._keep(getattr(residual, name)) for name in parts}
        return Matrix(
            columns=matrix.num_outputs,
            depth=matrix.depth,
            num_bits=matrix.num_bits,
            group_size=matrix.group_size,
            scale_bits=0 if matrix.scales is None else 8 * matrix.scales.itemsize,
            first_residual=0 if residual is None else matrix.num_outputs - residual.num_outputs,
            **places,
        )

    def rotation(self, table: RopeTable) -> Rotation:
        """See `Packer`."""
        return self._rotations[table]

    def norm(self, norm: RMSNorm | None, arrange: Arrange = _as_they_are) -> int | None:
        """The factors of a norm: float32, padded with zeros to whole vectors."""
        if norm is None:
            return None
        weight = arrange(norm.weight.detach().float() + norm.is_offset)
        return self._keep(nn.functional.pad(weight, (0, -len(weight) % LANES)))

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is not None:
            self._kept.append(tensor)
            self.num_bytes += tensor.nbytes
        return _address(tensor)


def _give_back_memory() -> None:
    """Returns freed memory to the system: glibc would keep it, some hundred MB while a model is loaded."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _address(tensor: torch.Tensor | None) -> int | None:
    """The address of a dense tensor's elements; None for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels know nothing of strides"
    return tensor.data_ptr()
