"""Writes a GGUF file of a model with latent attention, with random weights at the layer shapes of a known one.

    .venv/bin/python benchmarks/random_latent.py glm-4.7-flash FOLDER --layers 8
    python benchmarks/compare.py --model FOLDER --peer llama.cpp=llama-server,gguf=FOLDER/model.gguf

As `random_mixture.py`. llama.cpp takes a file without few features of queries only if it has DeepSeek-V2-Lite's layers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from peers.random_weights import (
    MAX_POSITIONS,
    Kind,
    Tensor,
    Tensors,
    bytes_per_weight,
    make_parser,
    open_writer,
    write_tensors,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model. Weights are in Q4_K, but for the head and the matrices of heads."""

    num_layers: int
    hidden: int
    num_heads: int
    query_rank: int  # 0: queries are made of the hidden features
    latent: int
    still: int  # elements of a head's key that do not rotate
    turning: int
    value: int  # elements of a head's value
    num_experts: int
    num_chosen: int
    num_shared: int
    inner: int  # of an expert
    dense_inner: int  # of the first layer
    vocab: int
    is_sigmoid: bool

    @property
    def key(self) -> int:
        return self.still + self.turning


SHAPES = {
    "glm-4.7-flash": Shape(*(47, 2048, 20, 768, 512, 192, 64, 256, 64, 4, 1, 1536, 10240, 154880), is_sigmoid=True),
    "deepseek-v2-lite": Shape(*(27, 2048, 16, 0, 512, 128, 64, 128, 64, 6, 2, 1408, 10944, 102400), is_sigmoid=False),
}


def main() -> None:
    """Writes the file that the command line asks for."""
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument("--layers", type=int, help="how many of the model's layers (all)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    write(shape, arguments.folder, arguments.layers or shape.num_layers)


def write(shape: Shape, folder: Path, num_layers: int) -> None:
    """Writes the model, and what ceilings need of it."""
    writer = open_writer(folder, "deepseek2", shape.vocab)
    _add_sizes(writer, shape, num_layers)
    tensors = list(_tensors(shape, num_layers))
    (folder / "config.json").write_text(json.dumps(_described(shape, num_layers, tensors)), encoding="utf-8")
    write_tensors(writer, tensors)


def _described(shape: Shape, num_layers: int, tensors: list[Tensor]) -> dict[str, Any]:
    """The sizes in the words of a config.json."""
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "q_lora_rank": shape.query_rank or None,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.still,
        "qk_rope_head_dim": shape.turning,
        "v_head_dim": shape.value,
        "intermediate_size": shape.dense_inner,
        "vocab_size": shape.vocab,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_chosen,
        "moe_intermediate_size": shape.inner,
        "num_dense_layers": 1,
        "n_shared_experts": shape.num_shared,
        "bytes_per_weight": bytes_per_weight(tensors),
    }


def _tensors(shape: Shape, num_layers: int) -> Tensors:
    yield "token_embd.weight", (shape.vocab, shape.hidden), Kind.Q6_K
    yield "output_norm.weight", (shape.hidden,), Kind.F32
    yield "output.weight", (shape.vocab, shape.hidden), Kind.Q6_K
    for layer in range(num_layers):
        for name, dims, kind in (*_attention(shape), *_mlp(shape, is_dense=layer == 0)):
            yield f"blk.{layer}.{name}", dims, kind


def _attention(shape: Shape) -> Tensors:
    queries, heads = shape.num_heads * shape.key, shape.num_heads
    yield "attn_norm.weight", (shape.hidden,), Kind.F32
    if shape.query_rank:
        yield "attn_q_a.weight", (shape.query_rank, shape.hidden), Kind.Q4_K
        yield "attn_q_a_norm.weight", (shape.query_rank,), Kind.F32
        yield "attn_q_b.weight", (queries, shape.query_rank), Kind.Q4_K
    else:
        yield "attn_q.weight", (queries, shape.hidden), Kind.Q4_K
    yield "attn_kv_a_mqa.weight", (shape.latent + shape.turning, shape.hidden), Kind.Q4_K
    yield "attn_kv_a_norm.weight", (shape.latent,), Kind.F32
    yield "attn_k_b.weight", (heads, shape.latent, shape.still), Kind.Q8_0
    yield "attn_v_b.weight", (heads, shape.value, shape.latent), Kind.Q8_0
    yield "attn_output.weight", (shape.hidden, heads * shape.value), Kind.Q4_K


def _mlp(shape: Shape, *, is_dense: bool) -> Tensors:
    yield "ffn_norm.weight", (shape.hidden,), Kind.F32
    if is_dense:
        yield from _gated("", (), shape.hidden, shape.dense_inner)
        return
    yield "ffn_gate_inp.weight", (shape.num_experts, shape.hidden), Kind.F32
    if shape.is_sigmoid:
        yield "exp_probs_b.bias", (shape.num_experts,), Kind.F32
    yield from _gated("_exps", (shape.num_experts,), shape.hidden, shape.inner)
    yield from _gated("_shexp", (), shape.hidden, shape.num_shared * shape.inner)


def _gated(suffix: str, stack: tuple[int, ...], hidden: int, inner: int) -> Tensors:
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        kind = Kind.Q8_0 if columns % 256 else Kind.Q4_K
        yield f"ffn_{name}{suffix}.weight", (*stack, rows, columns), kind


def _add_sizes(writer: Any, shape: Shape, num_layers: int) -> None:
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(shape.dense_inner)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(1)
    if shape.query_rank:
        writer.add_q_lora_rank(shape.query_rank)
    writer.add_kv_lora_rank(shape.latent)
    writer.add_key_length(shape.latent + shape.turning)
    writer.add_value_length(shape.latent)
    writer.add_key_length_mla(shape.key)
    writer.add_value_length_mla(shape.value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.turning)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.vocab)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_chosen)
    writer.add_expert_shared_count(shape.num_shared)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_expert_weights_scale(1.0)
    kind = gguf.ExpertGatingFuncType.SIGMOID if shape.is_sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    writer.add_expert_gating_func(kind)


if __name__ == "__main__":
    main()
