"""Writes a GGUF file of a mixture of experts with random weights at the layer shapes of a known model.

    .venv/bin/python benchmarks/random_mixture.py qwen3-30b-a3b FOLDER --layers 8
    python benchmarks/compare.py --model FOLDER --peer llama.cpp=llama-server,gguf=FOLDER/model.gguf

Speed can then be measured, beside llama.cpp as well, where nothing can be downloaded. Needs gguf and numpy.
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
    """The sizes of a model, and the types of its tensors."""

    architecture: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_chosen: int
    inner: int  # of an expert
    vocab: int
    kind: Kind  # of experts
    kind_of_others: Kind
    kind_of_head: Kind = Kind.Q6_K
    dense_layers: int = 0  # the first ones
    dense_inner: int = 0
    attending: tuple[int, ...] | None = None  # layers; None: all
    is_tied: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, Kind.Q4_K, Kind.Q4_K),
    "lfm2-8b-a1b": Shape(
        *("lfm2moe", 24, 2048, 32, 8, 64, 32, 4, 1792, 65536, Kind.Q4_K, Kind.Q4_K),
        dense_layers=2,
        dense_inner=7168,
        attending=(2, 6, 10, 14, 18, 21),
        is_tied=True,
    ),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 32, 4, 2880, 201088, Kind.MXFP4, Kind.Q8_0, Kind.Q8_0),
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
    writer = open_writer(folder, shape.architecture, shape.vocab)
    _add_sizes(writer, shape, num_layers)
    tensors = list(_tensors(shape, num_layers))
    (folder / "config.json").write_text(json.dumps(_described(shape, num_layers, tensors)), encoding="utf-8")
    write_tensors(writer, tensors)


def _described(shape: Shape, num_layers: int, tensors: list[Tensor]) -> dict[str, Any]:
    """The sizes in the words of a config.json."""
    attending = range(num_layers) if shape.attending is None else shape.attending
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.dense_inner,
        "vocab_size": shape.vocab,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_chosen,
        "moe_intermediate_size": shape.inner,
        "num_dense_layers": shape.dense_layers,
        "layer_types": ["full_attention" if layer in attending else "conv" for layer in range(num_layers)],
        "bytes_per_weight": bytes_per_weight(tensors),
    }


def _tensors(shape: Shape, num_layers: int) -> Tensors:
    yield "token_embd.weight", (shape.vocab, shape.hidden), shape.kind_of_head
    is_lfm2 = shape.architecture == "lfm2moe"
    yield f"{'token_embd' if is_lfm2 else 'output'}_norm.weight", (shape.hidden,), Kind.F32
    if not shape.is_tied:
        yield "output.weight", (shape.vocab, shape.hidden), shape.kind_of_head
    for layer in range(num_layers):
        for name, dims, kind in _layer(shape, layer):
            yield f"blk.{layer}.{name}", dims, kind


def _layer(shape: Shape, layer: int) -> Tensors:
    yield "attn_norm.weight", (shape.hidden,), Kind.F32
    is_oss = shape.architecture == "gpt-oss"
    yield f"{'post_attention' if is_oss else 'ffn'}_norm.weight", (shape.hidden,), Kind.F32
    if shape.attending is None or layer in shape.attending:
        yield from _attention(shape, has_biases=is_oss)
    else:
        yield "shortconv.conv.weight", (shape.hidden, 3), Kind.F32
        yield "shortconv.in_proj.weight", (3 * shape.hidden, shape.hidden), shape.kind_of_others
        yield "shortconv.out_proj.weight", (shape.hidden, shape.hidden), shape.kind_of_others
    if layer < shape.dense_layers:
        for name, dims in _mlp((), shape.hidden, shape.dense_inner):
            yield f"ffn_{name}.weight", dims, shape.kind_of_others
        return
    yield "ffn_gate_inp.weight", (shape.num_experts, shape.hidden), Kind.F32
    if shape.architecture == "lfm2moe":
        yield "exp_probs_b.bias", (shape.num_experts,), Kind.F32
    if is_oss:
        yield "ffn_gate_inp.bias", (shape.num_experts,), Kind.F32
    for name, dims in _mlp((shape.num_experts,), shape.hidden, shape.inner):
        yield f"ffn_{name}_exps.weight", dims, shape.kind
        if is_oss:
            yield f"ffn_{name}_exps.bias", dims[:2], Kind.F32


def _mlp(stack: tuple[int, ...], hidden: int, inner: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("gate", (*stack, inner, hidden)), ("up", (*stack, inner, hidden)), ("down", (*stack, hidden, inner))]


def _attention(shape: Shape, *, has_biases: bool) -> Tensors:
    num_queries, num_keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for name, rows, columns in (
        ("attn_q", num_queries, shape.hidden),
        ("attn_k", num_keys, shape.hidden),
        ("attn_v", num_keys, shape.hidden),
        ("attn_output", shape.hidden, num_queries),
    ):
        yield f"{name}.weight", (rows, columns), shape.kind_of_others
        if has_biases:
            yield f"{name}.bias", (rows,), Kind.F32
    if has_biases:
        yield "attn_sinks.weight", (shape.num_heads,), Kind.F32
        return
    yield "attn_q_norm.weight", (shape.head_dim,), Kind.F32
    yield "attn_k_norm.weight", (shape.head_dim,), Kind.F32


def _add_sizes(writer: Any, shape: Shape, num_layers: int) -> None:
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(shape.dense_inner or shape.inner)
    writer.add_head_count(shape.num_heads)
    keys = [shape.num_kv_heads if layer in (shape.attending or range(num_layers)) else 0 for layer in range(num_layers)]
    writer.add_head_count_kv(keys if shape.attending else shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.vocab)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_chosen)
    writer.add_expert_feed_forward_length(shape.inner)
    if shape.architecture == "gpt-oss":
        writer.add_sliding_window(128)
    if shape.architecture == "lfm2moe":
        writer.add_leading_dense_block_count(shape.dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_shortconv_l_cache(3)


if __name__ == "__main__":
    main()
