"""Rotary position embedding (Su et al. 2021), as layers describe and apply it; `models/rope.py` makes the tables."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from chairlift.device import compiled_on_gpu

MAX_POSITIONS = 2**31 - 1
"""The longest context of any model: positions are numbers of 32 bits."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), scaled for longer contexts by one of transformers' rules."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()  # the kind's factors, under the names that transformers' rules read

    @property
    def original_length(self) -> int | None:
        """Positions up to which results do not depend on the longest sequence; None: none ever does."""
        length = int(dict(self.parameters).get("original_max_position_embeddings", 0))
        return length if self.kind in ("dynamic", "longrope") else None

    @property
    def scaled_length(self) -> int:
        """The length after scaling, for kinds whose config may give the length before it; 0 for others."""
        given = dict(self.parameters)
        is_stretched = self.kind in ("dynamic", "yarn")
        return int(given["original_max_position_embeddings"] * given["factor"]) if is_stretched else 0


class RopeTable(NamedTuple):
    """The key of a rotary table: heads of that size, rotated like that."""

    rope: RopeConfig
    head_dim: int


@compiled_on_gpu
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R dimensions of heads `[T, H, D]` by their positions' angles `[T, 1, R]`.

    Halves of the R are paired, as in Hugging Face.
    """
    rotated = x[..., : cos.shape[-1]]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-high, low), dim=-1) * sin
    return rotated if cos.shape[-1] == x.shape[-1] else torch.cat((rotated, x[..., cos.shape[-1] :]), dim=-1)
