"""Each field of a chat, and every way of writing messages: what it does, and that no other changes an answer."""

from typing import Any

import pytest
from openai import AsyncOpenAI

from chairlift.api.wire.completions import ChatCompletionRequest
from tests.api.conftest import MAX_SEQ_LEN, Server
from tests.api.contract import CHAT, check_chat, check_chat_chunk, chunks_of, counts, error_of, post, user

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


async def content(server: Server, **fields: Any) -> str:
    reply = check_chat(await post(server, CHAT, {**GREEDY, **fields}))
    return reply.choices[0].message.content or ""


async def test_every_way_of_writing_a_message_counts_the_same(server: Server) -> None:
    plain = await post(server, CHAT, GREEDY)
    for parts in (
        [{"type": "text", "text": "What is 17 + 25?"}],
        [{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}],
    ):
        reply = await post(server, CHAT, {**GREEDY, "messages": [{"role": "user", "content": parts, "name": None}]})
        assert (reply["choices"], counts(reply["usage"])) == (plain["choices"], counts(plain["usage"]))
    system, developer = [
        await post(server, CHAT, {**GREEDY, "messages": [{"role": role, "content": "Be kind."}, *QUESTION]})
        for role in ("system", "developer")
    ]
    assert system["choices"] == developer["choices"]
    assert system["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len("Be kind.") + 2


async def test_a_reply_can_be_sent_back_as_the_client_holds_it(client: AsyncOpenAI) -> None:
    first = await client.chat.completions.create(
        model="bundled", messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0
    )
    message = first.choices[0].message
    for sent in (message, message.model_dump(), message.to_dict()):
        again: Any = [*QUESTION, sent, *user("What is 1 + 1?")]
        reply = await client.chat.completions.create(model="bundled", messages=again, temperature=0)
        assert reply.choices[0].finish_reason == "stop"


# What the replies of other servers, and the clients that hold them, have besides what was said.
ADDED: dict[str, Any] = {
    "provider_specific_fields": {"refusal": None, "stop_sequence": "x"},
    "reasoning_content": "It is a sum.",
    "reasoning": None,
    "reasoning_details": [{"type": "reasoning.text", "text": "It is a sum."}],
    "thinking_blocks": [{"type": "thinking", "thinking": "It is a sum.", "signature": "s"}],
    "function_call": None,
    "annotations": [],
    "images": [],
    "audio": None,
    "refusal": None,
    "id": "chatcmpl-1",
    "whatever_comes_next": {"a": [1]},
}


async def test_what_other_servers_add_to_an_assistants_message_changes_nothing(server: Server) -> None:
    function: dict[str, Any] = {"name": "add", "arguments": '{"a": 17, "b": 25}'}
    call = {"id": "a", "type": "function", "function": function}
    extended = {**call, "index": 0, "extra_content": {"google": 1}, "function": {**function, "parsed": {}}}
    result = {"role": "tool", "tool_call_id": "a", "content": "42"}
    part = {"type": "text", "text": "Wait."}
    plain = [*QUESTION, {"role": "assistant", "content": [part], "tool_calls": [call]}, result]
    said = {"role": "assistant", "content": [{**part, "annotations": []}], "tool_calls": [extended], **ADDED}
    expected = await post(server, CHAT, {**GREEDY, "messages": plain})
    reply = await post(server, CHAT, {**GREEDY, "messages": [*QUESTION, said, result]})
    assert (reply["choices"], counts(reply["usage"])) == (expected["choices"], counts(expected["usage"]))
    for speaker in ({"role": "user"}, {"role": "system"}, {"role": "tool", "tool_call_id": "a"}):
        message = {"content": "a", "reasoning_details": [], **speaker}
        error = await error_of(server, CHAT, {**GREEDY, "messages": [*plain, message]})
        assert error["message"] == "unknown or unsupported field: messages.3.reasoning_details"


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}, {"content": [], "tool_calls": []}])
async def test_an_assistant_that_said_nothing_has_an_empty_turn(server: Server, said: dict[str, Any]) -> None:
    messages = [*QUESTION, {"role": "assistant", **said}, *user("Well?")]
    tokens = (await post(server, "/tokenize", {"messages": messages}))["tokens"]
    empty = [{"role": "assistant", "content": ""}]
    assert tokens == (await post(server, "/tokenize", {"messages": [*QUESTION, *empty, *user("Well?")]}))["tokens"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_what_an_assistant_thought_is_there_for_templates_that_show_it(name: str) -> None:
    said = {"role": "assistant", "content": "42", name: "It is a sum."}
    body = ChatCompletionRequest.model_validate({"messages": [*QUESTION, said]})
    assert body.template_messages()[1] == {"role": "assistant", "content": "42", "reasoning_content": "It is a sum."}


async def test_hints_about_caching_change_nothing(server: Server) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?", **hint}], **hint}
    assert await content(server, messages=[message]) == "17 + 25 = 42."


async def test_the_last_message_can_be_continued(server: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "17 + 25 = 4"}]
    assert await content(server, messages=messages, continue_final_message=True) == "2."
    assert await content(server, messages=messages, continue_final_message=True, add_generation_prompt=False) == "2."
    error = await error_of(server, CHAT, {**GREEDY, "continue_final_message": True, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


async def test_the_beginning_of_an_assistants_turn_can_be_left_out(server: Server) -> None:
    with_it = await post(server, "/tokenize", {"messages": QUESTION})
    explicit = await post(server, "/tokenize", {"messages": QUESTION, "add_generation_prompt": True})
    without = await post(server, "/tokenize", {"messages": QUESTION, "add_generation_prompt": False})
    assert with_it == explicit
    assert with_it["tokens"] == [*without["tokens"], 260]
    reply = await post(server, CHAT, {**GREEDY, "add_generation_prompt": False, "max_tokens": 1})
    assert reply["usage"]["prompt_tokens"] == without["count"]


async def test_template_variables_are_passed_on_but_not_over_the_servers_own(server: Server) -> None:
    assert await content(server, chat_template_kwargs={"mood": "good"}) == "17 + 25 = 42."
    error = await error_of(server, CHAT, {**GREEDY, "chat_template_kwargs": {"tools": []}})
    assert (error["param"], "must not set tools" in error["message"]) == ("chat_template_kwargs", True)
