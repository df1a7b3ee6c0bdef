"""Reads the parameters of rotary position embedding, and makes the tables that rotate queries and keys.

The rules that scale it for longer contexts are those of transformers, whose numbers are the reference.
"""

import logging
import math
from types import SimpleNamespace
from typing import Any

import torch

from chairlift.errors import CheckpointError, shown
from chairlift.models.rotary import MAX_POSITIONS, RopeConfig

logger = logging.getLogger(__name__)

_REQUIRED: dict[str, tuple[str, ...]] = {  # by kind
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
    "yarn": ("original_max_position_embeddings",),
}
_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
_NOT_NEGATIVE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # 0 stands for the default
_LISTS = ("short_factor", "long_factor")
_OTHERS = ("original_max_position_embeddings", "partial_rotary_factor")
_DEFAULT_THETA = 10_000.0
_POSITIONS_AT_ONCE = 2**14  # of a table, while it is made


def read_rope(
    parameters: dict[str, Any], max_position_embeddings: int, head_dim: int, *, is_partly_rotated: bool
) -> RopeConfig:
    """From a config's `rope_parameters`, once transformers has brought older spellings into them.

    `is_partly_rotated`: the architecture rotates the share of a head that `partial_rotary_factor` says. The others
    rotate whole heads in transformers whatever it says, unless it is proportional, and fail there if rope is scaled.
    CheckpointError for a kind that is not known, a factor that is missing, and numbers that give no rotation.
    """
    kind = parameters.get("rope_type", "default")
    is_known = isinstance(kind, str) and kind in _REQUIRED
    if not is_known or "mrope_section" in parameters:
        kind = "mrope" if is_known else kind
        raise CheckpointError(f"rope type {shown(kind)} is not supported, only {', '.join(_REQUIRED)}")
    check_rope_numbers(parameters)
    given = {name: parameters[name] for name in _read_by(kind) if parameters.get(name) is not None}
    if kind == "yarn" and "truncate" in parameters:
        given["truncate"] = bool(parameters["truncate"])  # null means no
    is_partly_rotated = is_partly_rotated or kind == "proportional"
    if not is_partly_rotated and given.pop("partial_rotary_factor", 1.0) != 1.0:
        if kind != "default":
            raise CheckpointError(f"partial_rotary_factor does not work with rope type {kind} in this architecture")
        logger.warning("partial_rotary_factor has no effect in this architecture, which rotates whole heads")
    if kind == "dynamic":
        given["original_max_position_embeddings"] = max_position_embeddings
    if missing := [name for name in _REQUIRED[kind] if name not in given]:
        raise CheckpointError(f"rope type {kind} needs {', '.join(missing)}")
    if kind in ("longrope", "yarn") and "factor" not in given:
        given["factor"] = max_position_embeddings / given["original_max_position_embeddings"]
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    rope = RopeConfig(parameters.get("rope_theta", _DEFAULT_THETA), kind, tuple(sorted(frozen.items())))
    _check_frequencies(rope, head_dim)
    return rope


def _read_by(kind: str) -> tuple[str, ...]:
    """The parameters that a kind's rule may read."""
    return ("partial_rotary_factor",) if kind == "default" else (*_POSITIVE, *_NOT_NEGATIVE, *_LISTS, *_OTHERS)


