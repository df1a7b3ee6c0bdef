"""Small random checkpoints that tests make, with the bundled model's byte tokenizer beside them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chairlift.models.checkpoint import find_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
}


def make_checkpoint(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, model_type: str = "llama", **shape: Any
) -> Any:
    """Writes a random checkpoint; `shape` overrides `SMALL`. Returns the model that transformers makes of it.

    Attention is computed operator by operator, as each family defines it.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SMALL, **shape})
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager")
    model = model.to(dtype).eval()
    for parameter in model.parameters():  # transformers starts biases at zero and norms at one, which hides mistakes
        parameter.data += 0.05 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # of Gemma 4
            buffer += 0.3 * torch.rand_like(buffer)
    model.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copy(find_model("bundled") / name, directory / name)
    return model


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], answer: list[int], num_tokens: int) -> None:
    """One pass tells the likeliest token after each beginning of the answer, and so, by induction, all of it."""
    assert len(answer) == num_tokens
    assert model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def random_prompts(seed: int, lengths: list[int], vocab_size: int = 320) -> list[list[int]]:
    """Token ids without special meaning, different for each prompt."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
