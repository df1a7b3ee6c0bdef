"""The block of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a slot keeps one short vector of a token.

All heads share a token's latent vector and a key that turns with its position. What a head would make of the latent
vector, its own key and value, is left to the query and to the output instead: the head's matrix of keys multiplies the
query, and its matrix of values what the query attends to. So attention has one key/value head, whose values are the
latent vectors, and whose keys are these behind the turning part:

    kept    turning part of the key | latent vector | nothing
    key     |---------------- head_dim ------------|
    value                           |------ head_dim -------|
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import pad

from chairlift.models.attention import Projections
from chairlift.models.blocks.attention import ALL_KEYS, AttentionBlock
from chairlift.models.blocks.block import BlockModule, Cut, Edges, Packer, Part, Pass, Units, Weight
from chairlift.models.layers import Linear, RMSNorm
from chairlift.models.rotary import RopeTable, apply_rope

_NATIVE_MULTIPLE = 64  # elements of rows that native code multiplies in place
_NATIVE_HEAD_DIM = 512  # columns that it multiplies at once, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionBlock(AttentionBlock):
    """A `Block`: attention with one key/value head, whose `num_common` elements are the latent vector."""

    query_rank: int | None  # features that queries are made of; None: they are made of the block's input
    still_dim: int  # elements of a query, and of what keys would be, that do not turn
    value_dim: int  # of each head's output
    latent_eps: float  # of the norms of latent vectors
    rotates_neighbours: bool = True  # checkpoints have elements that rotate together side by side

    @classmethod
    def of(cls, *, latent_dim: int, turning_dim: int, **fields: Any) -> Self:
        """The block whose slots keep vectors of these sizes."""
        return cls(num_kv_heads=1, head_dim=latent_dim + turning_dim, num_common=latent_dim, **fields)

    @property
    def latent_dim(self) -> int:
        return self.num_common

    @property
    def turning_dim(self) -> int:
        return self.head_dim - self.num_common

    @property
    def query_dim(self) -> int:
        """Elements of a head's query before its matrix of keys."""
        return self.still_dim + self.turning_dim

    @property
    def native(self) -> str | None:
        """Names its structure in native code, which multiplies the parts of heads where they are."""
        is_aligned = not any(size % _NATIVE_MULTIPLE for size in (self.still_dim, self.latent_dim))
        is_turned = self.rope is not None and not self.turning_dim % 32 and not self.value_dim % 16
        return "attention" if is_aligned and is_turned and self.query_dim <= _NATIVE_HEAD_DIM else None

    @property
    def projected_head_dim(self) -> int:
        """See `AttentionBlock`."""
        return self.query_dim

    @property
    def table(self) -> RopeTable | None:
        """The rotary table that it reads."""
        return None if self.rope is None else RopeTable(self.rope, self.turning_dim)

    def make(self, layer_idx: int, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> "LatentAttention":  # type: ignore[override]  # noqa: ARG002
        return LatentAttention(self, layer_idx, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        queries = Units(self.num_heads, self.query_dim)
        both = Units(self.num_heads, self.still_dim + self.value_dim)
        outputs = Units(self.num_heads, self.value_dim)
        if self.query_rank is None:
            part = self._rotated("q_proj", "attn_q", queries, self.still_dim)
            before: tuple[Weight, ...] = ()
        else:
            part = self._rotated("q_b_proj", "attn_q_b", queries, self.still_dim)
            before = (
                Weight.whole("q_a_proj", "q_a_proj", "attn_q_a"),
                Weight.whole("q_a_norm", "q_a_layernorm", "attn_q_a_norm"),
            )
        kept = self._rotated("kv_a_proj_with_mqa", "attn_kv_a_mqa", Units(1, self.head_dim), self.latent_dim)
        return (
            *before,
            Weight("q_proj", (part,), Cut.ROWS),
            Weight("kv_a_proj", (kept,)),
            Weight.whole("kv_a_norm", "kv_a_layernorm", "attn_kv_a_norm"),
            Weight("kv_b_proj", (Part("kv_b_proj", "attn_kv_b", (both,)),), Cut.ROWS),
            Weight("o_proj", (Part("o_proj", "attn_output", (outputs,)),), Cut.COLUMNS),
        )

    def _rotated(self, name: str, gguf: str, units: Units, num_still: int) -> Part:
        """A matrix whose heads end with elements that rotate."""
        rotated = units.length if self.rotates_neighbours else None
        return Part(name, gguf, (units,), rotated_head_dim=rotated, num_still=num_still)


class HeadMatrices(nn.Module):
    """Holds each head's matrix of keys and matrix of values, `[heads * (still + value), latent]`."""

    def __init__(self, block: LatentAttentionBlock) -> None:
        super().__init__()
        self._sizes = (block.still_dim, block.value_dim)
        self.weight = nn.Parameter(torch.empty(block.num_heads * sum(self._sizes), block.latent_dim))

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys' `[heads, still, latent]` and values' `[heads, value, latent]`."""
        still, value = self._sizes
        heads = self.weight.view(-1, still + value, self.weight.shape[1])
        return heads[:, :still], heads[:, still:]


class LatentAttention(BlockModule):
    """Projections around `attend`."""

    def __init__(self, block: LatentAttentionBlock, layer_idx: int, hidden_size: int) -> None:
        super().__init__()
        self.block, self.layer_idx = block, layer_idx
        rank, has_bias = block.query_rank, block.has_qkv_bias
        self.q_a_proj = None if rank is None else Linear(hidden_size, rank, bias=has_bias)
        self.q_a_norm = None if rank is None else RMSNorm(rank, eps=block.latent_eps)
        self.q_proj = Linear(hidden_size if rank is None else rank, block.num_heads * block.query_dim, bias=False)
        self.kv_a_proj = Linear(hidden_size, block.head_dim, bias=has_bias)
        self.kv_a_norm = RMSNorm(block.latent_dim, eps=block.latent_eps)
        self.kv_b_proj = HeadMatrices(block)
        self.o_proj = Linear(block.num_heads * block.value_dim, hidden_size, bias=block.has_output_bias)

    @property
    def edges(self) -> Edges:
        """See `BlockModule`."""
        return Edges(None, self.o_proj)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; appends the tokens' latent vectors to the slots."""
        block = self.block
        low = x if self.q_a_proj is None or self.q_a_norm is None else self.q_a_norm(self.q_a_proj(x))
        queries = self.q_proj(low).view(len(x), block.num_heads, block.query_dim)
        latent, key = self.kv_a_proj(x).split((block.latent_dim, block.turning_dim), dim=-1)
        latent = self.kv_a_norm(latent).unsqueeze(1)
        still, turning = queries.split((block.still_dim, block.turning_dim), dim=-1)
        turned = torch.cat((turning, key.unsqueeze(1)), dim=1)
        if block.table is not None:
            turned = apply_rope(turned, *now.ropes[block.table])
        of_keys, of_values = self.kv_b_proj.both()
        seeking = torch.einsum("thd,hdl->thl", still, of_keys)
        query = torch.cat((turned[:, :-1], seeking), dim=-1)
        new = Projections(query, torch.cat((turned[:, -1:], latent), dim=-1), pad(latent, (0, block.turning_dim)))
        attended = now.attend(self.layer_idx, new)[..., : block.latent_dim]
        outputs = torch.einsum("thl,hvl->thv", attended, of_values).flatten(1)
        projected: torch.Tensor = self.o_proj(outputs, addend=now.residual)
        return projected

    def pack(self, packer: Packer) -> dict[str, object]:
        block, place = self.block, packer.place(self.layer_idx)
        assert block.table is not None, "see `native`"
        of_keys, of_values = self.kv_b_proj.both()
        fields = {
            "qkv": packer.matrix(self.q_proj),
            "kv_down": packer.matrix(self.kv_a_proj, num_value_rows=block.head_dim),
            "kv_norm": packer.norm(self.kv_a_norm),
            "key_up": packer.plain_matrix(of_keys.transpose(1, 2).flatten(0, 1)),
            "value_up": packer.plain_matrix(of_values.flatten(0, 1)),
            "out": packer.matrix(self.o_proj),
            "rope": packer.rotation(block.table).address,
            "num_heads": block.num_heads,
            "num_kv_heads": 1,
            "head_dim": block.head_dim,
            "window": ALL_KEYS,
            "num_common": block.num_common,
            "group": place.group,
            "plane": place.plane,
            "scale": block.scale,
            "softcap": 0.0,
            "input_scale": 1.0,
            "output_scale": 1.0,
            "still_dim": block.still_dim,
            "value_dim": block.value_dim,
            "latent_eps": block.latent_eps,
        }
        if self.q_a_proj is not None:
            fields |= {"query_down": packer.matrix(self.q_a_proj), "query_down_norm": packer.norm(self.q_a_norm)}
        del self.kv_b_proj.weight
        return fields
