"""Each field of a chat: what it does, and that those which must not change an answer do not."""

from typing import Any

import pytest

from tests.api.conftest import MAX_SEQ_LEN, Server
from tests.api.contract import CHAT, check_chat, check_chat_chunk, chunks_of, counts, post, user

QUESTION = user("What is 17 + 25?")
GREEDY: dict[str, Any] = {"messages": QUESTION, "temperature": 0}

ACCEPTED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "safety_identifier": "c",
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "d",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prediction": {"type": "content", "content": "17 + 25 = 41."},
    "modalities": ["text"],
    "reasoning_effort": "none",
    "tool_choice": "auto",
}


# --- fields without an effect


async def test_accepted_fields_change_nothing(server: Server) -> None:
    plain = await post(server, CHAT, GREEDY)
    assert plain["choices"][0]["message"]["content"] == "17 + 25 = 42."
    for name, value in ACCEPTED.items():
        reply = await post(server, CHAT, {**GREEDY, name: value})
        assert (reply["choices"], counts(reply["usage"])) == (plain["choices"], counts(plain["usage"])), name
    everything = await post(server, CHAT, {**GREEDY, **ACCEPTED})
    assert everything["choices"] == plain["choices"]
    assert everything["id"] != plain["id"]


# --- shapes


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("has_usage", [False, True])
async def test_chunks_have_the_shape_and_the_order_of_the_specification(
    server: Server, n: int, has_usage: bool
) -> None:
    body = {**GREEDY, "n": n, "stream_options": {"include_usage": has_usage}}
    raw = await chunks_of(server, CHAT, body)
    chunks = [check_chat_chunk(chunk) for chunk in raw]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    if has_usage:
        usage = chunks.pop().usage
        assert raw[-1]["choices"] == []
        assert usage is not None
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    for index in range(n):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in own[1:])
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1].delta.content is None
        assert "".join(choice.delta.content or "" for choice in own) == "17 + 25 = 42."


# --- fields that work


async def test_both_names_of_the_limit_are_known(server: Server) -> None:
    for fields in ({"max_tokens": 4}, {"max_completion_tokens": 4}, {"max_tokens": 4, "max_completion_tokens": 4}):
        reply = check_chat(await post(server, CHAT, {**GREEDY, **fields}))
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("17 +", "length")
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 4


async def test_a_chat_without_a_limit_may_fill_its_slot(server: Server) -> None:
    reply = await post(server, CHAT, {**GREEDY, "ignore_eos": True})
    assert reply["usage"]["total_tokens"] == MAX_SEQ_LEN
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("=", "17 + 25 ", "="),
        (["never", " 2"], "17 +", " 2"),
        (["u", "v", "x", "y", "z", "25 = "], "17 + ", "25 = "),
        ("17", "", "17"),
        (["42.!"], "17 + 25 = 42.", None),
        ([], "17 + 25 = 42.", None),
    ],
)
async def test_stop_strings_end_the_answer_and_are_not_in_it(
    server: Server, stop: str | list[str], expected: str, reason: str | None
) -> None:
    body = {**GREEDY, "stop": stop}
    (choice,) = (await post(server, CHAT, body))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", reason)
    chunks = [chunk["choices"][0] for chunk in await chunks_of(server, CHAT, body)]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == expected
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", reason)


async def test_a_seed_repeats_an_answer_and_choices_differ(server: Server) -> None:
    body = {"messages": user("Tell me a story."), "temperature": 2.0, "max_tokens": 60, "n": 4}
    first, second = [await post(server, CHAT, {**body, "seed": 11}) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in first["choices"]}) == 4
    other = await post(server, CHAT, {**body, "seed": 12})
    assert other["choices"][0] != first["choices"][0]