def check_rope_numbers(parameters: dict[str, Any]) -> None:
    """CheckpointError names the first of a rope's parameters that is no number, or out of its range."""
    given = {name: value for name, value in parameters.items() if value is not None}
    if not _is_positive(parameters.get("rope_theta", _DEFAULT_THETA)):
        raise _refused("rope_theta", parameters["rope_theta"], "a positive number")
    for name in _POSITIVE:
        if name in given and not _is_positive(given[name]):
            raise _refused(name, given[name], "a positive number")
    for name in _NOT_NEGATIVE:
        if name in given and given[name] != 0 and not _is_positive(given[name]):
            raise _refused(name, given[name], "a positive number, or 0")
    for name in _LISTS:
        if name in given and not (isinstance(given[name], list) and all(map(_is_positive, given[name]))):
            raise _refused(name, given[name], "a list of positive numbers")
    share, length = given.get("partial_rotary_factor", 1.0), given.get("original_max_position_embeddings", 1)
    if not _is_positive(share) or share > 1:
        raise _refused("partial_rotary_factor", share, "a number above 0, and 1 at most")
    if not _is_positive(length) or length > MAX_POSITIONS or length != int(length):
        raise _refused("original_max_position_embeddings", length, f"a whole number from 1 to {MAX_POSITIONS}")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _refused(name: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"{name} of its rope must be {wanted}, not {shown(value)}")


def _check_frequencies(rope: RopeConfig, head_dim: int) -> None:
    """CheckpointError if heads of that size cannot be rotated by them."""
    given = dict(rope.parameters)
    num_pairs = (int(head_dim * given.get("partial_rotary_factor", 1.0)) + 1) // 2
    if not 1 <= num_pairs <= head_dim // 2:
        raise CheckpointError(f"rope turns pairs of a head's elements, and head_dim is {head_dim}")
    if rope.kind == "longrope":
        for name in _LISTS:
            if len(given[name]) != num_pairs:
                raise CheckpointError(f"{name} of its rope must have {num_pairs} numbers, not {len(given[name])}")
    try:
        frequencies, factor = rope_frequencies(rope, head_dim, 1)
    except (ArithmeticError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"its rope cannot be computed: {error}") from error
    if not (math.isfinite(factor) and bool(frequencies.isfinite().all())):
        raise CheckpointError("its rope gives angles that are no numbers")
    if rope.scaled_length > MAX_POSITIONS:
        length = shown(rope.scaled_length)  # of a huge factor it has hundreds of digits
        raise CheckpointError(f"its rope has room for {length} positions, and {MAX_POSITIONS} are the most")


def rope_frequencies(rope: RopeConfig, head_dim: int, max_seq_len: int) -> tuple[torch.Tensor, float]:
    """float32 `[rotated / 2]`, the angle per position of each pair of dimensions; and the factor of cos and sin.

    The first `rotated` dimensions of a head rotate. Rules that depend on a sequence's length (dynamic, longrope) get
    `max_seq_len`, since keys in the cache cannot be rotated again when their sequence grows. So results are those of
    transformers if `max_seq_len` is within the original length, otherwise those for the longest sequence.
    """
    given = dict(rope.parameters)
    if rope.kind == "default":
        rotated = int(head_dim * given.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return 1.0 / rope.theta**exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow to import

    config: Any = SimpleNamespace(  # what the rules read of a config
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=given.get("original_max_position_embeddings"),
        rope_parameters={"rope_theta": rope.theta, **given},
        standardize_rope_params=lambda: None,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=max_seq_len)
    return frequencies, float(factor)


def rope_tables(
    rope: RopeConfig,
    head_dim: int,
    max_seq_len: int,
    device: torch.device,
    num_positions: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Cosines and sines of `num_positions` (None: `max_seq_len`): `[2, num_positions, rotated]`.

    Both halves of `rotated` are alike. Computed in float32, some positions at a time: all at once would take several
    times the table's memory.
    """
    frequencies, factor = rope_frequencies(rope, head_dim, max_seq_len)
    length = num_positions or max_seq_len
    table = torch.empty(2, length, 2 * len(frequencies), dtype=dtype, device=device)
    for start in range(0, length, _POSITIONS_AT_ONCE):
        stop = min(start + _POSITIONS_AT_ONCE, length)
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float32, device=device), frequencies.to(device))
        angles = torch.cat((angles, angles), dim=-1)
        table[:, start:stop] = torch.stack((angles.cos(), angles.sin())) * factor
    return table
