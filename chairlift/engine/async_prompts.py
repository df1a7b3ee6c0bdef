"""Vectors and scores of texts, for callers on an event loop: the part of `AsyncLLM` that generates nothing."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from uuid import uuid4

from chairlift.engine.mailbox import Mailbox
from chairlift.engine.text.deltas import RequestDelta
from chairlift.engine.text.embedding import EmbeddingOutput
from chairlift.engine.text.inputs import PROMPT_ONLY, Generation, InputProcessor, Prompt
from chairlift.engine.text.relevance import Pair, ScoreOutput
from chairlift.params import DEFAULT_OPTIONS, RequestOptions
from chairlift.prompt_work import PromptTask


class AsyncPrompts(ABC):
    """Computes something of prompts with an engine that a subclass has."""

    inputs: InputProcessor

    @abstractmethod
    def run_all(
        self, generations: Sequence[Generation], *, wants_steps: bool = True
    ) -> AbstractAsyncContextManager[Mailbox]:
        """See `AsyncLLM`."""

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[list[int]],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[EmbeddingOutput]:
        """Makes a vector of each text; see `LLM.embed`. All are queued, or none (`QueueFull`)."""
        listed: list[Prompt] = [texts] if isinstance(texts, str) else list(texts)
        embedding = self.inputs.embedding
        prompts = [embedding.with_prompt(each, prompt_name) if isinstance(each, str) else each for each in listed]
        deltas = await self._compute(prompts, embedding.task, options)
        return [EmbeddingOutput.of(delta, dimensions, is_normalized=normalize) for delta in deltas]

    async def score(
        self,
        query: str,
        texts: str | Sequence[str],
        *,
        instruction: str | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[ScoreOutput]:
        """Scores how well each text fits a query; see `LLM.score`. All are queued, or none (`QueueFull`)."""
        pairs = [Pair(query, each) for each in ([texts] if isinstance(texts, str) else texts)]
        comparison = await asyncio.to_thread(self.inputs.relevance.compare, pairs, instruction)
        deltas = await self._compute(comparison.prompts, comparison.task, options)
        return [ScoreOutput(score) for score in comparison.scores([delta.prompt_result for delta in deltas])]

    async def _compute(
        self, prompts: Sequence[Prompt], task: PromptTask, options: RequestOptions
    ) -> list[RequestDelta]:
        """Computes what the task wants of each prompt. `RequestFailed` if one of them fails."""
        generations = await asyncio.to_thread(self._prepare_prompts, prompts, task, options)
        deltas = dict[int, RequestDelta]()
        async with self.run_all(generations, wants_steps=False) as mailbox:
            async for index, delta in mailbox:
                delta.check_result()
                deltas[index] = delta
        return [deltas[index] for index in range(len(generations))]

    def _prepare_prompts(
        self, prompts: Sequence[Prompt], task: PromptTask, options: RequestOptions
    ) -> list[Generation]:
        call = uuid4().hex
        return [
            self.inputs.prepare(f"{call}-{index}", prompt, PROMPT_ONLY, options=options, task=task)
            for index, prompt in enumerate(prompts)
        ]
