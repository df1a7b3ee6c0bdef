"""Random models of odd shapes, the same in torch, and what quantization makes of them."""

import copy
import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from chairlift.config import AttentionBackend, DType, Quantization
from chairlift.models import TorchForward, load_backend
from chairlift.models.blocks import (
    Activation,
    AltUpBlock,
    AttentionBlock,
    DenseMLPBlock,
    LatentAttentionBlock,
    LaurelBlock,
    LayerInputsConfig,
    Norms,
    PerLayerInputBlock,
    QKNorm,
    SelfAttention,
    StackedLinear,
)
from chairlift.models.blocks.altup import AltUp
from chairlift.models.blocks.gated_delta_net import GatedDeltaNetBlock
from chairlift.models.blocks.gated_short_conv import GatedShortConvBlock
from chairlift.models.blocks.latent_attention import LatentAttention
from chairlift.models.blocks.mamba2 import Mamba2Block
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import quantize
from chairlift.models.layers import Linear
from chairlift.models.precision import SMALL_PARAMETERS, Widths, is_sensitive_layer, widths_for
from chairlift.models.rotary import RopeConfig
from tests.support.forward_bench import NUM_SLOTS, SLOT_LEN, Bench, Row, random_tokens
from tests.support.shapes import Positions, positions_of, varied

_ROPE = RopeConfig(10_000.0)
_PARTIAL_ROPE = RopeConfig(10_000.0, parameters=(("partial_rotary_factor", 0.7),))
_FACTORS = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
_LLAMA3 = Positions(RopeConfig(500_000.0, "llama3", tuple(_FACTORS.items())))


@dataclass(frozen=True)
class Format:
    """Holds what a model computes in, and what its weights are quantized to."""

    dtype: torch.dtype
    quantization: Quantization | None = None
    is_of_large_models: bool = False

    def __str__(self) -> str:
        size = " of large models" if self.is_of_large_models else ""
        return str(self.dtype).removeprefix("torch.") + (f"-{self.quantization}{size}" if self.quantization else "")

    @property
    def widths(self) -> Widths | None:
        """The bits of matrices, as in a model of that size."""
        return widths_for(self.quantization, SMALL_PARAMETERS if self.is_of_large_models else 1)


FLOAT32, BFLOAT16 = Format(torch.float32), Format(torch.bfloat16)
_INTEGERS = (Quantization.INT8, Quantization.INT4)
FLOAT32_INT8, FLOAT32_INT4 = (Format(torch.float32, quantization) for quantization in _INTEGERS)
BFLOAT16_INT8, BFLOAT16_INT4 = (Format(torch.bfloat16, quantization) for quantization in _INTEGERS)
FLOAT32_INT4_LARGE = replace(FLOAT32_INT4, is_of_large_models=True)
BFLOAT16_INT4_LARGE = replace(BFLOAT16_INT4, is_of_large_models=True)
FLOAT32_INTEGERS = (FLOAT32_INT8, FLOAT32_INT4, FLOAT32_INT4_LARGE)
FORMATS = (FLOAT32, BFLOAT16, FLOAT32_INT8, BFLOAT16_INT8, BFLOAT16_INT4, BFLOAT16_INT4_LARGE)

BASE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=261,
    hidden_size=104,
    layers=(
        (
            AttentionBlock(num_heads=8, num_kv_heads=1, head_dim=32, scale=32**-0.5, rope=_ROPE),
            DenseMLPBlock(intermediate_size=150),
        ),
    )
    * 2,
    rms_norm_eps=1e-5,
    max_position_embeddings=SLOT_LEN,
    is_tied=True,
    dtype=DType.FLOAT32,
)


