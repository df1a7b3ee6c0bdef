"""A checkpoint with weights in groups of 4 bits, as compressed-tensors writes them: random, to measure speed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from on_gpu.scale import hugging_face_config, write_config

_NUM_BITS = 4
_PER_WORD = 32 // _NUM_BITS
_DEVIATION = 4.6  # of the integers from -8 to 7
_NUM_PER_FILE = 4  # layers

Tensors = dict[str, torch.Tensor]


def write_grouped(fields: Mapping[str, Any], num_positions: int, dtype: str, directory: Path, device: str) -> Path:
    """Writes a Llama whose layers' matrices are packed; its embeddings and its head are not. Returns its directory."""
    size = _group_size(fields)
    weights = {"num_bits": _NUM_BITS, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    write_config(fields, num_positions, dtype, directory, quantization_config=quantization)
    sizes = hugging_face_config(fields, num_positions, dtype).to_dict()
    files: dict[str, str] = {}
    for number, tensors in enumerate(_parts(sizes, size, device)):
        file = f"model-{number}.safetensors"
        files |= dict.fromkeys(tensors, file)
        _save(tensors, getattr(torch, dtype), directory / file)
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def _parts(sizes: Mapping[str, Any], group_size: int, device: str) -> Iterator[Tensors]:
    """Yields what is around the layers, then some layers at a time."""
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    outer = {name: _matrix(vocab, hidden, device) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    yield outer | {"model.norm.weight": torch.ones(hidden)}
    num_layers = sizes["num_hidden_layers"]
    for first in range(0, num_layers, _NUM_PER_FILE):
        tensors: Tensors = {}
        for layer in range(first, min(first + _NUM_PER_FILE, num_layers)):
            tensors |= _layer(f"model.layers.{layer}", sizes, group_size, device)
        yield tensors


def _group_size(fields: Mapping[str, Any]) -> int:
    """The largest that divides the inputs of all matrices."""
    inputs = fields["hidden_size"], fields["intermediate_size"]
    return next(size for size in (128, 64, 32) if all(number % size == 0 for number in inputs))


def _layer(name: str, sizes: Mapping[str, Any], group_size: int, device: str) -> Tensors:
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    head_dim = sizes.get("head_dim") or hidden // sizes["num_attention_heads"]
    queries, keys = (sizes[heads] * head_dim for heads in ("num_attention_heads", "num_key_value_heads"))
    norms = {f"{name}.{norm}.weight": torch.ones(hidden) for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return norms | dict(
        tensor
        for matrix, (num_outputs, num_inputs) in shapes.items()
        for tensor in _packed(f"{name}.{matrix}", num_outputs, num_inputs, group_size, device)
    )


def _packed(
    name: str, num_outputs: int, num_inputs: int, group_size: int, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random integers, eight in a word, and scales that keep the scale of what goes in."""
    limits = torch.iinfo(torch.int32)
    words = torch.randint(limits.min, limits.max, (num_outputs, num_inputs // _PER_WORD), device=device)
    yield f"{name}.weight_packed", words.int()
    scale = num_inputs**-0.5 / _DEVIATION
    yield f"{name}.weight_scale", torch.full((num_outputs, num_inputs // group_size), scale)
    yield f"{name}.weight_shape", torch.tensor((num_outputs, num_inputs))


def _matrix(num_outputs: int, num_inputs: int, device: str) -> torch.Tensor:
    numbers = torch.randn(num_outputs, num_inputs, device=device)
    return numbers.mul_(num_inputs**-0.5)


def _save(tensors: Tensors, number_format: torch.dtype, file: Path) -> None:
    """Numbers in that format, integers as they are."""
    ready = {name: each.to(number_format) if each.is_floating_point() else each for name, each in tensors.items()}
    save_file({name: each.cpu().contiguous() for name, each in ready.items()}, file, metadata={"format": "pt"})
