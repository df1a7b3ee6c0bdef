"""A real engine whose model wants to write a certain text, and checkpoints whose templates think and call."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from chairlift.engine.sampling import Guessed
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplingBatch
from chairlift.plan import RowPlan
from chairlift.scheduler import Request, Scheduler, TokenEvent
from tests.support.checkpoints import make_checkpoint

END_TOKEN = 257
MARKS = ["<think>", "</think>"]  # ordinary tokens, as in Qwen3
SPECIAL_MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]

_TURNS = """{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{%- endfor -%}"""

# In the shape of Qwen3: the model decides, unless thoughts are closed for it.
HYBRID = (
    _TURNS
    + """{%- if add_generation_prompt -%}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}"""
)
# In the shape of DeepSeek-R1 and Qwen3-Thinking.
ALWAYS = _TURNS + "{%- if add_generation_prompt -%}<|assistant|>{{ '<think>\n' }}{%- endif -%}"
# In the shape of Mistral's.
MISTRAL = _TURNS.replace("<tool_call>", "[TOOL_CALLS]").replace("<think>", "").replace("</think>", "") + (
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def make_thinking_checkpoint(directory: Path, template: str, max_seq_len: int = 512, **shape: Any) -> str:
    """A random model with the bundled byte tokenizer and the marks above; its path."""
    make_checkpoint(directory, eos_token_id=END_TOKEN, max_position_embeddings=max_seq_len, **shape)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in SPECIAL_MARKS], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


def make_agents_checkpoint(directory: Path, max_seq_len: int) -> str:
    """One of a single layer, for long prompts, that thinks and calls; its template shows tools, then the turns."""
    template = "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}" + HYBRID
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return make_thinking_checkpoint(directory, template, max_seq_len, **shape)


class Script:
    """Holds what the model wants to write. What a grammar does not let it write is passed over."""

    def __init__(self) -> None:
        self.token_ids: list[int] = [END_TOKEN]


def install(monkeypatch: pytest.MonkeyPatch) -> Script:
    """The script that every model follows during this test."""
    script = Script()
    _make_models_follow(monkeypatch, lambda _: script.token_ids)
    return script


def install_plan(monkeypatch: pytest.MonkeyPatch, directory: str, plan: Callable[[str], str]) -> None:
    """Every model writes what the plan makes of its prompt, during this test."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    written: dict[str, list[int]] = {}  # by request

    def script_of(tag: str) -> list[int]:
        if tag not in written:
            text = plan(str(tokenizer.decode(prompts.pop(tag))))
            written[tag] = [*tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
        return written[tag]

    def add_and_note(self: Scheduler, *requests: Request) -> list[TokenEvent]:
        prompts.update({request.request_id: list(request.prompt_token_ids) for request in requests})
        return add(self, *requests)

    prompts: dict[str, list[int]] = {}
    add = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", add_and_note)

    _make_models_follow(monkeypatch, script_of)


def _make_models_follow(monkeypatch: pytest.MonkeyPatch, script_of: Callable[[str], list[int]]) -> None:
    prepare, sample = Sampler.prepare, Sampler.sample
    scripts: dict[int, list[tuple[list[int], int]]] = {}  # by batch: what each row writes, and how many tokens it has

    def prepare_and_note(self: Sampler, rows: Sequence[RowPlan], num_steps: int, guessed: Guessed) -> SamplingBatch:
        batch = prepare(self, rows, num_steps, guessed)
        scripts[id(batch)] = [(script_of(row.key.tag), row.num_output_tokens) for row in rows]
        return batch

    def follow(self: Sampler, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
        for row, (script, num_tokens) in enumerate(scripts[id(batch)]):
            logits[row, script[min(num_tokens + step, len(script) - 1)]] += 1e4
        return sample(self, logits, batch, step)

    monkeypatch.setattr(Sampler, "prepare", prepare_and_note)
    monkeypatch.setattr(Sampler, "sample", follow)
