"""A layer: its blocks one after the other, each with its residual around it and norms before it, after it, or both.

Neighbours of one role stand side by side: they read the same input, between the same norms, and their outputs are
added up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from chairlift.models.blocks.block import Block, BlockModule, Edges, Packer, Part, Pass, Weight
from chairlift.models.layers import Linear, RMSNorm, Use


class Norms(StrEnum):
    """Places a layer's norms before a block, after it (before the residual is added), or both."""

    PRE = "pre"
    POST = "post"
    PRE_AND_POST = "pre and post"

    @property
    def places(self) -> tuple[str, ...]:
        """Returns how the names of the norms around a block begin in the wiring."""
        return tuple(self.split(" and "))


# Hugging Face's names depend on which norms there are.
_NAMES = {
    Norms.PRE: {"pre_attention_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
    Norms.POST: {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
    Norms.PRE_AND_POST: {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
_PLACES: dict[str, tuple[str, ...]] = {  # of norms around roles for which they do not depend on the model
    "altup": (),
    "laurel": (),
    "parallel_mlp": ("post",),
    "per_layer_input": ("post",),
}
_COMMON_NAMES = {
    "post_parallel_mlp_norm": "post_feedforward_layernorm",
    "post_per_layer_input_norm": "post_per_layer_input_norm",
}
_SCALE = "layer_scalar"
_GGUF_NAMES = {
    "pre_attention_norm": "attn_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm",
    "post_parallel_mlp_norm": "post_ffw_norm",
    "post_per_layer_input_norm": "post_norm",
}


def _norms_around(role: str, norms: Norms) -> list[str]:
    """Names the norms around the blocks of a role, in a model that has these around others."""
    return [f"{place}_{role}_norm" for place in _PLACES.get(role, norms.places)]


def weights_of_layer(blocks: Sequence[Block], norms: Norms, *, has_scale: bool) -> list[Weight]:
    """Its weights, with names within the layer."""
    weights = [weight.within(f"{each.name}.", f"{each.name}.", "") for each in blocks for weight in each.weights()]
    roles, known = dict.fromkeys(each.role for each in blocks), _NAMES[norms] | _COMMON_NAMES
    around = [name for role in roles for name in _norms_around(role, norms)]
    scale = [Weight.parameter(Part(_SCALE, "layer_output_scale.weight"))] if has_scale else []
    return [*weights, *(Weight.whole(name, known[name], _GGUF_NAMES[name]) for name in around), *scale]


class Residual(NamedTuple):
    """The tokens between two layers: `[T, hidden]` each, whose sum they are. The next norm adds them."""

    x: torch.Tensor
    delta: torch.Tensor | None  # of the last block; None: its last product has added it to x already


class PackedBlock(NamedTuple):
    """Holds the fields of a block's structure in the native code."""

    kind: str | None  # see `Block.native`
    fields: dict[str, object]


class PackedSublayer(NamedTuple):
    """Holds what the native code is given of blocks of one role and the norms around them, of these the addresses."""

    blocks: list[PackedBlock]
    pre_norm: int | None
    post_norm: int | None
    scale: float = 1.0  # of the tokens after it
    sum_norm: int | None = None
    is_continued: bool = False  # see csrc/model.h
    adds_input: bool = False  # likewise


@dataclass(slots=True)
class _Normed:
    """Blocks of one role between their norms."""

    pre: RMSNorm | None
    blocks: list[tuple[Block, BlockModule]]
    post: RMSNorm | None

    @property
    def edges(self) -> Edges:
        """The products that may fold in what is around them: those of a block that stands alone."""
        (_, first), *others = self.blocks
        edges = first.edges
        return Edges() if others else replace(edges, last=edges.last if self.post is None else None)

    def add_up(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """Runs the blocks over the same input `[T, hidden]`; returns the sum."""
        (_, first), *others = self.blocks
        total: torch.Tensor = first(x, now)
        for _, module in others:
            total = total + module(x, now)
        return total


class DecoderLayer(nn.Module):
    """The layer in torch. Its modules have the blocks' names, and the norms those above."""

    def __init__(
        self,
        blocks: Sequence[Block],
        layer_idx: int,
        hidden_size: int,
        norms: Norms,
        make_norm: Callable[[int], RMSNorm],
        residual_scale: float,
        *,
        has_scale: bool = False,
    ) -> None:
        """`has_scale`: it multiplies the tokens that leave it by a number of its own."""
        super().__init__()
        modules = [each.make(layer_idx, hidden_size, make_norm) for each in blocks]
        for each, module in zip(blocks, modules, strict=True):
            self.add_module(each.name, module)
        self._norms: dict[str, RMSNorm] = {}
        self._blocks: list[_Normed] = []
        for role, members in groupby(zip(blocks, modules, strict=True), key=lambda each: each[0].role):
            for name in _norms_around(role, norms):
                self._norms[name] = make_norm(hidden_size)
                self.add_module(name, self._norms[name])
            pre, post = (self._norms.get(f"{place}_{role}_norm") for place in ("pre", "post"))
            self._blocks.append(_Normed(pre, list(members), post))
        self._residual_scale = residual_scale
        self.layer_scalar = nn.Parameter(torch.empty(1)) if has_scale else None

    def forward(self, stream: Residual, now: Pass) -> Residual:
        """Returns what the layer makes of the tokens."""
        x, delta = stream.x, stream.delta
        for each in self._blocks:
            edges, norm = each.edges, None
            if delta is None and edges.first is not None and edges.first.folds_norm(len(x)):
                norm, entering = each.pre, x
            else:
                x, entering = _enter(each.pre, x, delta)
            is_added = self._residual_scale == 1.0 and edges.last is not None and edges.last.folds(len(x))
            output = each.add_up(entering, replace(now, norm=norm, residual=x if is_added else None))
            x, delta = (output, None) if is_added else (x, self._leave(each.post, output))
        if self.layer_scalar is None:
            return Residual(x, delta)
        x = x if delta is None else x + delta
        return Residual(x * self.layer_scalar.to(x.dtype), None)

    def uses(self) -> dict[Linear, Use]:
        """Lists the products that may fold in what stands beside them, and what that is."""
        found = {}
        for each in self._blocks:
            edges = each.edges
            if edges.first is not None:
                found[edges.first] = Use(norm=each.pre)
            if edges.last is not None and self._residual_scale == 1.0 and not edges.last.is_partial:
                found[edges.last] = Use(adds=True)
        return found

    def pack(self, packer: Packer) -> list[PackedSublayer]:
        """Takes the weights out, role by role, or block by block if these have norms of their own."""
        packed = []
        for each in self._blocks:
            own = [module.own_norms for _, module in each.blocks]
            blocks = [PackedBlock(block.native, module.pack(packer)) for block, module in each.blocks]
            pre_norm, post_norm = packer.norm(each.pre), packer.norm(each.post)
            if own[0] is None:
                packed.append(PackedSublayer(blocks, pre_norm, post_norm))
                continue
            for block, norms in zip(blocks, own, strict=True):
                assert norms is not None, "blocks side by side have norms of their own, or none has"
                before, behind = norms
                packed.append(PackedSublayer([block], packer.norm(before), packer.norm(behind), is_continued=True))
            packed[-1] = packed[-1]._replace(sum_norm=post_norm, is_continued=False)
        if self.layer_scalar is not None:
            packed[-1] = packed[-1]._replace(scale=self.layer_scalar.item())
        return packed

    def _leave(self, norm: RMSNorm | None, delta: torch.Tensor) -> torch.Tensor:
        delta = delta if norm is None else norm(delta)
        return delta if self._residual_scale == 1.0 else delta * self._residual_scale


def _enter(norm: RMSNorm | None, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta`, and the block's input: the same after the norm, if there is one."""
    if delta is None:
        return x, x if norm is None else norm(x)
    if norm is not None:
        return norm.add(x, delta)
    x = x + delta
    return x, x
