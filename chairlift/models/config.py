"""The description of a model that its wiring is built from, and what the engine, the cache and attention know of it.

`models/families.py` builds it from a config; the wiring (`models/decoder.py`) and the native code read nothing else.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from chairlift.config import DType
from chairlift.models.attention import AttentionConfig

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


class Activation(StrEnum):
    """The activation of the MLP's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Norms(StrEnum):
    """Where a layer's norms are: before attention and MLP, after them (before the residual is added), or both."""

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


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Hugging Face's names for a family's embedding and head."""

LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: no positions
    window: int | None = None  # keys that a query sees, its own included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the engine, the cache and attention need to know of a decoder."""

    can_record: ClassVar[bool] = True  # a decode step launches the same work for any data, so CUDA graphs can record it

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
    def table_bytes(self) -> int:
        """Bytes that rotary tables take for one position: a cosine and a sine of each element, in float32."""
        return 8 * self.head_dim * len({layer.rope for layer in self.layers if layer.rope is not None})

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

    can_record: ClassVar[bool] = False  # it may wait for the device during a step, for example to route tokens

    num_parameters: int
    source: Any = field(compare=False, repr=False)
