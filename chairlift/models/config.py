"""What a Hugging Face config says of a model, checked: the description that the wiring is built from.

`FAMILIES` is a table from architectures to what differs from a Llama. A family that differs by these flags alone is one
more entry; the wiring (`models/decoder.py`) and the native code read the description only. Rotary position embedding
(Su et al. 2021) comes first: what a config asks for, and the tables of cosines and sines.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chairlift.config import DType
from chairlift.errors import CheckpointError, named, shown
from chairlift.models.attention import AttentionConfig

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
        raise CheckpointError(f"rope type {shown(kind)} is not supported, only {', '.join(_ROPE_FIELDS)}")
    if missing := [name for name in _ROPE_FIELDS[kind] if parameters.get(name) is None]:
        raise CheckpointError(f"rope type {kind} needs {', '.join(missing)}")
    given = {name: value for name, value in parameters.items() if name not in ("rope_type", "type", "rope_theta")}
    if kind == "dynamic":
        given["original_max_position_embeddings"] = max_position_embeddings
    if kind == "longrope" and given.get("factor") is None:
        given["factor"] = max_position_embeddings / given["original_max_position_embeddings"]
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return RopeConfig(parameters.get("rope_theta", 10000.0), kind, tuple(sorted(frozen.items())))


# --- the description


class Activation(StrEnum):
    """What the MLP's gate goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Norms(StrEnum):
    """Where a layer's norms stand: before attention and MLP, behind them (before the residual is added), or both."""

    PRE = "pre"
    POST = "post"
    PRE_AND_POST = "pre and post"


