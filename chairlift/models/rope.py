"""Rotary position embedding (Su et al. 2021): what a config asks for, and the tables of cosines and sines."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chairlift.errors import CheckpointError

_ROPE_FIELDS = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), scaled for longer contexts by one of transformers' rules."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()  # the kind's factors, under the names that transformers' rules read

    def frequencies(self, head_dim: int, max_seq_len: int) -> tuple[torch.Tensor, float]:
        """float32 `[rotated / 2]`, the angle per position of each pair of dimensions; and what scales cos and sin.

        The first `rotated` dimensions of a head turn. Where the rule looks at a sequence's length (dynamic, longrope)
        it gets `max_seq_len`, since keys in the cache cannot be turned anew when their sequence grows: so results are
        those of transformers if `max_seq_len` is within the original length, and those for the longest sequence else.
        """
        given = dict(self.parameters)
        if self.kind == "default":
            rotated = int(head_dim * given.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
            return 1.0 / self.theta**exponents, 1.0
        config: Any = SimpleNamespace(  # what the rules read of a config
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=given.get("original_max_position_embeddings"),
            rope_parameters={"rope_theta": self.theta, **given},
            standardize_rope_params=lambda: None,
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.kind](config, torch.device("cpu"), seq_len=max_seq_len)
        return frequencies, float(factor)

    @property
    def original_length(self) -> int | None:
        """Positions up to which results do not depend on the longest sequence; None: none ever does."""
        length: int = dict(self.parameters).get("original_max_position_embeddings", 0)
        return length if self.kind in ("dynamic", "longrope") else None

    @property
    def scaled_length(self) -> int:
        """Positions that scaling makes room for, where a config may still give the length before it; 0: elsewhere."""
        given = dict(self.parameters)
        is_stretched = self.kind in ("dynamic", "yarn")
        return int(given["original_max_position_embeddings"] * given["factor"]) if is_stretched else 0


def rope_tables(
    rope: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device, num_positions: int | None = None
) -> torch.Tensor:
    """Cosines and sines of `num_positions` (None: `max_seq_len`): float32 `[2, num_positions, rotated]`.

    Both halves of `rotated` are alike.
    """
    frequencies, factor = rope.frequencies(head_dim, max_seq_len)
    positions = torch.arange(num_positions or max_seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())) * factor


def read_rope(parameters: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    """From a config's `rope_parameters`. CheckpointError for a kind that is not known, or a factor that is missing."""
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_FIELDS or "mrope_section" in parameters:
        kind = "mrope" if kind in _ROPE_FIELDS else kind
        raise CheckpointError(f"rope type {kind!r} is not supported, only {', '.join(_ROPE_FIELDS)}")
    if missing := [name for name in _ROPE_FIELDS[kind] if parameters.get(name) is None]:
        raise CheckpointError(f"rope type {kind} needs {', '.join(missing)}")
    given = {name: value for name, value in parameters.items() if name not in ("rope_type", "type", "rope_theta")}
    if kind == "dynamic":
        given["original_max_position_embeddings"] = max_position_embeddings
    if kind == "longrope" and given.get("factor") is None:
        given["factor"] = max_position_embeddings / given["original_max_position_embeddings"]
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return RopeConfig(parameters.get("rope_theta", 10000.0), kind, tuple(sorted(frozen.items())))
