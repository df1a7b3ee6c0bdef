"""Writes a GGUF file of a recurrent model with random weights at the layer shapes of a known model.

    .venv/bin/python benchmarks/random_recurrent.py qwen3.5-0.8b FOLDER --kind Q8_0
    python benchmarks/compare.py --model FOLDER --peer llama.cpp=llama-server,gguf=FOLDER/model.gguf

Speed can then be measured, beside llama.cpp as well, where nothing can be downloaded. The vocabulary is small unless
told otherwise, so that the layers count. Needs gguf and numpy.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.random_weights import (
    MAX_POSITIONS,
    Blocks,
    Kind,
    Tensor,
    Tensors,
    bytes_per_weight,
    make_parser,
    open_writer,
    write_tensors,
)

_KINDS = ("BF16", "Q8_0", "Q4_0", "Q4_K")
_SMALL_VOCAB = 320


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The sizes of a layer's Gated DeltaNet."""

    num_key_heads: int
    num_value_heads: int
    head_dim: int  # of keys and of values
    kernel: int

    @property
    def num_values(self) -> int:
        """Counts the features of all value heads."""
        return self.num_value_heads * self.head_dim

    @property
    def num_mixed(self) -> int:
        """Counts the features that the convolution mixes: queries, keys and values."""
        return 2 * self.num_key_heads * self.head_dim + self.num_values


