"""The line of each request in the log, its id, and the lines about the batch."""

import asyncio
import json
import logging
import re
from typing import Any

import aiohttp
import pytest

from chairlift.api import ServerConfig
from chairlift.api.pages import WATCH_PATH
from chairlift.api.server import reporting
from chairlift.api.telemetry.log import JsonFormatter, TextFormatter, activity_fields, log_activity
from chairlift.engine.journal import Distribution, EngineStats, Totals
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, post, user
from tests.api.fault_support import forward_of, held, serving, until_idle
from tests.engine.async_support import wait_until

SECRET = "Zanzibar"


NOTHING = Distribution((1.0,), (0, 0), 0.0)


SIX = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True)
def info_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def lines_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    """The lines of that message, as a reader of the JSON format gets them."""
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    return [line for line in lines if line["message"] == message]


async def test_a_request_that_is_over_has_one_line_with_ids_tokens_and_times(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(server.url + COMPLETIONS, json=SIX, headers={"X-Request-Id": "mine"}) as response:
                reply = await response.json()
    first, second = lines_of(caplog, "request")
    assert {name: second[name] for name in ("request_id", "path", "status", "finish", "stream", "level")} == {
        "request_id": "mine",
        "path": COMPLETIONS,
        "status": 200,
        "finish": "length",
        "stream": "no",
        "level": "info",
    }
    assert second["id"] == reply["id"] != first["id"]
    assert [(line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) for line in (first, second)] == [
        (4, 0, 6),
        (4, 3, 6),
    ]
    assert 0 <= second["queue_seconds"] <= second["first_token_seconds"] <= second["total_seconds"]


async def test_no_text_of_anybody_is_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await post(server, CHAT, {"messages": user(SECRET), "user": SECRET, "max_tokens": 4, "stop": [SECRET]})
    await post(server, CHAT, {"messages": user(SECRET), "temperature": SECRET}, status=400)
    await post(server, CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}, status=400)
    await post(server, COMPLETIONS, {"prompt": SECRET * 1000}, status=400)
    lines = lines_of(caplog, "request")
    assert [line["status"] for line in lines] == [200, 400, 400, 400]
    assert SECRET not in json.dumps(lines)
    assert SECRET not in caplog.text


