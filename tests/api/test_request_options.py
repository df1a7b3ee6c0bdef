"""How a request is served beside others: what a body and its API key say of it, down to the engine."""

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from chairlift.api import ServerConfig
from chairlift.params import MAX_PRIORITY, RequestOptions
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, client_of, error_of, post, serving, user
from tests.api.fault_support import Launches, recorded

RESPONSES = "/v1/responses"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("Hi!")},
    COMPLETIONS: {"prompt": "Hi!"},
    RESPONSES: {"input": "Hi!"},
}
OURS = {"priority": -3, "timeout": 60.5, "cache_salt": "pepper", "speculation": "off"}
AS_ASKED = RequestOptions(priority=-3, timeout=60.5, cache_salt="pepper", speculation="off", tenant="ann")


def options_in(launches: Launches) -> set[RequestOptions]:
    return {request.options for launch in launches.all for request in launch.requests}


PARTS = [{"type": "text", "text": "Hi! "}, {"type": "text", "text": "Ho!"}]
HINTS = {"safety_identifier": "ann", "prompt_cache_key": "bob", "metadata": {"user": "cid"}}
PREDICTED = RequestOptions(prediction="Hi! Ho!")
EXPECTED: list[tuple[str, dict[str, Any], RequestOptions]] = [
    *((path, {"user": "ann", **OURS}, AS_ASKED) for path in PROMPTS),
    (COMPLETIONS, {"user": "ann", **OURS, "prompt": ["one", "two"], "n": 2}, AS_ASKED),
    *((path, {"user": None, **HINTS}, RequestOptions()) for path in PROMPTS),
    *((path, {"user": ""}, RequestOptions()) for path in PROMPTS),
    *((CHAT, {"prediction": {"type": "content", "content": each}}, PREDICTED) for each in ("Hi! Ho!", PARTS)),
]


@pytest.mark.parametrize(("path", "fields", "options"), EXPECTED)
async def test_a_bodys_options_reach_the_engine_and_the_user_is_the_tenant(
    server: Server, path: str, fields: dict[str, Any], options: RequestOptions
) -> None:
    with recorded(server.llm) as launches:
        await post(server, path, {**PROMPTS[path], **fields})
    assert options_in(launches) == {options}
    assert len({request for launch in launches.all for request in launch.rows}) == (4 if "n" in fields else 1)


async def test_usage_and_metrics_tell_what_was_guessed() -> None:
    settings: dict[str, Any] = {"attention_backend": "torch", "batch_invariant": True, "max_seq_len": 128}
    async with serving(speculation="ngram", num_speculative_tokens=4, **settings) as server:
        body = {**PROMPTS[CHAT], "temperature": 0, "max_tokens": 24}
        plain = await post(server, CHAT, {**body, "speculation": "off"})
        text = plain["choices"][0]["message"]["content"]
        reply = await post(server, CHAT, {**body, "prediction": {"type": "content", "content": text}})
        async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as response:
            metrics = await response.text()
    assert reply["choices"] == plain["choices"]
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "reasoning_tokens": 0}
    assert plain["usage"]["completion_tokens_details"] == none
    num_accepted = reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert num_accepted > 3
    assert f"chairlift_spec_accepted_tokens_total {num_accepted}.0" in metrics
    assert 'chairlift_spec_accepted_tokens_by_position_total{position="1"}' in metrics


@pytest.mark.parametrize("path", PROMPTS)
async def test_the_outermost_values_are_taken(server: Server, path: str) -> None:
    for priority in (MAX_PRIORITY, -MAX_PRIORITY):
        await post(server, path, {**PROMPTS[path], "priority": priority, "timeout": 1e9, "cache_salt": "x" * 256})


BAD: list[tuple[str, Any, str]] = [
    ("priority", 2**31, "priority: Input should be less than or equal to 2147483647"),
    ("priority", -(2**31), "priority: Input should be greater than or equal to -2147483647"),
    *(("priority", value, "priority: Input should be a valid integer") for value in (0.5, True)),
    *(("timeout", value, "timeout: Input should be greater than 0") for value in (0, -1)),
    ("timeout", float("inf"), "timeout: Input should be a finite number"),
    ("timeout", float("nan"), "timeout: Input should be"),
    ("timeout", "5", "timeout: Input should be a valid number"),
    ("cache_salt", "", "cache_salt is empty; leave it out, or give at least one character"),
    ("cache_salt", "x" * 257, "cache_salt: String should have at most 256 characters"),
    *((name, 5, f"{name}: Input should be a valid string") for name in ("cache_salt", "user")),
]


@pytest.mark.parametrize("path", PROMPTS)
async def test_bad_options_are_refused_by_name(server: Server, path: str) -> None:
    for field, value, message in BAD:
        for stream in (False, True):
            error = await error_of(server, path, {**PROMPTS[path], field: value, "stream": stream})
            assert error["param"] == field
            assert error["message"].startswith(message)


# --- tenants


async def options_of(server: Server, key: str, **fields: Any) -> RequestOptions:
    async with client_of(server, key) as client:
        with recorded(server.llm) as launches:
            await client.completions.create(model="bundled", prompt="Hi!", max_tokens=1, extra_body=fields)
    (options,) = options_in(launches)
    return options


async def test_a_key_is_one_tenant_whatever_user_it_names() -> None:
    async with serving(ServerConfig(api_key=["one", "two"])) as server:
        for key, tenant in (("one", "7692c3ad3540bb80"), ("two", "3fc4ccfe745870e2")):  # of their SHA-256
            for fields in ({}, {"user": "ann"}, {"user": "two"}):
                assert (await options_of(server, key, **fields)).tenant == tenant


async def test_a_key_cannot_forge_the_salt_of_another() -> None:
    """That keys reuse no prompts of each other unless they are told to share: tests/attacks."""
    prompt: dict[str, Any] = {"prompt": "Once upon a time there was a secret of ten characters", "max_tokens": 1}

    async def num_cached(server: Server, key: str, **fields: Any) -> int:
        async with client_of(server, key) as client:
            reply: Any = await client.completions.create(model="bundled", **prompt, extra_body=fields)
        return int(reply.usage.prompt_tokens_details.cached_tokens)

    async with serving(ServerConfig(api_key=["one", "two"])) as server:
        assert await num_cached(server, "one") == 0
        assert await num_cached(server, "one") > 5
        assert await num_cached(server, "two", cache_salt="7692c3ad3540bb80:") == 0  # the first key's own


async def test_a_key_has_a_range_of_priorities_and_a_share_of_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("usual\nurgent priority=-10:10 queue=0.25\n")
    async with serving(ServerConfig(api_key_file=path)) as server:
        assert (await options_of(server, "usual")).queue_share == 0.5
        assert (await options_of(server, "usual", priority=100)).priority == 100
        options = await options_of(server, "urgent", priority=-10)
        assert (options.priority, options.queue_share) == (-10, 0.25)
        for key, priority, words in (("usual", -1, "0 to"), ("usual", 101, "0 to 100"), ("urgent", -11, "-10 to 10")):
            complaint = f"priority {priority} is out of this key's range: {words}"
            with pytest.raises(openai.BadRequestError, match=complaint):
                await options_of(server, key, priority=priority)


async def test_who_is_the_only_one_with_a_key_may_fill_the_queue() -> None:
    async with serving(ServerConfig(api_key=["one"])) as server:
        assert (await options_of(server, "one")).queue_share == 1.0
