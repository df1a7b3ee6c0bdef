"""Tests what `/v1/messages` refuses, in the shape and with the statuses that Anthropic's clients know; keys and
tenants.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anthropic
import pytest

from chairlift.api import ServerConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.mailbox import Mailbox
from chairlift.engine.text.inputs import Generation
from chairlift.errors import EngineClosed, QueueFull, QueueTimeout
from tests.api.anthropic.support import ANSWER, QUESTION, WEATHER, error_of, events_of, whole_of
from tests.api.conftest import Server, make_served, serving
from tests.api.contract import COUNT_TOKENS, MESSAGES, anthropic_client, posted

ASKED: dict[str, Any] = {"max_tokens": 20, "messages": QUESTION}
COUNT_TOKENS, client_of = COUNT_TOKENS, anthropic_client


CALLED = [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]
NO_SCHEMA = {"format": {"type": "json_schema", "schema": {"type": 5}}}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": []}, "messages is empty"),
        ({"unheard_of": 1}, "unknown or unsupported field: unheard_of"),
        (block(type="image", source={}), "messages.0.content.0: type 'image' is not supported"),
        ({"system": [{"type": "image"}]}, "system.0: type 'image' is not supported"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": CALLED}]}, "and their results are missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is only allowed with tools"),
        ({"tools": [{"type": "bash_1"}], "tool_choice": {"type": "any"}}, "with tools: tools of type bash_1 are not"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: there is no tool 'x'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice: name goes with type tool"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools.0.name: String should match pattern"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"temperature": 2.5, "top_p": 7.0}, "top_p: Input should be less than or equal to 1"),
        ({"stop_sequences": [""]}, "stop_sequences.0: String should have at least 1 character"),
        ({"output_config": NO_SCHEMA}, "output_config"),
    ],
)
async def test_a_wrong_request_is_told_what_to_change(server: Server, fields: dict[str, Any], words: str) -> None:
    error = await error_of(server, 400, {**ASKED, **fields})
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


class WatchedLLM(AsyncLLM):
    """Notes the tenants of what it runs, and refuses to run anything once it is told the reason."""

    refusal: Exception | None = None
    tenants: tuple[str, ...] = ()

    @asynccontextmanager
    async def run_all(self, generations: Sequence[Generation], *, wants_steps: bool = True) -> AsyncGenerator[Mailbox]:
        if self.refusal is not None:
            raise self.refusal
        self.tenants += tuple(generation.requests[0].options.tenant for generation in generations)
        async with super().run_all(generations, wants_steps=wants_steps) as mailbox:
            yield mailbox


async def test_every_status_has_its_type_and_exception(server: Server) -> None:
    for path, fields in ((MESSAGES, {"model": "gpt"}), (f"{MESSAGES}/batches", {})):
        assert (await error_of(server, 404, {**ASKED, **fields}, path))["type"] == "not_found_error"
    plain = await error_of(server, 415, ASKED, **{"Content-Type": "text/plain"})
    assert plain["type"] == "invalid_request_error"
    llm = make_served(WatchedLLM)
    async with serving(llm=llm) as refusing:
        for error, status, kind in (
            *((QueueFull("full"), 429, "rate_limit_error"), (QueueTimeout("late"), 503, "overloaded_error")),
            *((EngineClosed("closed"), 503, "overloaded_error"), (RuntimeError("boom"), 500, "api_error")),
        ):
            llm.refusal = error
            assert (await error_of(refusing, status, ASKED))["type"] == kind
        async with client_of(refusing) as client:
            with pytest.raises(anthropic.InternalServerError) as caught:
                await client.messages.create(model="bundled", max_tokens=1, messages=QUESTION)
            assert (caught.value.type, bool(caught.value.request_id)) == ("api_error", True)
    async with serving(ServerConfig(max_body_bytes=100)) as small:
        assert (await error_of(small, 413, {**ASKED, "system": "a" * 100}))["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("num_characters", "fields", "words"),
    [
        (
            600,
            {},
            "prompt is too long: 603 tokens > 511 maximum. This model's maximum context length is 512 tokens. How",
        ),
        (509, {}, "prompt is too long: 512 tokens > 511 maximum. "),
        (510, {"max_tokens": 0}, "prompt is too long: 513 tokens > 512 maximum. "),
        (100_000, {}, "prompt is too long: "),
        (509, {"min_tokens": 5, "max_tokens": 5}, "prompt is too long: 512 tokens > 511 maximum. "),
        (
            470,
            {"min_tokens": 50, "max_tokens": 50},
            "This model's maximum context length is 512 tokens. However, min_tok",
        ),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    server: Server, num_characters: int, fields: dict[str, Any], words: str
) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * num_characters}], **fields}
    error = await error_of(server, 400, body)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(words)


async def test_a_prompt_far_too_long_is_told_at_least_its_length(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a" * 100_000}]}
    for path, fields in ((MESSAGES, {"max_tokens": 1}), (COUNT_TOKENS, {})):
        message = (await error_of(server, 400, {**body, **fields}, path))["message"]
        # The longest token has 13 characters.
        assert message.startswith(
            "prompt is too long: 7693 tokens > 512 maximum. This model's maximum context length is"
        )


async def test_a_broken_stream_ends_with_an_error_event(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = server.llm.run_all

    @asynccontextmanager
    async def break_off(generations: Any, **wishes: Any) -> AsyncGenerator[Mailbox]:
        async with run_all(generations, **wishes) as mailbox:
            monkeypatch.setattr(mailbox, "notify", partial(notify_and_fail, mailbox, mailbox.notify))
            yield mailbox

    def notify_and_fail(mailbox: Mailbox, notify: Callable[[str], None], request_id: str) -> None:
        notify(request_id)
        asyncio.get_running_loop().call_later(0.0, mailbox.fail, QueueTimeout("waited 5 s for a slot"))

    monkeypatch.setattr(server.llm, "run_all", break_off)
    async with posted(server, {**ASKED, "stream": True}) as response:
        text = await response.text()
    assert text.startswith("event: message_start\n")
    said = '{"type":"overloaded_error","message":"waited 5 s for a slot"}'
    assert text.endswith(f'event: error\ndata: {{"type":"error","error":{said},"request_id":null}}\n\n')
    async with client_of(server) as client:
        with pytest.raises(anthropic.APIStatusError, match="waited 5 s"):
            async with client.messages.stream(model="bundled", **ASKED) as stream:
                await stream.get_final_message()


async def test_a_key_is_taken_from_either_header_on_these_paths_only() -> None:
    config = ServerConfig.model_validate({"api_key": ["first", "second"]})
    async with serving(config) as server:
        for headers in ({"x-api-key": "first"}, {"Authorization": "Bearer second"}):
            async with posted(server, {**ASKED, "max_tokens": 100}, **headers) as response:
                assert (await response.json())["content"][0]["text"] == ANSWER
            async with posted(server, {"messages": QUESTION}, COUNT_TOKENS, **headers) as response:
                assert response.status == 200
        # As Claude Code sends them if it has a key of its vendor and a token for a gateway.
        async with posted(server, ASKED, **{"x-api-key": "of the vendor", "Authorization": "Bearer first"}) as response:
            assert response.status == 200
        for wrong in ({}, {"x-api-key": ""}, {"x-api-key": "third"}, {"Authorization": "Bearer third"}):
            assert (await error_of(server, 401, ASKED, **wrong))["type"] == "authentication_error"
        async with posted(server, ASKED, "/v1/chat/completions", **{"x-api-key": "first"}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with client_of(server, key="second") as client:
            reply = await client.messages.create(model="bundled", max_tokens=100, messages=QUESTION)
        assert reply.content[0].type == "text"


async def test_the_user_id_is_the_tenant_where_there_are_no_keys() -> None:
    llm = make_served(WatchedLLM)
    async with serving(llm=llm) as server:
        await whole_of(server, metadata={"user_id": "session 1"})
        await whole_of(server)
    assert llm.tenants == ("session 1", "")


async def test_tools_of_unknown_types_are_left_out_with_a_warning(server: Server) -> None:
    bash = {"type": "bash_20250124", "name": "bash"}
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, bash, bash]
    async with posted(server, {**ASKED, "max_tokens": 100, "tools": tools}) as response:
        assert (await response.json())["content"] == [{"type": "text", "text": ANSWER, "citations": None}]
        assert response.headers["Warning"] == (
            '299 - "tools of type bash_20250124, web_search_20250305 are not supported here and were left out,'
            ' so the model has no tools"'
        )
    async with posted(server, {**ASKED, "tools": tools, "stream": True}) as response:
        assert "Warning" in response.headers
    async with posted(server, ASKED) as response:
        assert "Warning" not in response.headers


async def test_what_clients_send_with_every_request_is_taken(server: Server) -> None:
    fields: Any = {
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "max"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"},
        "tools": None,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    async with posted(server, {**ASKED, **fields}, f"{MESSAGES}?beta=true", **headers) as response:
        assert response.status == 200
    assert (await events_of(server, **fields))[-1].type == "message_stop"
