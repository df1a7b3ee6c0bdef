"""Reads and checks the fields of a Hugging Face config whose meaning or names differ between families."""

from typing import Any

from chairlift.config import DType
from chairlift.errors import CheckpointError, named, shown
from chairlift.models.blocks import Activation, DenseMLPBlock, QueryGrowth
from chairlift.models.claims import MAX_HEAD_DIM
from chairlift.models.rope import check_rope_numbers
from chairlift.models.rotary import MAX_POSITIONS

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # null: there is none
_SCALES = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "query_pre_attn_scalar"),
    *("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mlp_multipliers"),
)
_LARGEST_SCALE = 1e38  # about what float32 represents
_REFUSED_FIELDS = ("attention_chunk_size", "use_bidirectional_attention")  # they change what a token may see


def check_sizes(config: Any) -> None:
    """CheckpointError for a size that is none."""
    for name in (*_SIZES, "max_position_embeddings"):
        _check_size(config, name)


def _check_size(config: Any, name: str) -> None:
    given = getattr(config, name, None)
    for size in given if isinstance(given, list | tuple) else (given,):  # some models have one for each layer
        if size is not None and type(size) is not int:  # transformers lets anything be in fields that it does not know
            raise CheckpointError(f"{name} must be a whole number, not {shown(size)}")
        if size is not None and size < 1:
            raise CheckpointError(f"{name} must be at least 1, not {size}")


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """CheckpointError for heads that cannot share keys."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads")


def check_scales(config: Any) -> None:
    """CheckpointError for a factor, or one of a list, that is no positive number."""
    for name in (*_SCALES, *_CAPS):
        given = getattr(config, name, 1.0)
        for scale in given if isinstance(given, list | tuple) else (given,):
            is_none = scale is None and name in _CAPS
            if not is_none and not (type(scale) in (int, float) and 0 < scale < _LARGEST_SCALE):
                raise CheckpointError(f"{name} must be a positive number, not {shown(scale)}")


def refuse_unreadable(raw: dict[str, Any]) -> None:
    """CheckpointError for fields that would silently change results."""
    for name in _REFUSED_FIELDS:
        if raw.get(name) and raw[name] != "vision":  # which is about tokens of images
            raise CheckpointError(f"{name} is not supported")
    if raw.get("is_causal") is False:
        raise CheckpointError("is_causal false is not supported: here a token sees none of those after it")


def read_dtype(config: Any) -> DType:
    """Reads the number format of the weights. CheckpointError for one that cannot be computed in."""
    name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if name not in tuple(DType):
        raise CheckpointError(f"dtype {named(name)} is not supported, only {', '.join(DType)}")
    return DType(name)


def read_head_dim(config: Any) -> int:
    """Reads the size of a head, which may follow from others. CheckpointError if it is none, or too large."""
    _check_size(config, "head_dim")
    given: int | None = getattr(config, "head_dim", None)
    head_dim: int = config.hidden_size // config.num_attention_heads if given is None else given
    if head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"its heads have {head_dim} elements, and {MAX_HEAD_DIM} are the most")
    return head_dim


def read_activation(config: Any) -> Activation:
    """Reads the activation of gated MLPs. CheckpointError for one that is not known."""
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"activation {shown(name)} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_plain_mlp(config: Any) -> DenseMLPBlock:
    """Reads an MLP without a gate. CheckpointError for an activation that is not known."""
    if config.mlp_hidden_act != "relu2":
        raise CheckpointError(f"activation {shown(config.mlp_hidden_act)} is not supported without a gate, only relu2")
    size = config.intermediate_size
    return DenseMLPBlock(
        intermediate_size=size, activation=Activation.RELU_SQUARED, has_bias=config.mlp_bias, is_gated=False
    )


def has_fused_mlps(config: Any) -> bool:
    """Returns false for the config of a GGUF file, which has what safetensors stack as two tensors."""
    is_fused: bool = getattr(config, "has_fused_mlps", True)
    return is_fused


def read_lfm2_inner_size(config: Any) -> int:
    """Computes the inner features of an LFM2's MLPs: two thirds of what is said, scaled, and rounded up."""
    size: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return size
    multiplier, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    size = int((1 if multiplier is None else multiplier) * int(2 * size / 3))
    return size if multiplier is None else multiple * -(-size // multiple)


def read_window(window: object) -> int | None:
    """Checks how many keys a query may see; None: all. CheckpointError for what is no such number."""
    if window is not None and not (type(window) is int and 1 <= window <= MAX_POSITIONS):
        raise CheckpointError(f"sliding_window must be a whole number from 1 to {MAX_POSITIONS}, not {shown(window)}")
    return window


def read_ropes_by_type(config: Any) -> list[Any]:
    """Reads each layer's rope where layers of a type share one. CheckpointError for a type without."""
    by_type = {kind: config.rope_parameters.get(kind) for kind in config.layer_types}
    if without := sorted(kind for kind, rope in by_type.items() if not isinstance(rope, dict)):
        raise CheckpointError(f"rope_parameters has none for layers of type {named(without[0])}")
    for rope in by_type.values():
        rope.pop("truncate", None)  # transformers looks for it beside the types, where it is not
    return [by_type[kind] for kind in config.layer_types]


def read_growth(config: Any) -> QueryGrowth | None:
    """Reads from the rope's parameters how queries grow with their positions. CheckpointError for bad numbers."""
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if beta is None:
        return None
    check_rope_numbers({"factor": beta, "original_max_position_embeddings": length})
    if length is None:
        raise CheckpointError("llama_4_scaling_beta of its rope needs original_max_position_embeddings")
    return QueryGrowth(beta, length)
