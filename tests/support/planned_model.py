"""A real engine whose model writes what a plan makes of its prompt: agents get the calls and answers that they need."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from chairlift.engine.sampling import Guessed
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplingBatch
from chairlift.scheduler import RequestState
from tests.support.checkpoints import make_checkpoint
from tests.support.scripted_model import END_TOKEN, HYBRID, MARKS, SPECIAL_MARKS

Plan = Callable[[str], str]
"""From a prompt to what the model writes."""


def make_agents_checkpoint(directory: Path, max_seq_len: int) -> str:
    """A random model of one layer, for long prompts, with the bundled byte tokenizer, which thinks and calls; its path.

    The template shows tools first, then the turns.
    """
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    make_checkpoint(directory, eos_token_id=END_TOKEN, max_position_embeddings=max_seq_len, **shape)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in SPECIAL_MARKS], special_tokens=True)
    tokenizer.chat_template = "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}" + HYBRID
    tokenizer.save_pretrained(directory)
    return str(directory)


def install_plan(monkeypatch: pytest.MonkeyPatch, directory: str, plan: Plan) -> None:
    """Every model follows this plan until the end of the test."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prepare, sample = Sampler.prepare, Sampler.sample
    written: dict[str, list[int]] = {}  # by request
    rows: dict[int, list[tuple[list[int], int]]] = {}  # by batch: what each row writes, and how many tokens it has

    def script_of(state: RequestState) -> list[int]:
        if state.request_id not in written:
            text = plan(str(tokenizer.decode(state.token_ids[: state.num_prompt_tokens])))
            written[state.request_id] = [*tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
        return written[state.request_id]

    def prepare_and_note(
        self: Sampler, requests: Sequence[RequestState], num_steps: int, guessed: Guessed
    ) -> SamplingBatch:
        batch = prepare(self, requests, num_steps, guessed)
        rows[id(batch)] = [(script_of(state), state.num_output_tokens) for state in requests]
        return batch

    def follow(self: Sampler, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
        for row, (script, num_tokens) in enumerate(rows[id(batch)]):
            logits[row, script[min(num_tokens + step, len(script) - 1)]] += 1e4
        return sample(self, logits, batch, step)

    monkeypatch.setattr(Sampler, "prepare", prepare_and_note)
    monkeypatch.setattr(Sampler, "sample", follow)
