"""What a Hugging Face config says of a model, checked: the description that the wiring is built from."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from chairlift.config import DType
from chairlift.errors import CheckpointError

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` is default, linear or llama3; the rest are that kind's factors."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Names as in Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    is_tied: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    dtype: DType

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of all layers' keys and values for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_model_config(directory: Path) -> ModelConfig:
    """Reads `config.json`. CheckpointError if it is missing, or asks for what is not supported."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        architectures = raw.get("architectures")
        known = [name for name in _READERS if isinstance(architectures, list) and name in architectures]
        if not known:
            raise CheckpointError(
                f"{path} is for {architectures or 'no architecture'}; supported: {', '.join(_READERS)}"
            )
        return _READERS[known[0]](raw, path)
    except CheckpointError:
        raise
    except Exception as error:  # the file may hold anything; whatever transformers makes of it is about the file
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error


def _read_llama(raw: dict[str, Any], path: Path) -> ModelConfig:
    config = LlamaConfig.from_dict(raw)
    if config.hidden_act not in ("silu", "swish"):
        raise CheckpointError(f"{path}: hidden_act {config.hidden_act!r} is not supported, only silu")
    for name in _POSITIVE_FIELDS:
        if getattr(config, name) < 1:
            raise CheckpointError(f"{path}: {name} must be at least 1, not {getattr(config, name)}")
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise CheckpointError(
            f"{path}: {config.num_attention_heads} attention heads cannot share {num_kv_heads} key/value heads"
        )
    dtype_name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if dtype_name not in tuple(DType):
        raise CheckpointError(f"{path}: dtype {dtype_name} is not supported, only {', '.join(DType)}")
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope=_read_rope(dict(config.rope_parameters or {}), path),
        max_position_embeddings=config.max_position_embeddings,
        is_tied=config.tie_word_embeddings,
        has_attention_bias=config.attention_bias,
        has_mlp_bias=config.mlp_bias,
        dtype=DType(dtype_name),
    )


def _read_rope(parameters: dict[str, Any], path: Path) -> RopeConfig:
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_FIELDS:
        raise CheckpointError(f"{path}: rope type {kind!r} is not supported, only {', '.join(_ROPE_FIELDS)}")
    missing = [name for name in _ROPE_FIELDS[kind] if name not in parameters]
    if missing:
        raise CheckpointError(f"{path}: rope type {kind} needs {', '.join(missing)}")
    theta = parameters.get("rope_theta", 10000.0)
    return RopeConfig(theta=theta, kind=kind, **{name: parameters[name] for name in _ROPE_FIELDS[kind]})


_READERS: dict[str, Callable[[dict[str, Any], Path], ModelConfig]] = {"LlamaForCausalLM": _read_llama}
"""By architecture: what reads its config.json."""
