"""The faces of a block: what the wiring, the loader, the ranks, the native code and the cache ask of every kind.

A `Block` describes one block of one layer, and makes its `BlockModule`. All that depends on the kind is in its file;
the others go through these two.

    weights           the loader, for Hugging Face's names; GGUF files, for llama.cpp's; ranks, for how each is cut
    divide            ranks, for the part that each computes
    kept              the cache, for the keys and values that a slot keeps of the layer
    state             the cache, for the recurrent state that a slot keeps of it
    native            the native code, for the kind of its structure there
    pack              the native code, for what that structure holds: weights, and the shape that they have
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from chairlift.cache.layout import Kept, Place, StateParams
from chairlift.cache.states import StatePlace
from chairlift.models.attention import Attend
from chairlift.models.layers import Linear, RMSNorm
from chairlift.models.recurrence import Recur
from chairlift.models.rotary import RopeTable

Arrange = Callable[[torch.Tensor], torch.Tensor]
"""Brings the rows of a matrix or vector into the order that the native code expects."""


class Cut(Enum):
    """The way in which ranks divide a weight."""

    NONE = auto()  # each has all of it
    ROWS = auto()  # each computes outputs of its own; several have the same where there are fewer units than ranks
    COLUMNS = auto()  # each computes a summand of every output; the first one adds the bias
    PADDED_ROWS = auto()  # as ROWS, but any number can be divided: zeros fill the last ranks'


@dataclass(frozen=True, slots=True)
class Units:
    """Heads or features, which are never divided themselves, along the cut dimension of a weight."""

    count: int
    length: int = 1  # of each

    @property
    def total(self) -> int:
        return self.count * self.length


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a checkpoint, without its suffix: a weight of a block, or some rows of one."""

    name: str  # Hugging Face's
    gguf: str  # llama.cpp's
    units: tuple[Units, ...] = ()  # one after the other; none: the weight is not cut, and its parts are of one size
    rotated_head_dim: int | None = None  # of heads that are rotated, whose rows some GGUF files have in another order
    from_gguf: Arrange | None = None  # llama.cpp's tensor -> Hugging Face's; None: they are the same
    num_still: int = 0  # elements of a rotated head before those that rotate

    @property
    def length(self) -> int:
        return sum(each.total for each in self.units)


@dataclass(frozen=True, slots=True)
class Weight:
    """A module or parameter of the wiring, and the tensors of a checkpoint that are stacked in it, in order."""

    module: str
    parts: tuple[Part, ...]
    cut: Cut = Cut.NONE
    is_parameter: bool = False  # names are whole, where others stand before `.weight` and `.bias`
    is_interleaved: bool = False  # native code has rows of its parts in turns, so integers of all have one format

    @classmethod
    def whole(cls, module: str, name: str, gguf: str) -> Self:
        """A weight that is one tensor, and is not divided."""
        return cls(module, (Part(name, gguf),))

    @classmethod
    def parameter(cls, part: Part, cut: Cut = Cut.NONE) -> Self:
        """A weight that is a parameter of the block itself, and one tensor. It stays in float32 in any model."""
        return cls(part.name, (part,), cut, is_parameter=True)

    def within(self, module: str, name: str, gguf: str) -> "Weight":
        """The same with its names behind these prefixes."""
        parts = tuple(replace(part, name=f"{name}{part.name}", gguf=f"{gguf}{part.gguf}") for part in self.parts)
        return replace(self, module=f"{module}{self.module}", parts=parts)


@dataclass(frozen=True, slots=True)
class Pass:
    """Carries what blocks need of the pass beside their input."""

    ropes: Mapping[RopeTable, torch.Tensor]  # [2, T, 1, rotated] each: cosines and sines of the tokens
    positions: torch.Tensor  # int64 [T]
    attend: Attend
    recur: Recur | None = None  # None: no block of the model has a state
    norm: RMSNorm | None = None  # None: the block's input is normalised; else its first product folds this norm in
    residual: torch.Tensor | None = None  # [T, hidden], which the block's last product adds; None: it adds nothing
    layer_inputs: torch.Tensor | None = None  # [T, layers, size]: what each layer gets of each token; None: nothing


