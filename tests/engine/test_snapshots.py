"""Snapshots of a real engine: taken between two launches, and never in anybody's way."""

import asyncio
import time
from typing import Any

import pytest
import torch

from chairlift import AsyncLLM, SamplingParams
from chairlift.cache.budget import CacheUse
from chairlift.engine.journal import SlotSnapshot, SlotState, Snapshot, Totals, short_id
from chairlift.engine.parts import Parts
from chairlift.errors import EngineClosed, EngineDead
from chairlift.models import load_forward
from tests.engine.async_support import LONG, NUM_SLOTS, Gate, hold_back, last, make_async_llm, wait_until
from tests.engine.support import GREEDY
from tests.support.engines import WrappedForward, core_of

PROMPT = [5, 6, 7, 8]


def launches_of(snapshot: Snapshot) -> list[tuple[int, int, int]]:
    assert all(launch.seconds > 0 for launch in snapshot.launches)
    return [(launch.num_prefill_tokens, launch.num_decode_rows, launch.num_steps) for launch in snapshot.launches]


async def look_in_two_steps(engine: AsyncLLM, gate: Gate) -> Snapshot:
    """A snapshot taken after the second step from here, after which the engine runs freely."""
    await gate.entered()
    await gate.entered()
    look = asyncio.create_task(engine.read_snapshot())
    await asyncio.sleep(0)
    gate.allow(1)
    seen = await look
    gate.open()
    return seen


async def test_an_idle_engine_is_seen_as_it_is_by_any_number_of_lookers(tiny: str) -> None:
    async with make_async_llm(tiny, max_seq_len=64) as engine:
        first, second = await engine.read_snapshot(), await engine.read_snapshot()
        looks = [asyncio.create_task(engine.read_snapshot()) for _ in range(10)]
        await asyncio.sleep(0)
        for look in looks[:9]:  # who asked and left disturbs nobody
            look.cancel()
        assert await looks[9] == first
        assert len((await last(engine.generate(PROMPT, GREEDY))).outputs[0].token_ids) == 12
    cache = CacheUse(num_tokens=first.cache.num_tokens)
    assert first == second == Snapshot(first.time, 64, (SlotSnapshot(),) * 2, 0, (), 0, (), Totals(), cache)
    assert 0.0 < first.time < second.time


async def test_slots_queue_launches_and_totals_are_those_between_two_launches(tiny: str) -> None:
    async with make_async_llm(tiny, max_num_batched_tokens=8) as engine:
        with hold_back(engine) as gate:
            lengths = {"a": 4, "b": 10, "c": 5}
            outputs = [last(engine.generate([7] * length, LONG, name)) for name, length in lengths.items()]
            readers = [asyncio.create_task(each) for each in outputs]
            await gate.entered()
            await wait_until(lambda: engine.num_unfinished == 3, "all have come")
            gate.allow(2)
            seen = await look_in_two_steps(engine, gate)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    assert [slot.state for slot in seen.slots] == [SlotState.DECODING] * NUM_SLOTS
    assert {slot.num_prompt_tokens for slot in seen.slots} == {4, 10}
    assert all(slot.num_computed == slot.num_tokens - 1 for slot in seen.slots)
    assert {slot.request_id for slot in seen.slots} == {short_id("a-0-0"), short_id("b-0-0")}
    (waiting,) = seen.waiting
    assert (waiting.request_id, waiting.num_prompt_tokens, seen.num_waiting) == (short_id("c-0-0"), 5, 1)
    assert waiting.seconds > 0.0
    assert seen.num_launches == 3
    assert sum(prefill for prefill, _, _ in launches_of(seen)) == 14
    assert (seen.totals.num_prompt_tokens, seen.totals.num_first_tokens) == (14, 2)
    assert seen.totals.seconds_to_first_token > 0.0


async def test_totals_count_what_ended_however_it_did(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        output = await last(engine.generate(PROMPT, GREEDY, "whole"))
        reader = asyncio.create_task(last(engine.generate(PROMPT, LONG, "left")))
        await wait_until(lambda: core_of(engine).has_work, "it runs")
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        seen = await engine.read_snapshot()
    assert seen.totals.num_finished == 2
    assert seen.totals.num_generated_tokens >= len(output.outputs[0].token_ids) == 12
    assert [slot.state for slot in seen.slots if slot.request_id] == []


async def test_tokens_kept_in_a_slot_are_seen_before_and_while_a_request_reuses_them(tiny: str) -> None:
    prompt = list(range(40))
    async with make_async_llm(tiny) as engine:
        await last(engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1)))
        kept = await engine.read_snapshot()
        with hold_back(engine) as gate:
            reader = asyncio.create_task(last(engine.generate([*prompt, 41, 42], LONG, "again")))
            gate.allow(1)
            seen = await look_in_two_steps(engine, gate)
            await reader
    assert kept.slots[0] == SlotSnapshot(SlotState.WARM, num_computed=40, num_held=40)
    (running,) = [slot for slot in seen.slots if slot.state is SlotState.DECODING]
    assert (running.num_reused, running.num_prompt_tokens) == (40, 42)
    assert launches_of(seen)[1] == (2, 0, 1)
    assert (seen.totals.num_prompt_tokens, seen.totals.num_cached_tokens) == (40 + 42, 40)


async def test_several_steps_of_a_launch_are_told_and_their_time_holds_the_forward_pass(tiny: str) -> None:
    spent: list[float] = []

    class Timed(WrappedForward):
        def hidden(self, *given: Any) -> torch.Tensor:
            start = time.perf_counter()
            result = super().hidden(*given)
            spent.append(time.perf_counter() - start)
            return result

    parts = Parts(load_forward=lambda *given: Timed(load_forward(*given)))
    async with make_async_llm(tiny, parts, max_steps_per_launch=4) as engine:
        await last(engine.generate(PROMPT, GREEDY))
        seen = await engine.read_snapshot()
    assert launches_of(seen) == [(4, 0, 1), (0, 1, 4), (0, 1, 4), (0, 1, 3)]
    passes = iter(spent)
    for launch in seen.launches:
        assert launch.seconds >= sum(next(passes) for _ in range(launch.num_steps)) - 1e-6


async def test_an_engine_that_is_closed_is_not_looked_at(tiny: str) -> None:
    engine = make_async_llm(tiny)
    await engine.close()
    with pytest.raises(EngineClosed):
        await engine.read_snapshot()


async def test_when_the_engine_dies_lookers_are_told_and_statistics_which_wait_for_no_step_remain(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            reader = asyncio.create_task(last(engine.generate(PROMPT, LONG)))
            gate.allow(1)
            await gate.entered()
            await gate.entered()
            held = engine.read_stats()
            look = asyncio.create_task(engine.read_snapshot())
            await asyncio.sleep(0)
            gate.fail(RuntimeError("broken"))
            with pytest.raises(EngineDead, match="broken"):
                await look
            await asyncio.gather(reader, return_exceptions=True)
        with pytest.raises(EngineDead, match="broken"):
            await engine.read_snapshot()
        after = engine.read_stats()
    assert (held.num_running, held.num_decoding, held.totals.num_generated_tokens) == (1, 1, 1)
    assert (after.totals, after.step_seconds) == (held.totals, held.step_seconds)