NORM_NAMES = {
    Norms.PRE: {"pre_attention_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
    Norms.POST: {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
    Norms.PRE_AND_POST: {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
"""A layer's norms in the wiring, and Hugging Face's names for them."""


class QKNorm(StrEnum):
    """What one norm of queries (or keys) spans, before they are rotated."""

    NONE = "none"
    HEAD = "head"
    ALL_HEADS = "all heads"


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LAYER_TYPES = {"full_attention", "sliding_attention"}
_REFUSED_FIELDS = ("attention_chunk_size", "use_bidirectional_attention")  # they change what a token may see


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: no positions
    window: int | None = None  # keys that a query sees, its own included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the engine, the cache and attention need to know of a decoder."""

    can_record: ClassVar[bool] = True  # a decode step launches the same work whatever the numbers: CUDA graphs serve

    architecture: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    attention_softcap: float | None = None
    max_position_embeddings: int
    dtype: DType

    @property
    def unscaled_positions(self) -> int:
        """Positions up to which results do not depend on `max_seq_len`."""
        lengths = [layer.rope.original_length for layer in self.layers if layer.rope is not None]
        return min([self.max_position_embeddings, *(length for length in lengths if length is not None)])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of all layers' keys and values for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention(self) -> AttentionConfig:
        """What an attention backend is built for."""
        windows = tuple(layer.window for layer in self.layers)
        return AttentionConfig(self.attention_scale, windows, self.attention_softcap)

    def describe(self) -> str:
        """One line for the log."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        ropes = sorted({layer.rope.kind for layer in self.layers if layer.rope is not None})
        windows = sorted({layer.window for layer in self.layers if layer.window is not None})
        num_windowed = sum(layer.window is not None for layer in self.layers)
        return (
            f"{self.architecture}: {self.num_layers} layers, {heads}, vocabulary {self.vocab_size}"
            + (f", rope {', '.join(ropes)}" if ropes else "")
            + (f", window {', '.join(map(str, windows))} in {num_windowed} layers" if windows else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder of one of the families: everything that its wiring depends on."""

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    is_tied: bool
    activation: Activation = Activation.SILU
    norms: Norms = Norms.PRE
    qk_norm: QKNorm = QKNorm.NONE
    has_offset_norms: bool = False  # norms multiply by 1 + weight, in float32
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_divisor: float = 1.0
    logits_softcap: float | None = None  # c tanh(logits / c)
    has_fused_tensors: bool = False  # the checkpoint holds qkv_proj and gate_up_proj, not their parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedConfig(ModelShape):
    """A decoder in transformers' code. `source` is its config there."""

    can_record: ClassVar[bool] = False  # it may wait for the device in the middle of a step, to route tokens, say

    num_parameters: int
    source: Any = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from a plain decoder with norms before attention and MLP."""

    config: str  # transformers' class, whose defaults stand in for what a config.json leaves out
    differences: dict[str, Any]  # fields of ModelConfig: what they always are, or a function of that class's object
    has_windows: bool = False  # in the layers that layer_types says, or in all
    ropes: Callable[[Any], list[Any]] = lambda config: [config.rope_parameters] * config.num_hidden_layers


_ATTENTION_BIAS = {"has_qkv_bias": attrgetter("attention_bias"), "has_output_bias": attrgetter("attention_bias")}
_BIASES = {**_ATTENTION_BIAS, "has_mlp_bias": attrgetter("mlp_bias")}
_MULTIPLIERS = {
    "embedding_scale": attrgetter("embedding_multiplier"),
    "residual_scale": attrgetter("residual_multiplier"),
    "attention_scale": attrgetter("attention_multiplier"),
    "logits_divisor": attrgetter("logits_scaling"),
}
_GEMMA = {
    **_ATTENTION_BIAS,
    "norms": Norms.PRE_AND_POST,
    "has_offset_norms": True,
    "embedding_scale": lambda config: config.hidden_size**0.5,
    "attention_scale": lambda config: config.query_pre_attn_scalar**-0.5,
    "logits_softcap": attrgetter("final_logit_softcapping"),
}
FAMILIES = {
    "LlamaForCausalLM": Family("LlamaConfig", _BIASES),
    "MistralForCausalLM": Family("MistralConfig", {}, has_windows=True),
    "Qwen2ForCausalLM": Family("Qwen2Config", {"has_qkv_bias": True}, has_windows=True),
    "Qwen3ForCausalLM": Family("Qwen3Config", {**_ATTENTION_BIAS, "qk_norm": QKNorm.HEAD}, has_windows=True),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3Config",
        _BIASES,
        has_windows=True,
        ropes=lambda config: [config.rope_parameters if has_rope else None for has_rope in config.no_rope_layers],
    ),
    "GraniteForCausalLM": Family("GraniteConfig", {**_BIASES, **_MULTIPLIERS}),
    "Phi3ForCausalLM": Family("Phi3Config", {"has_fused_tensors": True}, has_windows=True),
    "Olmo2ForCausalLM": Family("Olmo2Config", {**_ATTENTION_BIAS, "norms": Norms.POST, "qk_norm": QKNorm.ALL_HEADS}),
    "Gemma2ForCausalLM": Family(
        "Gemma2Config", {**_GEMMA, "attention_softcap": attrgetter("attn_logit_softcapping")}, has_windows=True
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma3TextConfig",
        {**_GEMMA, "qk_norm": QKNorm.HEAD},
        has_windows=True,
        ropes=lambda config: [config.rope_parameters[kind] for kind in config.layer_types],
    ),
    "SeedOssForCausalLM": Family("SeedOssConfig", {**_BIASES, "has_output_bias": attrgetter("attention_out_bias")}),
    "InternLM3ForCausalLM": Family(  # not every transformers has its class, and Llama's keeps fields it does not know
        "LlamaConfig",
        {
            "has_qkv_bias": lambda config: getattr(config, "qkv_bias", config.attention_bias),
            "has_output_bias": lambda config: getattr(config, "bias", config.mlp_bias),
            "has_mlp_bias": lambda config: getattr(config, "bias", config.mlp_bias),
        },
    ),
}
"""By architecture, as `config.json` names it."""


def describe_family(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    """From the config.json of an architecture in `FAMILIES`. CheckpointError if it asks for what is not supported."""
    family = FAMILIES[architecture]
    refuse_unreadable(raw)
    config: Any = getattr(transformers, family.config).from_dict(raw)
    _check_sizes(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = [None if rope is None else read_rope(rope, config.max_position_embeddings) for rope in family.ropes(config)]
    windows = _read_windows(config) if family.has_windows else [None] * config.num_hidden_layers
    differences = {
        name: value(config) if callable(value) else value
        for name, value in {"attention_scale": head_dim**-0.5, **family.differences}.items()
    }
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        layers=tuple(map(LayerConfig, ropes, windows)),
        max_position_embeddings=max([config.max_position_embeddings, *(rope.scaled_length for rope in ropes if rope)]),
        dtype=read_dtype(config),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        is_tied=config.tie_word_embeddings,
        activation=_read_activation(config),
        **differences,
    )


def _read_windows(config: Any) -> list[int | None]:
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if unknown := set(kinds) - LAYER_TYPES:
        raise CheckpointError(
            f"layer type {shown(min(unknown))} is not supported, only {', '.join(sorted(LAYER_TYPES))}"
        )
    window = config.sliding_window if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < 1:
        raise CheckpointError(f"sliding_window must be at least 1, not {window}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def refuse_unreadable(raw: dict[str, Any]) -> None:
    """CheckpointError for fields that would change results unseen."""
    for name in _REFUSED_FIELDS:
        if raw.get(name):
            raise CheckpointError(f"{name} is not supported")


def _check_sizes(config: Any) -> None:
    for name in (*_SIZES, "max_position_embeddings"):
        if getattr(config, name) < 1:
            raise CheckpointError(f"{name} must be at least 1, not {getattr(config, name)}")
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads")


def _read_activation(config: Any) -> Activation:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"activation {shown(name)} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_dtype(config: Any) -> DType:
    """The number format of the weights. CheckpointError for one that is not computed in."""
    name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if name not in tuple(DType):
        raise CheckpointError(f"dtype {named(name)} is not supported, only {', '.join(DType)}")
    return DType(name)
