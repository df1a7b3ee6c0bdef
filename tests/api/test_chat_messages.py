"""Messages: every way of writing them, and how they become a prompt."""

from typing import Any

import pytest
from openai import AsyncOpenAI

from chairlift.api.wire.completions import ChatCompletionRequest
from tests.api.conftest import Server
from tests.api.contract import CHAT, check_chat, counts, error_of, post, user

QUESTION = user("What is 17 + 25?")
GREEDY: dict[str, Any] = {"messages": QUESTION, "temperature": 0}


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
