"""Writes a GGUF file of a Gemma 4 with random weights at the layer shapes of a known model.

    .venv/bin/python benchmarks/random_gemma.py e2b FOLDER --layers 20 --kind Q4_0
    python benchmarks/compare.py --model FOLDER --peer llama.cpp=llama-server,gguf=FOLDER/model.gguf

Speed can then be measured, beside llama.cpp as well, where nothing can be downloaded. The embedding, which is the head
too, is Q6_K, as llama.cpp's quantizer has it beside 4 bits, or else like the layers. Needs gguf and numpy.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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

_SHARE_THAT_TURNS = 0.25  # of a head, in layers without a window
_NO_ROTATION = 1e30
_KINDS = {"Q4_0": Kind.Q6_K, "Q8_0": Kind.Q8_0}  # of layers: that of the embedding


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model. `wide` is what is said of layers without a window, which end each period."""

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    num_wide_kv_heads: int
    head_dim: int
    wide_head_dim: int
    period: int
    window: int
    input_size: int = 0  # of what layers get of each token
    num_owners: int | None = None  # layers whose keys those after them read, with MLPs twice as wide; None: all
    has_values: bool = True  # in layers without a window
    vocab: int = 262144

    def is_wide(self, layer: int) -> bool:
        """Tells if it has no window."""
        return (layer + 1) % self.period == 0


SHAPES = {
    "e2b": Shape(35, 1536, 6144, 8, 1, 1, 256, 512, period=5, window=512, input_size=256, num_owners=15),
    "12b": Shape(48, 3840, 15360, 16, 8, 1, 256, 512, period=6, window=1024, has_values=False),
}


def main() -> None:
    """Writes the file that the command line asks for."""
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument("--layers", type=int, help="how many of the model's layers, in whole periods (all)")
    parser.add_argument("--kind", choices=_KINDS, default="Q4_0", help="of the layers' weights")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    num_layers = arguments.layers or shape.num_layers
    if num_layers % shape.period:
        parser.error(f"--layers must be a multiple of {shape.period}")
    write(shape, arguments.folder, num_layers, getattr(Kind, arguments.kind))


def write(shape: Shape, folder: Path, num_layers: int, kind: Kind) -> None:
    """Writes the model, and what ceilings need of it."""
    writer = open_writer(folder, "gemma4", shape.vocab)
    num_owners = _num_owners(shape, num_layers)
    _add_sizes(writer, shape, num_layers, num_owners)
    tensors = list(_tensors(shape, num_layers, num_owners, kind))
    described = _described(shape, num_layers, num_owners, tensors)
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    factors = np.full(shape.wide_head_dim // 2, _NO_ROTATION, np.float32)
    factors[: int(len(factors) * _SHARE_THAT_TURNS)] = 1
    write_tensors(writer, tensors, {"rope_freqs.weight": factors})


def _num_owners(shape: Shape, num_layers: int) -> int:
    """Returns the same share of the layers that there are as of all, in whole periods."""
    if shape.num_owners is None:
        return num_layers
    return max(1, round(num_layers * shape.num_owners / shape.num_layers / shape.period)) * shape.period


def _inner(shape: Shape, layer: int, num_owners: int) -> int:
    return shape.inner * (1 if layer < num_owners else 2)


def _described(shape: Shape, num_layers: int, num_owners: int, tensors: list[Tensor]) -> dict[str, Any]:
    """The sizes in the words of a config.json: all heads as in layers with a window, and MLPs of a mean size."""
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": sum(_inner(shape, layer, num_owners) for layer in range(num_layers)) // num_layers,
        "vocab_size": shape.vocab,
        "bytes_per_weight": bytes_per_weight(tensors),
    }


def _tensors(shape: Shape, num_layers: int, num_owners: int, kind: Kind) -> Tensors:
    hidden, size = shape.hidden, shape.input_size
    yield "token_embd.weight", (shape.vocab, hidden), _KINDS[kind.name]
    yield "output_norm.weight", (hidden,), Kind.F32
    yield "rope_freqs.weight", (shape.wide_head_dim // 2,), Kind.F32
    if size:
        yield "per_layer_token_embd.weight", (shape.vocab, num_layers * size), kind
        yield "per_layer_model_proj.weight", (num_layers * size, hidden), kind
        yield "per_layer_proj_norm.weight", (size,), Kind.F32
    for layer in range(num_layers):
        inner, has_keys = _inner(shape, layer, num_owners), layer < num_owners
        for name, dims in (*_attention(shape, layer, has_keys=has_keys), *_rest(shape, inner)):
            yield f"blk.{layer}.{name}.weight", dims, Kind.F32 if len(dims) == 1 else kind


def _attention(shape: Shape, layer: int, *, has_keys: bool) -> list[tuple[str, tuple[int, ...]]]:
    is_wide = shape.is_wide(layer)
    head_dim = shape.wide_head_dim if is_wide else shape.head_dim
    num_queries = shape.num_heads * head_dim
    num_keys = (shape.num_wide_kv_heads if is_wide else shape.num_kv_heads) * head_dim
    keys = [("attn_k", (num_keys, shape.hidden)), ("attn_k_norm", (head_dim,))]
    if shape.has_values or not is_wide:
        keys.append(("attn_v", (num_keys, shape.hidden)))
    return [
        ("attn_norm", (shape.hidden,)),
        ("attn_q", (num_queries, shape.hidden)),
        ("attn_q_norm", (head_dim,)),
        *(keys if has_keys else []),
        ("attn_output", (shape.hidden, num_queries)),
        ("post_attention_norm", (shape.hidden,)),
    ]


def _rest(shape: Shape, inner: int) -> list[tuple[str, tuple[int, ...]]]:
    hidden, size = shape.hidden, shape.input_size
    inputs = [("inp_gate", (size, hidden)), ("proj", (hidden, size)), ("post_norm", (hidden,))]
    return [
        ("ffn_norm", (hidden,)),
        ("ffn_gate", (inner, hidden)),
        ("ffn_up", (inner, hidden)),
        ("ffn_down", (hidden, inner)),
        ("post_ffw_norm", (hidden,)),
        *(inputs if size else []),
        ("layer_output_scale", (1,)),
    ]


def _add_sizes(writer: Any, shape: Shape, num_layers: int, num_owners: int) -> None:
    layers = range(num_layers)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(num_layers)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv([shape.num_wide_kv_heads if shape.is_wide(i) else shape.num_kv_heads for i in layers])
    writer.add_feed_forward_length([_inner(shape, layer, num_owners) for layer in layers])
    for key, value in (("", shape.wide_head_dim), ("_swa", shape.head_dim)):
        getattr(writer, f"add_key_length{key}")(value)
        getattr(writer, f"add_value_length{key}")(value)
        getattr(writer, f"add_rope_dimension_count{key}")(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(shape.window)
    writer.add_sliding_window_pattern([not shape.is_wide(layer) for layer in layers])
    writer.add_final_logit_softcapping(30.0)
    writer.add_shared_kv_layers(num_layers - num_owners)
    writer.add_embedding_length_per_layer_input(shape.input_size)
    writer.add_vocab_size(shape.vocab)


if __name__ == "__main__":
    main()
