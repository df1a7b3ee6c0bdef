"""Parts that architectures are wired from."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.device import compiled_on_gpu
from chairlift.models.grouped import GroupedParts, GroupedWeight


class Product(Protocol):
    """A way to multiply by the weight of a `Linear`, which may fold in what stands beside the product in a layer."""

    def folds(self, num_rows: int) -> bool:
        """True if products of so many rows fold in the residual."""
        ...

    def folds_norm(self, num_rows: int) -> bool:
        """True if they fold in the norm of their input."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        norm: "RMSNorm | None" = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Linear.forward`."""
        ...


class Linear(nn.Linear):
    """`x W^T + b`; `product` stands in for torch's where it is set.

    On a CPU in bfloat16 the weight can be packed once, which oneDNN otherwise does in every call.
    """

    _taken: GroupedWeight | torch.Tensor | Callable[[], GroupedWeight | torch.Tensor] | None = None
    is_whole: ClassVar[bool] = True  # every product is with all of the weight
    _packed: torch.Tensor | None = None
    product: Product | None = None
    is_partial: bool = False  # what it computes is added up with the results of other ranks

    def reset_parameters(self) -> None:
        """Leaves them as they are: all are loaded, and drawing those without data makes torch import its compiler."""

    @property
    def grouped(self) -> GroupedWeight | None:
        """The weight if it is in groups, which the kernels multiply as they are; then there is no `weight`.

        Without steps, which those of GPUs do not know.
        """
        if callable(self._taken):
            self._taken = self._taken()
        if isinstance(self._taken, GroupedWeight):
            self._taken = self._taken.without_steps()
        return self._taken if isinstance(self._taken, GroupedWeight) else None

    def load_weight(self, weight: GroupedWeight | Callable[[], GroupedWeight | torch.Tensor]) -> None:
        """Replaces `weight`. A function is called when the weight is needed, so that each is packed as it is read."""
        self._taken = weight
        del self.weight

    def read(self) -> None:
        """Reads a plain weight, if that was to be done when it is needed."""
        if callable(self._taken):
            weight, self._taken = self._taken(), None
            assert isinstance(weight, torch.Tensor), "weights in groups are not multiplied here"
            self.weight = nn.Parameter(weight, requires_grad=False)

    def let_go(self) -> torch.Tensor | GroupedWeight:
        """Returns the weight, and drops it."""
        if self._taken is not None:
            taken = self._taken() if callable(self._taken) else self._taken
            self._taken = None
            return taken
        weight = self.weight.detach()
        del self.weight
        return weight

    def let_go_parts(self) -> GroupedParts | None:
        """Returns what reads the weight, and drops it. None if it is not in groups, or has been read."""
        if not isinstance(self._taken, GroupedParts):
            return None
        parts, self._taken = self._taken, None
        return parts

    def pack(self) -> None:
        """Brings the weight into oneDNN's blocked layout, which is opaque, and frees the plain one."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        del self.weight

    def folds(self, num_rows: int) -> bool:
        """True if products of so many rows fold in the residual, which of several ranks every one would do."""
        return self.product is not None and not self.is_partial and self.product.folds(num_rows)

    def folds_norm(self, num_rows: int) -> bool:
        """True if they fold in the norm of their input."""
        return self.product is not None and self.product.folds_norm(num_rows)

    def forward(
        self,
        x: torch.Tensor,
        norm: "RMSNorm | None" = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[T, in] -> [T, out]`: of `norm(x)`, and then `addend` added.

        These two only where `folds_norm` and `folds` say so for the number of rows.
        """
        if self.product is not None:
            return self.product(x, norm, addend)
        assert norm is None, "torch folds nothing in"
        assert addend is None, "torch folds nothing in"
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


class RowTable(nn.Embedding):
    """Looks up rows. Those in groups of small integers stay so, and become numbers when they are looked up."""

    _grouped: GroupedWeight | None = None

    def reset_parameters(self) -> None:
        """See `Linear`."""

    def load_weight(self, weight: GroupedWeight | Callable[[], GroupedWeight | torch.Tensor]) -> None:
        """Replaces `weight` with one in groups."""
        loaded = weight() if callable(weight) else weight
        assert isinstance(loaded, GroupedWeight), "plain rows are set as a parameter"
        self._grouped = loaded
        del self.weight

    @property
    def grouped(self) -> GroupedWeight | None:
        """The rows if they are in groups; then there is no `weight`."""
        return self._grouped

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take."""
        if (grouped := self._grouped) is None:
            return self.weight.nbytes
        return grouped.num_bytes

    def let_go(self) -> torch.Tensor | GroupedWeight:
        """Returns the rows, and drops them."""
        if (grouped := self._grouped) is not None:
            self._grouped = None
            return grouped
        weight = self.weight.detach()
        del self.weight
        return weight

    def look_up(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 `[T]` -> `[T, features]`"""
        if self._grouped is None:
            plain: torch.Tensor = self(indices)
            return plain.to(dtype)
        return self._grouped.map_rows(lambda rows: rows[indices]).dequantize(dtype)


def can_pack(weight: torch.Tensor) -> bool:
    """True where packing pays: measured on x86, it does for bfloat16 and does not for float32."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_bfloat16()


def has_bfloat16() -> bool:
    """True if oneDNN has products in bfloat16 on this CPU. With AVX2 alone it has none, and refuses the weight."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), or times 1 + weight, as Gemma has it."""

    def __init__(self, size: int, eps: float, *, is_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.is_offset = is_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`"""
        return _rms_norm(x, self.weight, self.eps, self.is_offset)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + delta`, and that normalised: `[T, size]` each."""
        return _add_rms_norm(x, delta, self.weight, self.eps, self.is_offset)


class UnitNorm(nn.Module):
    """x / rms(x) over the last dimension: a norm that has no factors."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`"""
        return _unit_norm(x, self.eps)


@dataclass(frozen=True, slots=True)
class Use:
    """Says what a layer may fold into a product: the norm of its input, the residual."""

    norm: RMSNorm | None = None
    adds: bool = False


def _unit_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    # On a CPU torch's own rms_norm is a composite of twice as many operators.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale: torch.Tensor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return scale


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool) -> torch.Tensor:
    scale = _unit_scale(x, eps)
    if is_offset:
        return (x * scale * (1.0 + weight.float())).to(x.dtype)
    return (x * scale).to(x.dtype) * weight


@compiled_on_gpu
def _unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x * _unit_scale(x, eps)).to(x.dtype)


@compiled_on_gpu
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool) -> torch.Tensor:
    return _normalised(x, weight, eps, is_offset)


@compiled_on_gpu
def _add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + delta
    return total, _normalised(total, weight, eps, is_offset)


@compiled_on_gpu
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 N] -> [T, N]`: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@compiled_on_gpu
def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """c tanh(x / c): close to x for small x, and never beyond c."""
    return torch.tanh(scores / cap) * cap


def pad_rows(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Pads the first dimension with zeros to a multiple; the result is dense."""
    missing = -len(tensor) % multiple
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)).contiguous() if missing else tensor.contiguous()
