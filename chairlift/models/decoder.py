"""A decoder of any family as wiring over one ragged batch of tokens; `ModelConfig` says how families differ.

Modules are named as the checkpoints' tensors, except those in the tables of `models/loader.py`.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from chairlift.models.attention import Attend
from chairlift.models.config import EMBEDDING, ModelConfig, Norms, QKNorm, RopeConfig
from chairlift.models.grouped import GroupedWeight
from chairlift.models.layers import GatedMLP, Linear, RMSNorm, can_pack, soft_cap
from chairlift.models.rope import apply_rope, rope_tables


class SelfAttention(nn.Module):
    """Projections around `attend`; queries and keys are normalised and rotated in between, if the family does."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_fused_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = Linear(config.hidden_size, num_fused_heads * config.head_dim, bias=config.has_qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.has_output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm is not QKNorm.NONE:
            is_per_head = config.qk_norm is QKNorm.HEAD
            self.q_norm = _norm(config, config.head_dim * (1 if is_per_head else config.num_heads))
            self.k_norm = _norm(config, config.head_dim * (1 if is_per_head else config.num_kv_heads))

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; `rope`: cosines and sines of the tokens, `[2, T, 1, rotated]`."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        num_rotated = self.num_heads + self.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
            rotated = torch.cat((_normalise(self.q_norm, query), _normalise(self.k_norm, key)), dim=1)
        if rope is not None:
            rotated = apply_rope(rotated, rope[0], rope[1])
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        projected: torch.Tensor = self.o_proj(attend(self.layer_idx, query, key, value).flatten(1))
        return projected


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its residual around it and norms before it, after it, or both."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_idx)
        self.mlp = GatedMLP(config)
        has_pre, has_post = config.norms is not Norms.POST, config.norms is not Norms.PRE
        self.pre_attention_norm = _norm(config, config.hidden_size) if has_pre else None
        self.post_attention_norm = _norm(config, config.hidden_size) if has_post else None
        self.pre_mlp_norm = _norm(config, config.hidden_size) if has_pre else None
        self.post_mlp_norm = _norm(config, config.hidden_size) if has_post else None
        self.residual_scale = config.residual_scale

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor, rope: torch.Tensor | None, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two `[T, hidden]`, whose sum is the layer's input; likewise its output. The norms add them."""
        x, entering = _enter(self.pre_attention_norm, x, delta)
        delta = self._leave(self.post_attention_norm, self.self_attn(entering, rope, attend))
        x, entering = _enter(self.pre_mlp_norm, x, delta)
        return x, self._leave(self.post_mlp_norm, self.mlp(entering))

    def _leave(self, norm: RMSNorm | None, delta: torch.Tensor) -> torch.Tensor:
        delta = delta if norm is None else norm(delta)
        return delta if self.residual_scale == 1.0 else delta * self.residual_scale


class _Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = _norm(config, config.hidden_size)


class Decoder(nn.Module):
    """Token ids in, hidden states out; logits only where asked for."""

    ropes: dict[RopeConfig, torch.Tensor]  # [2, positions, rotated] each, in the model's dtype: cosines and sines
    num_positions: int  # of each table

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        if not config.is_tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.model.layers))

    def is_product(self, name: str) -> bool:
        """Whether the parameter is the matrix of a product: a `Linear`'s, or the embedding that is also the head."""
        module, _, leaf = name.rpartition(".")
        is_head = self.config.is_tied and name == EMBEDDING
        return is_head or (leaf == "weight" and isinstance(self.get_submodule(module), Linear))

    def take(self, name: str, weight: Callable[[], GroupedWeight | torch.Tensor]) -> None:
        """Replaces a product's matrix. A tied head takes the embedding's matrix, which the embedding then lacks."""
        if name == EMBEDDING:
            self._add_tied_head()
            del self.model.embed_tokens.weight
            self.lm_head.take(weight)
        else:
            cast("Linear", self.get_submodule(name.removesuffix(".weight"))).take(weight)

    def finalize(self, max_seq_len: int, num_positions: int | None = None) -> None:
        """Once the weights are loaded: ties the head and prepares rotary tables.

        Tables have `num_positions` (None: `max_seq_len`): slots may have memory for more tokens than a sequence.
        """
        weight = self.model.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        if self.config.is_tied and not hasattr(self, "lm_head"):
            self._add_tied_head()
            self.lm_head.weight = self.model.embed_tokens.weight
        # transformers multiplies by the number in the model's format: for example 55.5 instead of 55.43
        self.embedding_scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()
        self.num_positions = num_positions or max_seq_len
        self.ropes = {
            rope: rope_tables(rope, self.config.head_dim, max_seq_len, self.device, self.num_positions, self.dtype)
            for rope in {layer.rope for layer in self.config.layers if layer.rope is not None}
        }

    def _add_tied_head(self) -> None:
        with torch.device("meta"):
            self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def pack(self) -> None:
        """Packs the weights of its products where that pays; a packed model still runs, but cannot be changed."""
        if can_pack(self.model.embed_tokens.weight):
            for module in self.modules():
                if isinstance(module, Linear):
                    module.pack()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """int64 `[T]`, int64 `[T]` -> final hidden states `[T, hidden]`."""
        ropes = {rope: table[:, positions].unsqueeze(2) for rope, table in self.ropes.items()}  # [2, T, 1, rotated]
        x = self.model.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        delta = torch.zeros_like(x)
        for layer, each in zip(self.model.layers, self.config.layers, strict=True):
            x, delta = layer(x, delta, None if each.rope is None else ropes[each.rope], attend)
        normalised: torch.Tensor = self.model.norm.add(x, delta)[1]
        return normalised

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        logits: torch.Tensor = self.lm_head(hidden).float()
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        cap = self.config.logits_softcap
        return logits if cap is None else soft_cap(logits, cap)


def _norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, is_offset=config.has_offset_norms)


def _normalise(norm: RMSNorm, heads: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]`, each head alone or all heads of a token together, depending on the norm's width."""
    spanned = heads if len(norm.weight) == heads.shape[-1] else heads.flatten(1)
    normalised: torch.Tensor = norm(spanned)
    return normalised.view(heads.shape)


def _enter(norm: RMSNorm | None, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta`, and the input of attention or the MLP: the same after the norm, if there is one."""
    if norm is not None:
        return norm.add(x, delta)
    x = x + delta
    return x, x
