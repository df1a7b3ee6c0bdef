"""The block of attention: queries over the keys and values that a slot keeps of all earlier tokens."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from typing import ClassVar, Self

import torch
from torch import nn

from chairlift.cache.layout import KVCacheParams, SharedWith
from chairlift.models.attention import AttentionConfig, Projections
from chairlift.models.blocks.block import BlockModule, Cut, Edges, Packer, Part, Pass, Units, Weight
from chairlift.models.blocks.head_orders import HeadOrder, arrange_heads, head_order, is_ascending, part_gates
from chairlift.models.layers import Linear, RMSNorm, UnitNorm
from chairlift.models.rotary import RopeConfig, RopeTable, apply_rope

_OWN_KEYS = "a layer whose keys and values have elements in common has keys, with a norm"
ALL_KEYS = 1 << 30
"""A window that no sequence is longer than; positions minus it are 32-bit numbers."""


class QKNorm(StrEnum):
    """Tells what one norm of queries (or keys) spans, before they are rotated."""

    NONE = "none"
    HEAD = "head"
    ALL_HEADS = "all heads"


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Multiplies rotated queries by `1 + rate log(1 + floor(position / length))`, so that long contexts stay sharp."""

    rate: float
    length: int

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` -> float32 `[T]`"""
        return 1 + self.rate * torch.log1p(torch.div(positions, self.length, rounding_mode="floor").float())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """A `Block`: the attention of one layer."""

    name: ClassVar[str] = "self_attn"
    role: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of scores
    rope: RopeConfig | None = None  # None: no positions
    window: int | None = None  # keys that a query sees, its own included; None: all
    softcap: float | None = None  # c tanh(score / c)
    qk_norm: QKNorm = QKNorm.NONE
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_output_gate: bool = False  # q_proj gives, head by head, the query and a gate of what the head attends to
    growth: QueryGrowth | None = None  # None: queries are as they are
    has_sinks: bool = False  # a score of each head that takes a part of the softmax
    has_value_norm: bool = False  # of each head, without factors
    are_keys_values: bool = False  # values are what keys are before their norm and rotation; there is no v_proj
    num_common: int = 0  # elements that keys and values have in common: see `HeadOrder`
    source: int | None = None  # the layer whose keys and values it reads, without any of its own; None: it has some
    input_scale: float = 1.0
    output_scale: float = 1.0
    is_fused: bool = False  # checkpoints hold qkv_proj, not its parts

    @property
    def native(self) -> str | None:
        """Names its structure in native code, which has no queries that grow, and gates beside own values only."""
        is_unknown = self.growth is not None or self.input_scale == 0.0
        has_own_values = self.source is None and not self.are_keys_values
        return None if is_unknown or (self.has_output_gate and not has_own_values) else "attention"

    @property
    def projected_head_dim(self) -> int:
        """The size of a head of the product that makes queries."""
        return self.head_dim

    @property
    def num_projected_heads(self) -> int:
        """Counts the heads that the first product gives: queries, their gates, keys and values."""
        num_kinds = 0 if self.source is not None else 1 if self.are_keys_values else 2
        return self.num_heads * (1 + self.has_output_gate) + num_kinds * self.num_kv_heads

    @property
    def unread(self) -> tuple[str, ...]:
        """Names what checkpoints may hold of its keys and values although it reads those of another layer."""
        return ("k_proj.", "v_proj.", "k_norm.") if self.source is not None else ()

    @property
    def table(self) -> RopeTable | None:
        """The rotary table that it reads."""
        return None if self.rope is None else RopeTable(self.rope, self.head_dim)

    @property
    def attention(self) -> AttentionConfig:
        """Describes what an attention backend computes for it."""
        return AttentionConfig(self.scale, self.window, self.softcap, self.has_sinks)

    def make(self, layer_idx: int, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> "SelfAttention":
        return SelfAttention(self, layer_idx, hidden_size, make_norm)

    def weights(self) -> tuple[Weight, ...]:
        queries, keys = Units(self.num_heads, self.head_dim), Units(self.num_kv_heads, self.head_dim)
        gated = replace(queries, length=2 * self.head_dim) if self.has_output_gate else queries
        parts: tuple[Part, ...] = (
            Part("q_proj", "attn_q", (gated,), self.head_dim),
            Part("k_proj", "attn_k", (keys,), self.head_dim),
            Part("v_proj", "attn_v", (keys,)),
        )
        if self.source is not None:
            parts = parts[:1]
        elif self.are_keys_values:
            parts = parts[:2]
        if self.is_fused:
            parts = (Part("qkv_proj", "attn_qkv", (queries, keys, keys)),)
        sinks = Weight.parameter(Part("sinks", "attn_sinks.weight", (Units(self.num_heads),)), Cut.ROWS)
        norm_cut = Cut.ROWS if self.qk_norm is QKNorm.ALL_HEADS else Cut.NONE
        key_norm = Weight("k_norm", (Part("k_norm", "attn_k_norm", (keys,)),), norm_cut)
        return (
            Weight("qkv_proj", parts, Cut.ROWS),
            Weight("o_proj", (Part("o_proj", "attn_output", (queries,)),), Cut.COLUMNS),
            Weight("q_norm", (Part("q_norm", "attn_q_norm", (queries,)),), norm_cut),
            *(() if self.source is not None else (key_norm,)),
            *((sinks,) if self.has_sinks else ()),
        )

    def divide(self, num_ranks: int) -> Self:
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=max(1, self.num_kv_heads // num_ranks))

    def find_split_obstacle(self, num_ranks: int) -> str | None:
        if self.num_heads % num_ranks:
            return f"its {self.num_heads} attention heads cannot be divided by that"
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            return f"its {self.num_kv_heads} key/value heads can neither be divided by that nor divide it"
        return None

    def kept(self, dtype: torch.dtype) -> KVCacheParams | SharedWith:
        if self.source is not None:
            return SharedWith(self.source)
        return KVCacheParams(dtype, self.num_kv_heads, self.head_dim, num_common=self.num_common)

    def state(self) -> None:
        return None


class SelfAttention(BlockModule):
    """Projections around `attend`; queries and keys are normalised and rotated in between, if the block says so."""

    def __init__(
        self, block: AttentionBlock, layer_idx: int, hidden_size: int, make_norm: Callable[[int], RMSNorm]
    ) -> None:
        super().__init__()
        self.block = block
        self._table = block.table
        self.layer_idx = layer_idx
        self.num_heads, self.num_kv_heads, self.head_dim = block.num_heads, block.num_kv_heads, block.head_dim
        self._num_new = block.num_kv_heads if block.source is None else 0  # heads of keys, and of values
        self.qkv_proj = Linear(hidden_size, block.num_projected_heads * block.head_dim, bias=block.has_qkv_bias)
        self.o_proj = Linear(block.num_heads * block.head_dim, hidden_size, bias=block.has_output_bias)
        self.sinks = nn.Parameter(torch.empty(block.num_heads)) if block.has_sinks else None
        self.q_norm = self.k_norm = None
        if block.qk_norm is not QKNorm.NONE:
            is_per_head = block.qk_norm is QKNorm.HEAD
            self.q_norm = make_norm(block.head_dim * (1 if is_per_head else block.num_heads))
            if self._num_new:
                self.k_norm = make_norm(block.head_dim * (1 if is_per_head else block.num_kv_heads))
        self.v_norm = UnitNorm(make_norm(1).eps) if block.has_value_norm else None
        self._shared = HeadOrder(block.head_dim, block.num_common) if block.num_common else None

    @property
    def edges(self) -> Edges:
        """See `BlockModule`."""
        is_first, is_last = self.block.input_scale == 1.0, self.block.output_scale == 1.0
        return Edges(self.qkv_proj if is_first else None, self.o_proj if is_last else None)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; appends the tokens' keys and values to the slots."""
        if self.block.input_scale != 1.0:
            x = x * self.block.input_scale
        heads = self.qkv_proj(x, now.norm).unflatten(
            -1, (-1, self.head_dim)
        )  # [T, Hq + 2 Hkv, D], or gates after queries
        gate = None
        if self.block.has_output_gate:
            queries, others = heads[:, : 2 * self.num_heads], heads[:, 2 * self.num_heads :]
            queries, gate = queries.unflatten(1, (-1, 2)).unbind(2)
            heads = torch.cat((queries, others), dim=1)
        rotated = self._rotate(heads[:, : self.num_heads + self._num_new], now)
        query, key, value = rotated[:, : self.num_heads], None, None
        if self._num_new:
            key, value = rotated[:, self.num_heads :], heads[:, -self._num_new :]  # the last are keys if these are both
            value = value if self.v_norm is None else self.v_norm(value)
        if self.block.growth is not None:
            query = query * self.block.growth.factors(now.positions).to(query.dtype)[:, None, None]
        new = Projections(query, key, value, self.sinks)
        if self._shared is None:
            attended = now.attend(self.layer_idx, new)
        else:
            attended = self._attend_shared(self._shared, new, now)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        projected: torch.Tensor = self.o_proj(attended.flatten(1), addend=now.residual)
        return projected if self.block.output_scale == 1.0 else projected * self.block.output_scale

    def _attend_shared(self, order: HeadOrder, new: Projections, now: Pass) -> torch.Tensor:
        assert new.own is not None, _OWN_KEYS
        shared = order.share(new.query, *new.own, self._key_factors())
        return now.attend(self.layer_idx, Projections(*shared, new.sinks))[..., order.back(new.query.device)]

    def _key_factors(self) -> torch.Tensor:
        """float32 `[head_dim]`: the factors of the keys' norm."""
        assert self.k_norm is not None, _OWN_KEYS
        return self.k_norm.weight.detach().float() + self.k_norm.is_offset

    def _rotate(self, heads: torch.Tensor, now: Pass) -> torch.Tensor:
        """Queries and new keys, `[T, Hq + Hkv, D]`: normalised and rotated, as far as the block says so."""
        angles = None if self._table is None else now.ropes[self._table]
        if heads.is_cuda and _has_triton() and self.block.qk_norm is not QKNorm.ALL_HEADS:
            return _rotate_in_triton(heads, self.num_heads, angles, self.q_norm, self.k_norm)
        if self.q_norm is not None:
            query = _normalise(self.q_norm, heads[:, : self.num_heads])
            key = None if self.k_norm is None else _normalise(self.k_norm, heads[:, self.num_heads :])
            heads = query if key is None else torch.cat((query, key), dim=1)
        if angles is not None:
            cosines, sines = angles
            heads = apply_rope(heads, cosines, sines)
        return heads

    def pack(self, packer: Packer) -> dict[str, object]:
        block, place = self.block, packer.place(self.layer_idx)
        rotation = None if self._table is None else packer.rotation(self._table)
        order = self._packed_order(packer, self.head_dim if rotation is None else rotation.num_rotated)
        arrange = partial(arrange_heads, num_heads=self.num_heads + self._num_new, order=order)
        num_value_rows = self._num_new * self.head_dim
        are_both = block.are_keys_values and block.source is None
        # Keys in another order are no values, unless these are in that order, too.
        are_keys_values = are_both and (is_ascending(order) or self._shared is not None)

        def arrange_all(rows: torch.Tensor) -> torch.Tensor:
            arranged = arrange(part_gates(rows, self.num_heads, self.head_dim) if block.has_output_gate else rows)
            return arranged if are_keys_values or not are_both else torch.cat((arranged, rows[-num_value_rows:]))

        def arrange_factors(factors: torch.Tensor) -> torch.Tensor:
            if self._shared is not None:
                factors = factors.clone()
                still = self._shared.still()
                factors[still] *= self._key_factors()[still]
            return arrange(factors)

        return {
            "qkv": packer.matrix(
                self.qkv_proj, arrange_all, num_value_rows=num_value_rows, input_scale=block.input_scale
            ),
            "out": packer.matrix(self.o_proj),
            "query_norm": packer.norm(self.q_norm, arrange_factors),
            "key_norm": packer.norm(self.k_norm, arrange),
            "sinks": None if self.sinks is None else packer.vector(self.sinks),
            "rope": None if rotation is None else rotation.address,
            "num_heads": block.num_heads,
            "num_kv_heads": block.num_kv_heads,
            "head_dim": block.head_dim,
            "window": min(block.window or ALL_KEYS, ALL_KEYS),
            "are_heads_normed_as_one": block.qk_norm is QKNorm.ALL_HEADS,
            "has_output_gate": block.has_output_gate,
            "has_value_norm": block.has_value_norm,
            "are_keys_values": are_keys_values,
            "num_common": block.num_common,
            "is_query_only": block.source is not None,
            "group": place.group,
            "plane": place.plane,
            "scale": block.scale,
            "softcap": block.softcap or 0.0,
            "input_scale": block.input_scale,
            "output_scale": block.output_scale,
        }

    def _packed_order(self, packer: Packer, num_rotated: int) -> torch.Tensor:
        if self._shared is not None:
            return self._shared.of_keys()
        return head_order(self.head_dim, num_rotated, packer.lanes)


def _normalise(norm: RMSNorm, heads: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]`, each head alone or all heads of a token together, depending on the norm's width."""
    spanned = heads if len(norm.weight) == heads.shape[-1] else heads.flatten(1)
    normalised: torch.Tensor = norm(spanned)
    return normalised.view(heads.shape)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _rotate_in_triton(
    heads: torch.Tensor, num_heads: int, angles: torch.Tensor | None, q_norm: RMSNorm | None, k_norm: RMSNorm | None
) -> torch.Tensor:
    """See `SelfAttention._rotate`; norms span a head."""
    from chairlift.kernels.head_rotation import HeadNorms, rotate

    if angles is None and q_norm is None:
        return heads
    norms = None
    if q_norm is not None:
        of_keys = q_norm if k_norm is None else k_norm  # without keys, whatever is there
        norms = HeadNorms(q_norm.weight, of_keys.weight, q_norm.eps, q_norm.is_offset)
    cosines, sines = (None, None) if angles is None else angles
    return rotate(heads, num_heads, cosines, sines, norms)