@dataclass(frozen=True, slots=True)
class ShortConv:
    """The sizes of a layer's gated convolution, which has as many features as the model."""

    kernel: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model. Layers that are not `attending` have its recurrence."""

    architecture: str
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attending: tuple[int, ...]
    recurrence: DeltaNet | ShortConv
    rope_base: float
    num_rotated: int  # features of a head


SHAPES = {
    "qwen3.5-0.8b": Shape(
        *("qwen35", 24, 1024, 3584, 8, 2, 256),
        attending=tuple(range(3, 24, 4)),
        recurrence=DeltaNet(num_key_heads=16, num_value_heads=16, head_dim=128, kernel=4),
        rope_base=1e4,
        num_rotated=64,
    ),
    "lfm2.5-1.2b": Shape(
        *("lfm2", 16, 2048, 8192, 32, 8, 64),
        attending=(2, 5, 8, 10, 12, 14),
        recurrence=ShortConv(kernel=3),
        rope_base=1e6,
        num_rotated=64,
    ),
}


def main() -> None:
    """Writes the file that the command line asks for."""
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument("--kind", choices=_KINDS, default="Q8_0", help="of all matrices")
    parser.add_argument("--vocab", type=int, default=_SMALL_VOCAB, help="tokens, 260 or more")
    arguments = parser.parse_args()
    write(SHAPES[arguments.shape], arguments.folder, getattr(Kind, arguments.kind), arguments.vocab)


def write(shape: Shape, folder: Path, kind: Kind, vocab: int) -> None:
    """Writes the model, and what ceilings need of it."""
    writer = open_writer(folder, shape.architecture, vocab)
    _add_sizes(writer, shape, vocab)
    tensors = list(_tensors(shape, kind, vocab))
    (folder / "config.json").write_text(
        json.dumps(described(shape, vocab, bytes_per_weight(tensors))), encoding="utf-8"
    )
    write_tensors(writer, tensors, _rates(tensors))


def described(shape: Shape, vocab: int, weight_bytes: float) -> dict[str, Any]:
    """The sizes in the words of a config.json."""
    recurrence = "conv" if isinstance(shape.recurrence, ShortConv) else "linear_attention"
    kinds = ["full_attention" if layer in shape.attending else recurrence for layer in range(shape.num_layers)]
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "vocab_size": vocab,
        "layer_types": kinds,
        "bytes_per_weight": weight_bytes,
        **(_described_states(shape.recurrence) if isinstance(shape.recurrence, DeltaNet) else {}),
    }


def _described_states(sizes: DeltaNet) -> dict[str, int]:
    return {
        "linear_num_key_heads": sizes.num_key_heads,
        "linear_num_value_heads": sizes.num_value_heads,
        "linear_key_head_dim": sizes.head_dim,
        "linear_value_head_dim": sizes.head_dim,
    }


def _rates(tensors: list[Tensor]) -> dict[str, Blocks]:
    """Returns how fast states fade, which may not be by chance: a state that grows would end in infinity."""
    rates: dict[str, Blocks] = {}
    for name, dims, _ in tensors:
        if name.endswith(".ssm_a"):
            rates[name] = np.linspace(-1, -16, dims[0], dtype=np.float32)
        elif name.endswith(".ssm_dt.bias"):
            rates[name] = np.ones(dims, np.float32)
    return rates


def _tensors(shape: Shape, kind: Kind, vocab: int) -> Tensors:
    yield "token_embd.weight", (vocab, shape.hidden), kind
    is_lfm2 = isinstance(shape.recurrence, ShortConv)
    yield f"{'token_embd' if is_lfm2 else 'output'}_norm.weight", (shape.hidden,), Kind.F32
    for layer in range(shape.num_layers):
        mixer = _attention(shape) if layer in shape.attending else _recurrence(shape)
        for name, dims in (*mixer, *_rest(shape)):
            is_product = len(dims) == 2 and "conv.weight" not in name and "conv1d" not in name
            yield f"blk.{layer}.{name}", dims, kind if is_product else Kind.F32


def _attention(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    num_queries, num_keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    has_output_gate = isinstance(shape.recurrence, DeltaNet)
    return [
        ("attn_q.weight", (num_queries * (2 if has_output_gate else 1), shape.hidden)),
        ("attn_k.weight", (num_keys, shape.hidden)),
        ("attn_v.weight", (num_keys, shape.hidden)),
        ("attn_output.weight", (shape.hidden, num_queries)),
        ("attn_q_norm.weight", (shape.head_dim,)),
        ("attn_k_norm.weight", (shape.head_dim,)),
    ]


def _recurrence(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    hidden, sizes = shape.hidden, shape.recurrence
    if isinstance(sizes, ShortConv):
        return [
            ("shortconv.conv.weight", (hidden, sizes.kernel)),
            ("shortconv.in_proj.weight", (3 * hidden, hidden)),
            ("shortconv.out_proj.weight", (hidden, hidden)),
        ]
    return [
        ("attn_qkv.weight", (sizes.num_mixed, hidden)),
        ("attn_gate.weight", (sizes.num_values, hidden)),
        ("ssm_alpha.weight", (sizes.num_value_heads, hidden)),
        ("ssm_beta.weight", (sizes.num_value_heads, hidden)),
        ("ssm_conv1d.weight", (sizes.num_mixed, sizes.kernel)),
        ("ssm_a", (sizes.num_value_heads,)),
        ("ssm_dt.bias", (sizes.num_value_heads,)),
        ("ssm_norm.weight", (sizes.head_dim,)),
        ("ssm_out.weight", (hidden, sizes.num_values)),
    ]


def _rest(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    norm = "ffn_norm" if isinstance(shape.recurrence, ShortConv) else "post_attention_norm"
    return [
        ("attn_norm.weight", (shape.hidden,)),
        (f"{norm}.weight", (shape.hidden,)),
        ("ffn_gate.weight", (shape.inner, shape.hidden)),
        ("ffn_up.weight", (shape.inner, shape.hidden)),
        ("ffn_down.weight", (shape.hidden, shape.inner)),
    ]


def _add_sizes(writer: Any, shape: Shape, vocab: int) -> None:
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.num_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.num_rotated)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(vocab)
    sizes = shape.recurrence
    if isinstance(sizes, ShortConv):
        keys = [shape.num_kv_heads if layer in shape.attending else 0 for layer in range(shape.num_layers)]
        writer.add_head_count_kv(keys)
        writer.add_shortconv_l_cache(sizes.kernel)
        return
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_full_attention_interval(shape.attending[0] + 1)
    writer.add_rope_dimension_sections([shape.num_rotated // 2 - 21, 11, 10, 0])  # text does not tell them apart
    writer.add_ssm_conv_kernel(sizes.kernel)
    writer.add_ssm_state_size(sizes.head_dim)
    writer.add_ssm_group_count(sizes.num_key_heads)
    writer.add_ssm_time_step_rank(sizes.num_value_heads)
    writer.add_ssm_inner_size(sizes.num_values)


if __name__ == "__main__":
    main()
