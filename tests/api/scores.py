"""Log-probabilities computed elsewhere: the bundled checkpoint through transformers, in float32, without a cache."""

from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM

from chairlift.models.checkpoint import find_model


@cache
def _model() -> Any:
    return LlamaForCausalLM.from_pretrained(find_model("bundled"), dtype=torch.float32)


@torch.inference_mode()
def reference_logprobs(prompt: list[int], answer: list[int]) -> torch.Tensor:
    """float32 `[len(answer), vocab]`: of what might stand at each position of the answer."""
    logits = _model()(torch.tensor([prompt + answer])).logits[0]
    rows: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return rows


def byte_ids(text: str) -> list[int]:
    """The bundled model has one token per byte, and its id is the byte."""
    return list(text.encode())
