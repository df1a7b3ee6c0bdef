"""A client that goes away is an abort, in whatever phase: its slots come back within a launch, the others go on."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.api.conftest import SLOTS, Server
from tests.api.contract import text_of
from tests.api.fault_support import Gate, Launches, RawClient, forward_of, held, post, recorded, serving, until_idle
from tests.engine.async_support import wait_until

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}

STAYING_TOKENS, LEAVING_TOKENS = 90, 150
STAYING = {"prompt": "Once upon a time", "max_tokens": STAYING_TOKENS, "temperature": 0, "ignore_eos": True}
LEAVING = {"prompt": "Tim went to the park. " * 8, "max_tokens": LEAVING_TOKENS, "temperature": 0, "ignore_eos": True}
PROMPT_BUDGET = 32  # the leaving one's prompt takes several steps

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streaming": {"stream": True},
    "choices": {"stream": True, "n": 3},
    "prompts": {"prompt": [LEAVING["prompt"], "Tim. " * 20, "Tim"]},
}


def has_leaving_row(launches: Launches, is_right: Callable[[int, int], bool]) -> bool:
    """Whether the newest launch has a row of the leaving request of which (computed before, new) that is true."""
    latest = launches.latest
    leaving = [request for request in latest.requests if request.max_tokens == LEAVING_TOKENS]
    return any(is_right(request.num_computed, latest.rows[request.request_id]) for request in leaving)


async def in_first_chunk(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: has_leaving_row(launches, lambda computed, _: computed == 0))


async def in_later_chunk(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: has_leaving_row(launches, lambda computed, new: computed > 0 and new > 1))


async def in_decoding(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: has_leaving_row(launches, lambda computed, new: computed > 0 and new == 1))


async def within_a_launch_of_several_steps(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: launches.latest.num_steps == 4 and has_leaving_row(launches, lambda *_: True))
    for _ in range(2):  # the third of the four is held now
        gate.allow()
        await gate.entered()


PHASES = [in_first_chunk, in_later_chunk, in_decoding, within_a_launch_of_several_steps]


async def advance(gate: Gate, is_there: Callable[[], bool]) -> None:
    """Forward pass by forward pass; returns while one is held."""
    while not is_there():
        gate.allow()
        await gate.entered()


def assert_nothing_more_was_computed(launches: Launches, num_before: int) -> None:
    """After the launch that was running when the client left, only the staying one's rows are computed."""
    later = launches.all[num_before:]
    assert {request.max_tokens for launch in later for request in launch.requests} == {STAYING_TOKENS}
    assert {(launch.num_free_slots, len(launch.rows)) for launch in later} == {(SLOTS - 1, 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("until_phase", PHASES)
async def test_leaving_frees_every_slot_within_the_launch_and_nothing_more_is_computed(
    until_phase: Callable[[Gate, Launches], Awaitable[None]], kind: str
) -> None:
    async with serving(max_num_batched_tokens=PROMPT_BUDGET, max_steps_per_launch=4) as server:
        alone = await text_of(server, STAYING)
        with recorded(server.llm) as launches, held(forward_of(server.llm), "hidden") as gate:
            staying = asyncio.create_task(text_of(server, STAYING))
            await gate.entered()
            leaving = await post(server, {**LEAVING, **KINDS[kind]})
            await wait_until(lambda: server.api.num_active == 2 and server.llm.num_unfinished > 1, "both are there")
            await until_phase(gate, launches)
            await leave_now(server, leaving)
            num_before = len(launches.all)
            gate.open()
            assert await staying == alone
            await until_idle(server)
        assert_nothing_more_was_computed(launches, num_before)


async def leave_now(server: Server, leaving: RawClient, num_staying: int = 1) -> None:
    """Returns once the server has let go of that request: before the step that is held back comes to its end."""
    leaving.reset()
    await wait_until(lambda: server.api.num_active == server.llm.num_unfinished == num_staying, "one has left")


async def test_leaving_between_two_steps_frees_the_slot_before_the_next() -> None:
    async with serving() as server:
        with recorded(server.llm) as launches, held(server.llm._core, "step") as gate:
            staying = asyncio.create_task(text_of(server, STAYING))
            await gate.entered()
            leaving = await post(server, {**LEAVING, "prompt": "Tim", "stream": True})
            await wait_until(lambda: server.llm.num_unfinished == 2, "both are there")
            for _ in range(5):
                gate.allow()
                await gate.entered()
            await leave_now(server, leaving)
            gate.allow()  # the step that was about to be taken when the client left
            await gate.entered()
            num_before = len(launches.all)
            assert server.num_free_slots == SLOTS - 1
            gate.open()
            await staying
            await until_idle(server)
        assert_nothing_more_was_computed(launches, num_before)


@pytest.mark.parametrize("kind", KINDS)
async def test_leaving_while_queued_is_never_computed(kind: str) -> None:
    async with serving(max_batch_size=1) as server:
        with recorded(server.llm) as launches, held(forward_of(server.llm), "hidden") as gate:
            staying = asyncio.create_task(text_of(server, STAYING))
            await gate.entered()
            leaving = await post(server, {**LEAVING, **KINDS[kind]})
            await wait_until(lambda: server.llm.num_unfinished > 1, "both are there")
            gate.allow(3)
            await wait_until(lambda: server.llm._core._scheduler.num_waiting > 0, "it is queued")
            await leave_now(server, leaving)
            gate.open()
            await staying
            await until_idle(server, num_slots=1)
        assert {request.max_tokens for launch in launches.all for request in launch.requests} == {STAYING_TOKENS}


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_mask_of_a_grammar_is_computed(stream: bool) -> None:
    async with serving(max_steps_per_launch=4) as server:
        alone = await text_of(server, STAYING)
        constrained = {**LEAVING, "prompt": "Tim", "guided_regex": "[a-z ]{100,200}"}
        await text_of(server, {**constrained, "max_tokens": 1})
        (workers,) = server.llm.inputs.grammars._workers
        with recorded(server.llm) as launches, held(workers, "_compute") as gate:
            leaving = await post(server, {**constrained, "stream": stream})
            await gate.entered()
            assert await text_of(server, STAYING) == alone  # who has no grammar does not wait
            await leave_now(server, leaving, num_staying=0)
            num_before = len(launches.all)
            gate.open()
            assert await text_of(server, STAYING) == alone
            await until_idle(server)
        assert_nothing_more_was_computed(launches, num_before)


async def test_leaving_while_the_prompt_is_tokenized_starts_nothing() -> None:
    async with serving() as server:
        with recorded(server.llm) as launches, held(server.llm.inputs, "prepare") as gate:
            leaving = await post(server, LEAVING)
            await gate.entered()
            leaving.close()
            await wait_until(lambda: server.api.num_active == 0, "it has left")
        assert (await text_of(server, {**STAYING, "max_tokens": 3})) != ""
        assert {request.max_tokens for launch in launches.all for request in launch.requests} <= {3}
        await until_idle(server)


async def test_leaving_politely_is_leaving_too() -> None:
    async with serving() as server:
        leaving = await post(server, {**LONG, "stream": True})
        assert (await leaving.head()).startswith("HTTP/1.1 200 OK\r\n")
        await leaving.chunk()
        leaving.close()
        await until_idle(server)


async def test_many_that_leave_at_any_time_leave_nothing_behind_and_one_that_stays_is_answered_as_if_alone(
    server: Server,
) -> None:
    alone = await text_of(server, STAYING)
    for _ in range(3):
        staying = asyncio.create_task(text_of(server, STAYING))
        await wait_until(lambda: server.llm.num_unfinished == 1, "it is there")
        leaving = [await post(server, {**LONG, "n": 1 + index % 2, "stream": index % 3 == 0}) for index in range(6)]
        for index, client in enumerate(leaving):
            if index % 2:
                await wait_until(
                    lambda: server.num_free_slots < SLOTS - 1 or server.llm.num_unfinished == 1, "some run"
                )
            client.reset()
        assert await staying == alone
        await until_idle(server)
