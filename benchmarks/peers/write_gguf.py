"""Writes a checkpoint of benchmarks/shapes.py as GGUF, which llama.cpp and OpenVINO GenAI read.

    convert/bin/python benchmarks/peers/write_gguf.py CHECKPOINT FILE.gguf --type q8_0

Needs the packages gguf, safetensors and torch. llama.cpp's own converter knows tokenizers by their vocabulary, and not
the byte tokenizer of these checkpoints; what is written here is what it would write for a Llama, a Qwen3 or a Granite.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

_TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROTATING_NEIGHBOURS = ("llama", "granite")  # of the architectures that can be written: those whose halves GGUF mixes
_ARCHITECTURES = (*_ROTATING_NEIGHBOURS, "qwen3")
_SCALES = {  # fields of Granite's config, and the writer's names for them
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention_scale",
    "logits_scaling": "logit_scale",
}


def main() -> None:
    """Writes the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=_TYPES, default="bf16")
    arguments = parser.parse_args()
    write(arguments.checkpoint, arguments.file, arguments.type)


def write(checkpoint: Path, file: Path, type_name: str) -> None:
    """Writes norms in float32 and all else in the given type; beside 4 bits the embedding has 8.

    ValueError for a checkpoint of another architecture.
    """
    fields = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if fields["model_type"] not in _ARCHITECTURES:
        raise ValueError(f"{checkpoint} is a {fields['model_type']}; write one of {', '.join(_ARCHITECTURES)}")
    matrix_type, file_type = _TYPES[type_name]
    writer = gguf.GGUFWriter(file, fields["model_type"])
    writer.add_file_type(file_type)
    _add_shape(writer, fields)
    _add_vocabulary(writer, checkpoint, fields["vocab_size"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = _arranged(name, tensor.float(), fields).numpy()
        if array.ndim == 1:
            writer.add_tensor(_gguf_name(name), array)
        else:
            is_wide = type_name == "q4_0" and name == "model.embed_tokens.weight"
            kind = gguf.GGMLQuantizationType.Q8_0 if is_wide else matrix_type
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any, fields: dict[str, Any]) -> None:
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((fields.get("rope_parameters") or fields)["rope_theta"])
    writer.add_vocab_size(fields["vocab_size"])
    for field, scale in _SCALES.items():
        if field in fields:
            getattr(writer, f"add_{scale}")(fields[field])


def _add_vocabulary(writer: Any, checkpoint: Path, vocab_size: int) -> None:
    """Adds the bytes, then tokens that no text becomes; a merge makes the last of these, since one there must be."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[unused{index}]" for index in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for text, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = text, gguf.TokenType.NORMAL
    tokens[-1] = tokens[-3] + tokens[-2]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{tokens[-3]} {tokens[-2]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _gguf_name(name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    _, _, layer, *rest, _ = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES['.'.join(rest)]}.weight"


def _arranged(name: str, tensor: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """GGUF's Llamas rotate neighbours where Hugging Face's rotate halves, so rows of queries and keys change places."""
    if fields["model_type"] not in _ROTATING_NEIGHBOURS:
        return tensor.contiguous()
    num_heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}
    for projection, count in num_heads.items():
        if f".{projection}." in name:
            halves = tensor.reshape(count, 2, -1, tensor.shape[-1])  # [heads, 2, head_dim / 2, hidden]
            return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    return tensor.contiguous()


if __name__ == "__main__":
    main()
