"""Whatever comes and goes, in any order: in the end no table of the engine or of its loop knows of anybody."""

import asyncio
import gc
from random import Random
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine import core as core_module
from chairlift.engine.core import Pacing
from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import RequestOptions, RequestOutput, StructuredOutputs
from chairlift.scheduler import Request, RequestState
from tests.engine.async_support import make_async_llm, port_of, thread_of, wait_until
from tests.scheduler.fake_engine import assert_nothing_is_left
from tests.support.checkpoints import random_prompts

NUM_REQUESTS = 150
BEGINNINGS = random_prompts(4, [150, 40, 5], 250)


def random_params(drawn: Random) -> SamplingParams:
    choices: dict[str, list[Any]] = {
        "n": [1, 1, 1, 3],
        "ignore_eos": [True, False],
        "repetition_penalty": [1.0, 1.0, 1.5],
        "stop": [[], ["a", "e"]],
        "logprobs": [None, None, 2],
        "prompt_logprobs": [None, None, None, 1],
        "structured_outputs": [None, None, StructuredOutputs(regex="[a-f]{3,9}")],
    }
    fields = {name: drawn.choice(values) for name, values in choices.items()}
    return SamplingParams(temperature=1.0, seed=drawn.randrange(100), max_tokens=drawn.randrange(20), **fields)


def random_options(drawn: Random) -> RequestOptions:
    salt, share, timeout = drawn.choice(["", "x"]), drawn.choice([1.0, 0.5]), drawn.choice([None, None, 0.05])
    priority, tenant = drawn.randrange(3), drawn.choice("abc")
    return RequestOptions(priority=priority, tenant=tenant, cache_salt=salt, queue_share=share, timeout=timeout)


async def visit(engine: AsyncLLM, drawn: Random, seen: set[str]) -> str:
    """One client, and how it ends: it is served, is refused, or leaves. Notes its sequences."""
    prompt = [*drawn.choice(BEGINNINGS), *(drawn.randrange(250) for _ in range(drawn.randrange(20)))]
    generation = await engine.prepare(prompt, random_params(drawn), options=random_options(drawn))
    seen.update(request.request_id for request in generation.requests)
    patience = drawn.choice([1, 2, 1000])  # looks at the output
    latest: RequestOutput | None = None
    try:
        async for output in engine.run(generation):
            latest = output
            patience -= 1
            if drawn.random() < 0.02:
                await engine.abort(generation.request_id)
            if not patience:
                return "left"
    except (QueueFull, QueueTimeout) as error:
        return type(error).__name__
    assert latest is not None
    assert latest.finished
    return "served"


def ids_in_memory() -> set[str]:
    """All sequences in the process. A worker thread may keep its last one until it is scheduled again."""
    gc.collect()
    return {each.request_id for each in gc.get_objects() if type(each) in (Request, RequestState)}


@pytest.mark.parametrize("num_ahead", [0, 1])
async def test_after_churn_every_table_is_empty(tiny: str, monkeypatch: pytest.MonkeyPatch, num_ahead: int) -> None:
    drawn = Random(num_ahead)
    monkeypatch.setattr(core_module.Pacing, "of", lambda _: Pacing(num_launches_ahead=num_ahead))
    sizes = {"max_batch_size": 4, "max_queue_size": 6, "max_steps_per_launch": 3, "max_num_batched_tokens": 48}
    async with make_async_llm(tiny, **sizes, preempt_after=2, queue_timeout=0.3) as engine:
        tasks: list[asyncio.Task[str]] = []
        seen: set[str] = set()
        for number in range(NUM_REQUESTS):
            tasks.append(asyncio.create_task(visit(engine, drawn, seen)))
            if number % 10 == 0:
                await asyncio.sleep(0.02)
            if drawn.random() < 0.1:
                drawn.choice(tasks).cancel()
            if drawn.random() < 0.1:
                await engine.reset_prefix_cache()
        fates = await asyncio.gather(*tasks, return_exceptions=True)
        assert [fate for fate in fates if isinstance(fate, Exception)] == []
        assert {"served", "left", "QueueFull"} <= set(fates)
        core, thread = engine._core, thread_of(engine)
        await wait_until(lambda: thread.progress is None and not core.has_work, "nothing is left to do")
        assert engine.is_healthy
        assert (engine._mailboxes, engine._answers, engine._outputs._routes) == ({}, set(), {})
        await wait_until(lambda: port_of(engine)._untaken.num_parts == 0, "all is taken")
        core.check()
        assert list(core._launches) == []
        assert_nothing_is_left(core._scheduler)
        del tasks, fates
        assert len(seen) > NUM_REQUESTS
        await wait_until(lambda: seen.isdisjoint(ids_in_memory()), "no sequence is in memory")
