"""Measures how often a saved model's greedy answers to held-out exchanges match exactly, skill by skill.

The model is loaded through transformers in float32, or through Chairlift with settings of its own. An answer counts
when it equals the expected one to the character; a story counts when it is a whole story of the grammar about the
right subject.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bundled_model.dataset import CHAT_MIXTURE
from bundled_model.exchange import Exchange, Maker, draw
from bundled_model.number_skills import sum_document
from bundled_model.story_skills import is_story_like, stories, story_questions
from bundled_model.tool_evaluation import TOOL_PROBES, ToolProbe
from bundled_model.unknown_skills import SYSTEM_TEXTS
from bundled_model.word_skills import word_document
from chairlift import LLM, SamplingParams

_BATCH = 50
_MAX_NEW_TOKENS = 400
_SYSTEM_SHARE = 0.3
_EARLIER_TURNS = (0, 0, 0, 1, 2)


@dataclass(frozen=True)
class Probe:
    """Holds a prompt in full and the exchange whose answer should follow it."""

    prompt: str
    exchange: Exchange


@dataclass(frozen=True)
class Result:
    """Counts how many of a skill's probes were answered rightly, and keeps a few that were not."""

    skill: str
    right: int
    total: int
    misses: tuple[tuple[str, str], ...]

    @property
    def accuracy(self) -> float:
        """Returns the share of right answers, in percent."""
        return 100 * self.right / self.total


class Evaluator:
    """Asks a saved model: in float32 by transformers, or by Chairlift with some settings."""

    def __init__(self, directory: Path, settings: dict[str, Any] | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left", trust_remote_code=False)
        self.engine = None if settings is None else LLM(str(directory), **settings)
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def chat_prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Writes the text that the chat template makes of some messages and tools."""
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    @torch.inference_mode()
    def complete(self, prompts: list[str]) -> list[str]:
        """Returns greedy continuations, without the token that ended them."""
        encoded = self.tokenizer(prompts, padding=True, return_tensors="pt")
        ids = self.model.generate(**encoded, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)  # type: ignore[misc]
        answers = ids[:, encoded["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(answers, skip_special_tokens=True))

    def complete_all(self, prompts: list[str]) -> list[str]:
        """Continues any number of prompts, those of similar length together."""
        if self.engine is not None:
            params = SamplingParams(temperature=0.0, max_tokens=_MAX_NEW_TOKENS)
            return [output.outputs[0].text for output in self.engine.generate(prompts, params, use_tqdm=False)]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            for index, answer in zip(batch, self.complete([prompts[i] for i in batch]), strict=True):
                answers[index] = answer
        return answers


def _chat_probe(evaluator: Evaluator, maker: Maker, rng: random.Random) -> Probe:
    """Draws a held-out question, some with a system message, some as a later turn of a conversation."""
    messages: list[dict[str, Any]] = []
    if rng.random() < _SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
    for _ in range(rng.choice(_EARLIER_TURNS)):
        earlier = draw(rng.choice([other for other, _ in CHAT_MIXTURE]), rng, held_out=False)
        messages.append({"role": "user", "content": earlier.question})
        messages.append({"role": "assistant", "content": earlier.answer})
    exchange = draw(maker, rng, held_out=True)
    messages.append({"role": "user", "content": exchange.question})
    return Probe(evaluator.chat_prompt(messages), exchange)


def _document_probe(maker: Maker, rng: random.Random) -> Probe:
    """Draws the beginning of a held-out plain document."""
    exchange = draw(maker, rng, held_out=True)
    return Probe(exchange.question, exchange)


def _tool_probe(evaluator: Evaluator, maker: Callable[[random.Random], ToolProbe], rng: random.Random) -> Probe:
    """Draws a held-out question in a conversation with tools."""
    probe = maker(rng)
    return Probe(evaluator.chat_prompt(probe.messages, probe.tools), probe.exchange)


def _is_right(exchange: Exchange, answer: str) -> bool:
    if exchange.key.startswith("story:"):
        return is_story_like(answer, exchange.answer)
    return answer == exchange.answer


def _result(skill: str, probes: list[Probe], answers: list[str]) -> Result:
    misses = tuple(
        (probe.exchange.question, answer)
        for probe, answer in zip(probes, answers, strict=True)
        if not _is_right(probe.exchange, answer)
    )
    return Result(skill, len(probes) - len(misses), len(probes), misses)


def _all_probes(evaluator: Evaluator, seed: int, count: int) -> dict[str, list[Probe]]:
    """Draws `count` probes for every skill, by the skill's name."""
    rng = random.Random(seed)
    makers = [story_questions if maker is stories else maker for maker, _ in CHAT_MIXTURE]
    probes = {maker.__name__: [_chat_probe(evaluator, maker, rng) for _ in range(count)] for maker in makers}
    for tool_maker in TOOL_PROBES:
        probes[tool_maker.__name__] = [_tool_probe(evaluator, tool_maker, rng) for _ in range(count)]
    for maker in (sum_document, word_document):
        probes[maker.__name__] = [_document_probe(maker, rng) for _ in range(count)]
    return {name.replace("_", " "): probes_of_skill for name, probes_of_skill in probes.items()}


def evaluate(directory: Path, seed: int, count: int, settings: dict[str, Any] | None = None) -> list[Result]:
    """Ask the model in a directory `count` held-out questions of every skill, through Chairlift if it has settings."""
    evaluator = Evaluator(directory, settings)
    return [
        _result(skill, probes, evaluator.complete_all([probe.prompt for probe in probes]))
        for skill, probes in _all_probes(evaluator, seed, count).items()
    ]


def overall(results: list[Result]) -> Result:
    """Adds all skills up."""
    right, total = sum(result.right for result in results), sum(result.total for result in results)
    return Result("overall", right, total, ())
