"""Llama (Touvron et al. 2023, Grattafiori et al. 2024) as wiring over one ragged batch of tokens.

Module names follow the checkpoint's tensor names, so that loading needs only the table of fused weights.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from chairlift.models.attention import Attend
from chairlift.models.config import ModelConfig
from chairlift.models.layers import GatedMLP, Linear, RMSNorm, apply_rope, can_pack, rope_tables


class _SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_fused_heads = config.num_heads + 2 * config.num_kv_heads
        bias = config.has_attention_bias
        self.qkv_proj = Linear(config.hidden_size, num_fused_heads * config.head_dim, bias=bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = apply_rope(heads[:, :num_rotated], cos, sin)
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        value = heads[:, num_rotated:]
        projected: torch.Tensor = self.o_proj(attend(self.layer_idx, query, key, value).flatten(1))
        return projected


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norm before it and its residual around it."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _SelfAttention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.has_mlp_bias)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, hidden]` twice, of which the sum is the layer's input; likewise its output. The norms do the adding."""
        x, normalised = self.input_layernorm(x, delta)
        x, normalised = self.post_attention_layernorm(x, self.self_attn(normalised, cos, sin, attend))
        return x, self.mlp(normalised)


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Token ids in, hidden states out; logits only where asked for."""

    rope: torch.Tensor  # [2, max_seq_len, head_dim] in the model's dtype: cosines and sines

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)
        if not config.is_tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.model.layers))

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """Fused parameter -> the checkpoint's tensors that are stacked in it, in order, and the rows of each."""
        config = self.config
        kv_rows = config.num_kv_heads * config.head_dim
        return {
            "qkv_proj": {"q_proj": config.num_heads * config.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
            "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
        }

    def ignored_tensors(self, names: Iterable[str]) -> set[str]:
        """Tensors that a checkpoint may hold in vain: a tied head's copy, and rotary tables of older formats."""
        tied = {"lm_head.weight"} if self.config.is_tied else set()
        return tied | {name for name in names if name.endswith(".rotary_emb.inv_freq")}

    def finalize(self, max_seq_len: int) -> None:
        """Once the weights are loaded: ties the head and prepares rotary tables below that position."""
        weight = self.model.embed_tokens.weight
        if self.config.is_tied:
            with torch.device("meta"):
                self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
            self.lm_head.weight = weight
        tables = rope_tables(self.config.rope, self.config.head_dim, max_seq_len, weight.device)
        self.rope = tables.to(weight.dtype)

    def pack(self) -> None:
        """Packs the weights of its products where that pays; a packed model still runs, but cannot be changed."""
        if can_pack(self.model.embed_tokens.weight):
            for module in self.modules():
                if isinstance(module, Linear):
                    module.pack()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """int64 `[T]`, int64 `[T]` -> final hidden states `[T, hidden]`."""
        cos, sin = self.rope[:, positions].unsqueeze(2)  # [T, 1, D] each
        x = self.model.embed_tokens(input_ids)
        delta = torch.zeros_like(x)
        for layer in self.model.layers:
            x, delta = layer(x, delta, cos, sin, attend)
        normalised: torch.Tensor = self.model.norm(x, delta)[1]
        return normalised

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()


def count_parameters(config: ModelConfig) -> int:
    """Weights, biases and norms of a model of that shape; a tied head counts once. Allocates nothing."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())
