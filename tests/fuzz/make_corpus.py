"""Writes the files that are mutated: one small checkpoint of every format that is read.

    python -m tests.fuzz.make_corpus

They are in the repository, so that a case is the same whatever version of transformers or gguf there is. Checkpoints
without a tokenizer of their own get `SHARED`'s.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from chairlift.models.grouped import FLOAT8
from tests.fuzz.cases import CORPUS, SHARED, TOKENIZER_FILES
from tests.models.compressed_support import (
    Tensors,
    awq,
    compressed_tensors,
    fine_grained,
    float8,
    gptq,
    pack_awq,
    pack_gptq,
    pack_quantized,
    quantized,
)
from tests.models.support import read_config, write_config
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Kind, add_byte_level_tokenizer, add_sentence_piece_tokenizer, write_model

_GROUP_SIZE = 32
_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {
    "embed_tokens": Kind.Q6_K,
    "q_proj": Kind.Q4_K,
    "k_proj": Kind.Q5_K,
    "v_proj": Kind.Q4_K,
    "o_proj": Kind.Q5_0,
    "gate_proj": Kind.Q4_0,
    "up_proj": Kind.Q4_1,
    "down_proj": Kind.Q5_1,
}
_RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"],  # as files that say nothing else
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "mamba_num_heads": 2,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 2,
        "mamba_expand": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_state": 8, "mamba_chunk_size": 16},
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
}
_SIGLIP = {**_PIXTRAL, "model_type": "siglip_vision_model", "image_size": 8}
_GROWING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
# By transformers' class: the fields of the text part, and those of the tower.
_TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mistral3": ({"model_type": "ministral3", "rope_parameters": {**_GROWING, "llama_4_scaling_beta": 0.1}}, _PIXTRAL),
    "Gemma3": ({"model_type": "gemma3_text", "sliding_window": 16}, _SIGLIP),
}
_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def main() -> None:
    shutil.rmtree(CORPUS, ignore_errors=True)
    make_checkpoint(CORPUS / SHARED, dtype=torch.bfloat16, **{**_SMALL, "tie_word_embeddings": True})
    for name in ("gptq", "awq", "compressed"):
        _write_compressed(CORPUS / name, name)
    _write_float8(CORPUS / "float8")
    _write_stacked_float8(CORPUS / "stacked-float8")
    _write_sharded(CORPUS / "sharded")
    mixture: dict[str, Any] = {"num_local_experts": 2, "intermediate_size": 8, "tie_word_embeddings": True}
    _write_plainly(CORPUS / "adapted", model_type="phimoe", pad_token_id=0, hidden_size=16, **mixture)
    _write_plainly(CORPUS / "experts", model_type="mixtral", **mixture)
    _write_gguf(CORPUS / "gguf-bytes", _byte_level, 264, family="qwen2")
    _write_gguf(CORPUS / "gguf-pieces", partial(_sentence_piece, pieces=_PIECES), len(_PIECES), family="gemma3_text")
    few = _PIECES[-16:]
    _write_gguf(CORPUS / "gguf-mixed", partial(_sentence_piece, pieces=few), len(few), _MIXED, hidden_size=256)
    for family, shape in _RECURRENT.items():
        _write_plainly(CORPUS / family, model_type=family, tie_word_embeddings=True, **_with_layers(shape))
        tokenizer = partial(_sentence_piece, pieces=few)
        _write_gguf(CORPUS / f"gguf-{family}", tokenizer, len(few), Kind.F16, family=family, **_with_layers(shape))
    for name, parts in _TOWERS.items():
        _write_tower(CORPUS / name.lower(), name, *parts)
    sizes = {path: path.stat().st_size for path in sorted(CORPUS.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        sys.stdout.write(f"{size:8} {path.relative_to(CORPUS)}\n")
    sys.stdout.write(f"{sum(sizes.values()):8}\n")


def _write_plainly(directory: Path, **shape: Any) -> Any:
    """A checkpoint without a tokenizer."""
    model = make_checkpoint(directory, dtype=torch.bfloat16, **{**_SMALL, **shape})
    for name in TOKENIZER_FILES:
        (directory / name).unlink()
    return model


def _with_layers(shape: dict[str, Any]) -> dict[str, Any]:
    """The same shape with as many layers as it has types of, which are narrow, since there are several."""
    kinds = shape.get("layer_types") or shape.get("layers_block_type") or ["hybrid"]
    narrow = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    return {**narrow, **shape, "num_hidden_layers": len(kinds)}


def _write_tower(directory: Path, name: str, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """A checkpoint of text and images, without a tokenizer."""
    torch.manual_seed(0)
    make_config: Any = getattr(transformers, f"{name}Config")
    config = make_config(
        text_config={**_SMALL, "hidden_size": 16, **text}, vision_config=vision, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def _write_sharded(directory: Path) -> None:
    model = _write_plainly(directory, model_type="gemma2", sliding_window=16)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="8KB")


def _write_compressed(directory: Path, name: str) -> None:
    model = _write_plainly(directory)
    ways: dict[str, tuple[dict[str, Any], Callable[[str, Any], Tensors]]] = {
        "awq": (awq(group_size=_GROUP_SIZE), pack_awq),
        "gptq": (gptq(4, _GROUP_SIZE), lambda base, matrix: pack_gptq(base, matrix, 4, 1)),
        "compressed": (
            compressed_tensors(8, _GROUP_SIZE, False),
            lambda base, matrix: pack_quantized(base, matrix, 8, False),
        ),
    }
    stated, pack = ways[name]
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed, weight in enumerate(sorted(tensors)):
        base = weight.removesuffix(".weight")
        if base.endswith("_proj"):
            shape = tensors.pop(weight).shape
            tensors |= pack(base, quantized(seed, shape, 8 if name == "compressed" else 4, _GROUP_SIZE, False))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, read_config(directory), quantization_config=stated)


def _write_float8(directory: Path) -> None:
    model = _write_plainly(directory)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed, weight in enumerate(sorted(tensors)):
        base = weight.removesuffix(".weight")
        if base.endswith("_proj"):
            made, _ = float8(base, seed, (32, 32), (16, 16), "weight_scale_inv")
            tensors |= made
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, read_config(directory), quantization_config=fine_grained((16, 16)))


def _write_stacked_float8(directory: Path) -> None:
    """A mixture whose experts are stacks, and so are their scales."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model = _write_plainly(directory, model_type="qwen3_moe", hidden_size=16, tie_word_embeddings=True, **experts)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if ".experts." in name]:
        num_experts, num_outputs, num_inputs = tensors[name].shape
        tensors[name] = tensors[name].to(FLOAT8)
        tensors[f"{name}_scale_inv"] = torch.rand(num_experts, num_outputs // 8, num_inputs // 8, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, read_config(directory), quantization_config=fine_grained((8, 8)))


def _write_gguf(
    directory: Path,
    tokenizer: Any,
    vocab_size: int,
    kind: Any = Kind.Q8_0,
    hidden_size: int = 32,
    family: str = "llama",
    **more: Any,
) -> None:
    shape = {**_SMALL, "hidden_size": hidden_size, "vocab_size": vocab_size, "tie_word_embeddings": True, **more}
    source = directory / "source"
    model = make_checkpoint(source, model_type=family, **shape)
    shutil.rmtree(source)
    write_model(model, directory / "model.gguf", kind, tokenizer)


def _byte_level(writer: Any) -> None:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    names += ["".join(merge) for merge in merges]
    backend = BackendTokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    add_byte_level_tokenizer(writer, backend, "qwen2", 264, add_bos_token=False)
    writer.add_eos_token_id(260)
    writer.add_chat_template(_CHATML)
    writer.add_float32("general.sampling.temp", 0.6)


_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
_PIECES = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(64)), *"▁abcdefghijklmnopqrstuvwxyzTHE.,"]
_PIECES += ["th", "the", "▁the", "▁a", "ll"]


def _sentence_piece(writer: Any, pieces: Sequence[str]) -> None:
    backend = BackendTokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in pieces if token in _SPECIAL])
    add_sentence_piece_tokenizer(writer, backend, [-float(index) for index in range(len(pieces))])
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    main()