def shape(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int = 32, **fields: Any) -> ModelConfig:
    """`BASE` but for these; scores are divided by the root of the head's size, unless the fields have it."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_heads": heads, "num_kv_heads": kv_heads}
    return varied(BASE, **{**sizes, "head_dim": head_dim, "scale": head_dim**-0.5, **fields})


_NARROW = AttentionBlock(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, rope=_ROPE, window=24, softcap=3.0)
_WIDE = AttentionBlock(
    num_heads=3, num_kv_heads=3, head_dim=64, scale=0.1, rope=_PARTIAL_ROPE, qk_norm=QKNorm.ALL_HEADS
)
_QKV_BIAS, _ALL_BIASES = {"has_qkv_bias": True}, {"has_qkv_bias": True, "has_output_bias": True, "has_bias": True}
_GEMMA: dict[str, Any] = {
    "norms": Norms.PRE_AND_POST,
    "qk_norm": QKNorm.HEAD,
    "has_offset_norms": True,
    "activation": Activation.GELU_TANH,
    "softcap": 3.0,
    "logits_softcap": 10.0,
    "embedding_scale": 6.5,
    "scale": 24**-0.5,
}
_GRANITE: dict[str, Any] = {"embedding_scale": 12.0, "residual_scale": 0.22, "logits_divisor": 8.0}

# Windows, and heads that see all; keys that are values; layers that read those of the first two. A layer gets something
# of its own of each token.
_GEMMA_4_WINDOW = replace(_NARROW, qk_norm=QKNorm.HEAD, has_value_norm=True, are_keys_values=True)
_GEMMA_4_GLOBAL = replace(
    _GEMMA_4_WINDOW,
    num_kv_heads=1,
    head_dim=64,
    window=None,
    softcap=None,
    rope=RopeConfig(1e6, "proportional", (("partial_rotary_factor", 0.25),)),
)
_GEMMA_4_ATTENTION = (
    _GEMMA_4_WINDOW,
    _GEMMA_4_GLOBAL,
    replace(_GEMMA_4_WINDOW, source=0, num_heads=8, window=130),
    replace(_GEMMA_4_GLOBAL, source=1),
)

# Neither 16 nor 64 divides most of these sizes: hidden, of an MLP, heads, key/value heads, of a head. Heads of 48 and
# 80 elements end within a step of 32.
SHAPES = {
    # Norms around attention and MLP, soft caps, two tables of angles, windows within, across and beyond chunks of keys.
    "like Gemma": shape(
        *(72, 90, 4, 2),
        layers=(Positions(_ROPE, 24), Positions(RopeConfig(1_000_000.0)), Positions(_ROPE, 130)),
        **_GEMMA,
    ),
    "like Gemma 4": replace(
        BASE,
        hidden_size=122,
        norms=Norms.PRE_AND_POST,
        embedding_scale=6.5,
        logits_softcap=30.0,
        has_layer_scales=True,
        layer_inputs=LayerInputsConfig(size=48, num_layers=4, vocab_size=250),
        layers=tuple(
            (
                attention,
                DenseMLPBlock(intermediate_size=150, activation=Activation.GELU_TANH),
                PerLayerInputBlock(size=48, activation=Activation.GELU_TANH),
            )
            for attention in _GEMMA_4_ATTENTION
        ),
    ),
    "keys and values with elements in common": replace(
        BASE,
        hidden_size=90,
        layers=tuple(
            (
                replace(_GEMMA_4_GLOBAL, num_heads=num_heads, num_kv_heads=2, head_dim=128, num_common=64),
                DenseMLPBlock(intermediate_size=150),
            )
            for num_heads in (4, 16)
        ),
    ),
    # Latent vectors of two sizes, queries made of few features and of all, more than 16 of them to a key.
    "latent vectors": replace(
        BASE,
        hidden_size=90,
        layers=tuple(
            (
                LatentAttentionBlock.of(
                    latent_dim=latent_dim,
                    turning_dim=32,
                    num_heads=num_heads,
                    scale=0.1,
                    rope=_ROPE,
                    query_rank=query_rank,
                    still_dim=64,
                    value_dim=value_dim,
                    latent_eps=1e-6,
                ),
                DenseMLPBlock(intermediate_size=150),
            )
            for latent_dim, num_heads, query_rank, value_dim in ((64, 5, 44, 48), (192, 18, None, 16))
        ),
    ),
    # Three streams of features, of which layers compute one, and gates of which only the largest count.
    "like Gemma 3n": replace(
        BASE,
        hidden_size=122,
        norms=Norms.PRE_AND_POST,
        num_streams=3,
        layer_inputs=LayerInputsConfig(size=32, num_layers=2, vocab_size=250),
        layers=tuple(
            (
                replace(_GEMMA_4_WINDOW, are_keys_values=False),
                DenseMLPBlock(intermediate_size=150, activation=Activation.GELU_TANH, sparsity=sparsity),
                PerLayerInputBlock(size=32, activation=Activation.GELU_TANH),
                AltUpBlock(num_streams=3, has_output_scale=sparsity > 0),
                LaurelBlock(rank=20),
            )
            for sparsity in (0.8, 0.0)
        ),
    ),
    "like OLMo 2": shape(90, 150, 6, 3, 64, is_tied=False, norms=Norms.POST, qk_norm=QKNorm.ALL_HEADS),
    # Scales everywhere, heads that turn in part, a layer without positions.
    "like Granite, Phi and SmolLM": shape(
        *(98, 150, 5, 1, 80),
        layers=(Positions(_PARTIAL_ROPE, 200), Positions(None), Positions(_PARTIAL_ROPE, 100)),
        **{**_GRANITE, **_QKV_BIAS, "scale": 1 / 16, "qk_norm": QKNorm.HEAD},
    ),
    "eight heads to one": BASE,
    "one head to one": shape(
        *(75, 201, 3, 3, 64), vocab_size=333, is_tied=False, layers=(_LLAMA3,) * 2, **_QKV_BIAS, has_output_bias=True
    ),
    "three heads to one": shape(126, 66, 6, 2, 96, has_bias=True),
    "five heads to one": shape(90, 112, 10, 2, 128, is_tied=False, layers=(_LLAMA3,) * 2, **_ALL_BIASES),
    "wide heads": shape(44, 33, 4, 2, 256),
    "heads as wide as any": shape(44, 33, 2, 1, 512),
    "many heads": shape(90, 250, 18, 9),
    "twenty heads to one": shape(100, 150, 20, 1, is_tied=False, vocab_size=256),
    "deep products": shape(70, 4100, 7, 1, layers=positions_of(BASE)[:1]),
    # Blocks of other sizes in each layer, one without attention and one without an MLP; three groups in the cache.
    "layers that differ": replace(
        BASE,
        hidden_size=90,
        norms=Norms.PRE_AND_POST,
        layers=(
            (_NARROW, DenseMLPBlock(intermediate_size=150, activation=Activation.GELU_TANH)),
            (_WIDE,),
            (DenseMLPBlock(intermediate_size=66),),
            (
                replace(_NARROW, num_heads=10, head_dim=48, window=130),
                DenseMLPBlock(intermediate_size=33, has_bias=True),
            ),
        ),
    ),
}

_MLP = DenseMLPBlock(intermediate_size=66)
_DELTA_NET = GatedDeltaNetBlock(
    num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=240, kernel_size=4, norm_eps=1e-5
)
_MAMBA = Mamba2Block(num_heads=6, head_dim=16, num_groups=2, state_size=32, kernel_size=4, norm_eps=1e-5)
# A recurrent block of each kind, and one beside attention.
RECURRENT = replace(
    BASE,
    hidden_size=90,
    layers=(
        (_DELTA_NET, _MLP),
        (_NARROW, GatedShortConvBlock(num_features=48, kernel_size=3)),
        (_MAMBA, _MLP),
        (replace(_MAMBA, num_groups=1, state_size=16, kernel_size=2, is_gated_last=True),),
    ),
)


def make_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """Random weights, the same for every number format but for its rounding; no bias is zero, no norm one."""
    model = Decoder(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("sinks"):
            parameter.copy_(2 * noise)
        elif name.endswith("bias") or parameter.dim() == 1:
            parameter.copy_(0.2 * noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model = model.to(dtype)
    model.finalize(SLOT_LEN)
    return model


def cpu_forward(model: Decoder | ModelConfig, number_format: Format = FLOAT32, isa: str | None = None) -> CpuDecoder:
    """That model, or the random one of that shape, in the kernels; the latter is shared if `isa` is given."""
    if isinstance(model, Decoder):
        return CpuDecoder(model, SLOT_LEN, widths=number_format.widths, isa=isa)
    if isa is not None:
        return _shared_forward(model, number_format, isa)
    return cpu_forward(make_model(model, number_format.dtype), number_format)


@functools.lru_cache(64)  # quantizing takes longer than most tests compute
def _shared_forward(config: ModelConfig, number_format: Format, isa: str) -> CpuDecoder:
    return cpu_forward(make_model(config, number_format.dtype), number_format, isa)


def cpu_bench(model: Decoder | ModelConfig, number_format: Format = FLOAT32, isa: str | None = None) -> Bench:
    """The same with a cache of its own."""
    config, dtype = (model.config, model.dtype) if isinstance(model, Decoder) else (model, number_format.dtype)
    return Bench(config, dtype, cpu_forward(model, number_format, isa))


def torch_bench(model: Decoder) -> Bench:
    """The model in torch."""
    attention = load_backend(AttentionBackend.TORCH, model.config, model.dtype)
    return Bench(model.config, model.dtype, TorchForward(model, attention))


def in_float32(model: Decoder) -> Decoder:
    """The same weights, computed with in float32."""
    wide = copy.deepcopy(model).float()
    wide.finalize(SLOT_LEN)
    return wide


def round_groups(groups: torch.Tensor) -> torch.Tensor:
    """`[T, n, 32]` to 8 bits: the largest magnitude of a group is 127 of its steps."""
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    rounded: torch.Tensor = (groups / scales).nan_to_num().round() * scales
    return rounded


class GroupedLinear(nn.Module):
    """Holds what a product with integers in groups is to give: an exact sum, with rows in groups of 32, too.

    A group with a number above 4 times the root of its row's mean square is rounded, and so is what that took.
    Likewise what rounding took of the weights of values.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight.double()
        self.bias = bias

    def folds(self, num_rows: int) -> bool:  # noqa: ARG002
        """As a `Linear` that folds nothing in."""
        return False

    folds_norm = folds

    def forward(self, x: torch.Tensor, norm: object = None, addend: object = None) -> torch.Tensor:
        """`[T, in] -> [T, out]`"""
        assert norm is None
        assert addend is None
        groups = nn.functional.pad(x, (0, self.weight.shape[1] - x.shape[1])).double().view(len(x), -1, 32)
        width = -(-x.shape[1] // 16) * 16
        limits = 4 * (x.double().square().sum(dim=1) / width).sqrt()
        rounded = round_groups(groups)
        is_dwarfing = groups.abs().amax(dim=-1) > limits[:, None]
        rounded += is_dwarfing[..., None] * round_groups(groups - rounded)
        product = (rounded.flatten(1) @ self.weight.T).float()
        return product if self.bias is None else product + self.bias


class GroupedExperts(nn.Module):
    """The same for the matrices of several experts."""

    is_grouped = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_experts: int) -> None:
        super().__init__()
        biases = [None] * num_experts if bias is None else bias.chunk(num_experts)
        self._each = [GroupedLinear(*pair) for pair in zip(weight.chunk(num_experts), biases, strict=True)]

    def forward_each(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """See `StackedLinear`."""
        parts = zip(self._each, torch.split(x, counts), strict=True)
        return torch.cat([each(rows) if len(rows) else rows.new_empty(0, len(each.weight)) for each, rows in parts])


def assert_equal_but_for_rounded_factors(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but in rows where a factor lies so near the middle of two 8-bit numbers that it became the other one.

    Or where a group lies so near the limit above which it has a residual. What attends to such a row differs, too.
    """
    errors = (ours - theirs).abs().amax(dim=1) / theirs.abs().amax()
    assert errors.amax() < 0.05
    assert errors.quantile(0.3) < 1e-5


def assert_exact_sums_of_rounded_factors(config: ModelConfig, number_format: Format, isa: str) -> None:
    """Native code computes with integers in groups what torch does with the numbers that these stand for."""
    ours = cpu_bench(config, number_format, isa)
    theirs = torch_bench(quantized(make_model(config), number_format.widths))
    rng = random.Random(0)
    for count in (5, 1, 3):
        rows = [Row(slot, random_tokens(rng, count)) for slot in range(NUM_SLOTS)]
        assert_equal_but_for_rounded_factors(torch.cat(ours.run(rows)), torch.cat(theirs.run(rows)))


def quantized(model: Decoder, widths: Widths | None) -> Decoder:
    """That model with products of integers in groups; None: as it is."""
    if widths is None:
        return model
    if model.config.is_tied:
        embedding = quantize(model.model.embed_tokens.weight, widths.head).dequantize()[:, : model.config.hidden_size]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, StackedLinear):
                weight = quantize(child.weight, widths.most).dequantize()
                setattr(parent, name, GroupedExperts(weight, child.bias, child.num_experts))
            elif isinstance(child, Linear) and name != "router" and not isinstance(parent, AltUp):
                setattr(parent, name, GroupedLinear(_rounded(model, parent, name, widths), child.bias))
    if model.config.is_tied:
        model.model.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
    return model


def _rounded(model: Decoder, parent: nn.Module, name: str, widths: Widths) -> torch.Tensor:
    """The numbers that the integers of one product stand for."""
    child = getattr(parent, name)
    has_values = isinstance(parent, SelfAttention) and name == "qkv_proj" and parent.block.source is None
    if isinstance(parent, SelfAttention | LatentAttention) and (has_values or name == "kv_a_proj"):
        weight = quantize(child.weight, widths.values).dequantize()
        if widths.keeps_errors:
            first = len(weight) - parent.block.num_kv_heads * parent.block.head_dim
            lost = child.weight[first:].float() - weight[first:, : child.weight.shape[1]]
            weight[first:] += quantize(lost, widths.values).dequantize()
        return weight
    if name == "down_proj" and _is_in_sensitive_layer(model, parent):
        return quantize(child.weight, widths.sensitive).dequantize()
    return quantize(child.weight, widths.head if name == "lm_head" else widths.most).dequantize()


def _is_in_sensitive_layer(model: Decoder, mlp: nn.Module) -> bool:
    layer = next(index for index, layer in enumerate(model.layers) if mlp in list(layer.modules()))
    return is_sensitive_layer(layer, len(model.layers))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Meanwhile so many threads compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