@dataclass(frozen=True, slots=True)
class Edges:
    """The products of a block that its layer may fold what is around it into. None: something stands between."""

    first: Linear | None = None  # reads the block's input, as nothing else does
    last: Linear | None = None  # its output is the block's


class BlockModule(nn.Module):
    """A block in torch."""

    @property
    def edges(self) -> Edges:
        """Its first and last products. A block that names them heeds `Pass.norm` and `Pass.residual` in these."""
        return Edges()

    @property
    def own_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of its input and of its output that it applies itself; None: those around it are the layer's."""
        return None

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`, which the layer adds to its input."""
        raise NotImplementedError

    def pack(self, packer: "Packer") -> dict[str, object]:
        """Takes the weights out of the module; returns the fields of its structure in `csrc/model.h`."""
        raise NotImplementedError


class Block(Protocol):
    """A block of one layer: everything that its wiring depends on. Frozen, and equal if its fields are."""

    name: ClassVar[str]  # of its module in a layer, as Hugging Face's tensors have it
    role: ClassVar[str]  # in the names of the norms around it: attention, mlp, or what `layer` lists beside these

    @property
    def native(self) -> str | None:
        """Names its kind in `cpu/structures.py`; None: there is no native code for it."""
        ...

    def make(self, layer_idx: int, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> BlockModule:
        """The module, without weights."""
        ...

    def weights(self) -> tuple[Weight, ...]:
        """Lists what checkpoints may hold of it. Names are within the block, and llama.cpp's within the layer."""
        ...

    def divide(self, num_ranks: int) -> "Block":
        """A rank's part."""
        ...

    def find_split_obstacle(self, num_ranks: int) -> str | None:
        """Says why it cannot be divided over so many ranks; None if it can."""
        ...

    def kept(self, dtype: torch.dtype) -> Kept:
        """Declares what a slot keeps of it, in a model that computes in that format."""
        ...

    def state(self) -> StateParams | None:
        """Declares the recurrent state that a slot keeps of it; None: it has none."""
        ...


@dataclass(frozen=True, slots=True)
class KeepsNothing:
    """The base of blocks of which a slot keeps nothing."""

    def kept(self, dtype: torch.dtype) -> None:
        """See `Block`."""

    def state(self) -> None:
        """See `Block`."""


@dataclass(frozen=True, slots=True)
class Undivided(KeepsNothing):
    """The base of those of which every rank also has the whole."""

    def divide(self, num_ranks: int) -> Self:  # noqa: ARG002
        """See `Block`."""
        return self

    def find_split_obstacle(self, num_ranks: int) -> None:
        """See `Block`."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary table of the native code, and how many of a head's first elements it rotates."""

    address: int | None
    num_rotated: int


class Packer(Protocol):
    """Brings weights into the native code's layout, and returns what its structures hold of them."""

    lanes: int  # outputs of a panel

    def matrix(
        self,
        linear: Linear,
        arrange: Arrange = ...,
        *,
        is_exact: bool = False,
        is_plain: bool = False,
        is_sensitive: bool = False,
        num_value_rows: int = 0,
        input_scale: float = 1.0,
        num_parts: int = 1,
    ) -> Any:
        """`is_exact`: it is never rounded here. `is_plain`: nor is it in groups; one that is is widened.

        `is_sensitive`: it loses most with few bits, and has more in some layers.
        `num_value_rows`: how many last rows, as they are arranged, make attention's values. If rounded here, they keep
        their errors, or all of the matrix has more bits.
        `num_parts`: of equal size, each of whose rows are arranged by themselves.
        `input_scale`: a factor of the input that the code gives to the output; so the bias is divided by it, not 0.
        """
        ...

    def plain_matrix(self, weight: torch.Tensor) -> Any:
        """`[out, in]`: of no `Linear`, and never rounded."""
        ...

    def norm(self, norm: RMSNorm | None, arrange: Arrange = ...) -> int | None:
        """The address of a norm's factors."""
        ...

    def rotation(self, table: RopeTable) -> Rotation:
        """The table of that key."""
        ...

    def vector(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's elements in float32."""
        ...

    def place(self, layer_idx: int) -> Place:
        """Locates the layer's keys and values in the cache."""
        ...

    def state_place(self, layer_idx: int) -> StatePlace:
        """Locates the layer's state."""
        ...