async def test_the_line_of_a_refused_request_says_why(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await post(server, CHAT, {"messages": user("a"), "foo": 1}, status=400)
    await post(server, CHAT, {"messages": user("a"), "model": "gpt-9"}, status=404)
    await post(server, CHAT, {"messages": user("a"), "x" * 10_000: 1}, status=400)
    await post(server, CHAT, {"messages": user("a"), "max_tokens": 1})
    reasons = [line.get("reason") for line in lines_of(caplog, "request")]
    assert reasons == [
        "unknown or unsupported field: foo",
        "there is no model 'gpt-9' here, only 'bundled'",
        f"unknown or unsupported field: {'x' * 170}...",
        None,
    ]


async def test_a_client_that_leaves_is_an_abort_whether_there_was_a_reply_or_not(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**SIX, "max_tokens": 400}
    async with aiohttp.ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            waiting = asyncio.create_task(http.post(server.url + COMPLETIONS, json=body))
            await gate.entered()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await wait_until(lambda: len(lines_of(caplog, "request")) == 1, "the line is there")
            gate.open()
            async with http.post(server.url + COMPLETIONS, json={**body, "stream": True}) as response:
                await response.content.readany()
        await until_idle(server, server.llm.config.num_slots)
    left, cut = lines_of(caplog, "request")
    assert (left["status"], left["finish"], left["output_tokens"]) == (499, "abort", 0)
    assert (cut["status"], cut["finish"], cut["stream"]) == (200, "abort", "yes")
    assert cut["output_tokens"] > 0


async def test_sequences_that_end_differently_are_all_told(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await post(server, COMPLETIONS, {**SIX, "prompt": ["Once upon a time", "a"], "stop": [","]})
    (line,) = lines_of(caplog, "request")
    assert line["finish"] == "stop,length"


async def test_what_a_client_made_up_cannot_look_like_another_line_or_field(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    forged = 'a" status=200 \\'
    async with aiohttp.ClientSession() as http:
        await http.post(server.url + "/nowhere", headers={"X-Request-Id": forged})
    (record,) = [record for record in caplog.records if record.message == "request"]
    text = TextFormatter().format(record)
    assert text.count("\n") == 0
    assert ' request_id="a\\" status=200 \\\\" path=other status=404 ' in text
    assert json.loads(JsonFormatter().format(record))["request_id"] == forged


def stats(
    seconds: float, num_steps: int, num_rows: int, running: int = 0, waiting: int = 0, **totals: int
) -> EngineStats:
    """An engine after so many steps, of so many rows in all."""
    rows = Distribution((1.0,), (0, num_steps), float(num_rows))
    return EngineStats(
        seconds, Totals(**totals), waiting, 0, running, 2, NOTHING, rows, NOTHING, NOTHING, NOTHING, NOTHING
    )


def test_a_line_about_the_batch_tells_what_was_done_since_the_one_before() -> None:
    before = stats(10.0, 100, 400, num_prompt_tokens=1000, num_cached_tokens=500, num_generated_tokens=2000)
    now = stats(
        15.0, 120, 470, running=3, waiting=1, num_prompt_tokens=1100, num_cached_tokens=525, num_generated_tokens=2070
    )
    assert activity_fields(before, now, num_slots=8) == {
        "running": 3,
        "waiting": 1,
        "slots": 8,
        "warm": 2,
        "cache_usage": 0.0,
        "batch_size": 3.5,
        "prompt_tokens_per_second": 20.0,
        "generated_tokens_per_second": 14.0,
        "hit_rate": 0.25,
    }


def test_what_there_was_none_of_has_no_mean() -> None:
    fields = activity_fields(stats(1.0, 5, 5), stats(2.0, 5, 5, waiting=1), num_slots=8)
    assert (fields["batch_size"], fields["hit_rate"], fields["waiting"]) == (None, None, 1)


async def test_an_interval_of_zero_is_never(server: Server) -> None:
    for interval_s, num_tasks in ((0.0, 0), (60.0, 1)):
        with reporting(server.llm, interval_s):
            tasks = [task.get_name() for task in asyncio.all_tasks()]
        assert tasks.count("chairlift-activity-log") == num_tasks


async def test_lines_about_the_batch_are_written_while_something_runs_only(caplog: pytest.LogCaptureFixture) -> None:
    looks = [stats(1.0, 0, 0), stats(2.0, 0, 0), stats(3.0, 5, 5), stats(4.0, 5, 5), stats(5.0, 5, 5, running=1)]
    seen = iter(looks)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await log_activity(lambda: next(seen), num_slots=8, interval_s=0.001)
    assert [line["running"] for line in lines_of(caplog, "batch")] == [0, 1]


HEADER = "X-Request-Id"


FRESH = re.compile(r"[0-9a-f]{32}")


BODY = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    ("method", "path", "arguments"),
    [
        ("POST", COMPLETIONS, {"json": BODY}),
        ("POST", COMPLETIONS, {"json": {**BODY, "stream": True}}),
        ("POST", COMPLETIONS, {"data": b"no json"}),
        ("POST", COMPLETIONS, {"json": BODY, "headers": {"Expect": "miracles"}}),
        ("POST", "/nowhere", {}),
        ("GET", COMPLETIONS, {}),
        ("GET", "/", {}),
        ("GET", "/page/page.js", {}),
        ("GET", "/health", {}),
        ("HEAD", "/version", {}),
        ("GET", "/metrics", {}),
        ("GET", WATCH_PATH, {}),
    ],
)
async def test_every_kind_of_reply_carries_the_id_that_was_sent_or_a_new_one(
    server: Server, http: aiohttp.ClientSession, method: str, path: str, arguments: dict[str, dict[str, str]]
) -> None:
    async with http.request(method, server.url + path, **arguments) as response:  # type: ignore[arg-type]
        assert FRESH.fullmatch(response.headers[HEADER])
    sent = {**arguments, "headers": {**arguments.get("headers", {}), HEADER: "my id/42"}}
    async with http.request(method, server.url + path, **sent) as response:  # type: ignore[arg-type]
        assert response.headers.getall(HEADER) == ["my id/42"]


async def test_refusals_carry_it_too() -> None:
    config = ServerConfig.model_validate({"api_key": ["key"], "allowed_origin": ["https://a.example"]})
    origin = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    async with serving(config) as server, aiohttp.ClientSession() as http:
        async with http.post(server.url + COMPLETIONS, json=BODY, headers={HEADER: "mine"}) as refused:
            assert (refused.status, refused.headers[HEADER]) == (401, "mine")
        async with http.options(server.url + COMPLETIONS, headers={**origin, HEADER: "mine"}) as preflight:
            assert (preflight.status, preflight.headers[HEADER]) == (403, "mine")


@pytest.mark.parametrize("insane", ["", "a" * 129, "tab\there", "ümlaut"])
async def test_an_id_that_is_not_sane_is_replaced(server: Server, http: aiohttp.ClientSession, insane: str) -> None:
    async with http.get(server.url + "/health", headers={HEADER: insane}) as response:
        assert FRESH.fullmatch(response.headers[HEADER])


async def test_the_longest_sane_id_comes_back_whole(server: Server, http: aiohttp.ClientSession) -> None:
    sent = "".join(chr(code) for code in range(0x21, 0x7F)) + "x" * 34
    async with http.get(server.url + "/health", headers={HEADER: sent}) as response:
        assert response.headers[HEADER] == sent
    assert len(sent) == 128
