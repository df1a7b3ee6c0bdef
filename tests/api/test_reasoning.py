"""Thoughts over HTTP. The model is random; a script says what it wants to write, and the rest of the server is real."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from chairlift.api import ServerConfig
from chairlift.api.tools import ReasoningFamily, ToolFamily
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.errors import ConfigurationError
from tests.api.conftest import Server, SharedServer
from tests.api.contract import CHAT, chunks_of, client_of, error_of, post, serving, user
from tests.api.response_events import CALL_EVENTS, COMPLETED, MESSAGE_EVENTS, OPENING, Events
from tests.support.scripted_model import ALWAYS, END_TOKEN, HYBRID, MISTRAL, Script, install, make_thinking_checkpoint

THOUGHTS = "Hm, {let me see."
QUESTION: Any = user("What is 2 + 2?")
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
PAINT = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
REASONING_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
]

Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return install(monkeypatch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[dict[str, SharedServer]]:
    """By template and configuration."""
    servers: dict[str, SharedServer] = {}
    yield servers
    for each in servers.values():
        await each.close()


@pytest.fixture
def serve(tmp_path: Path, script: Script, servers: dict[str, SharedServer]) -> Serve:
    """Lends a server whose model has this template, and wants to write that text."""

    @asynccontextmanager
    async def lend(template: str, text: str, **config: Any) -> AsyncIterator[Server]:
        name = f"{template} {config}"
        if name not in servers:
            servers[name] = SharedServer(
                ServerConfig(**config), {"model": make_thinking_checkpoint(tmp_path, template)}
            )
        async with servers[name].lent() as server:
            script.token_ids = [*server.llm.inputs.tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
            yield server

    return lend


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    return await post(server, CHAT, {"messages": QUESTION, "temperature": 0, **fields})


async def message_of(server: Server, **fields: Any) -> dict[str, Any]:
    message: dict[str, Any] = (await ask(server, **fields))["choices"][0]["message"]
    return message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HYBRID, f"<think>\n{THOUGHTS}\n</think>\n\nFour."),
        (ALWAYS, f"{THOUGHTS}\n</think>\n\nFour."),
        (ALWAYS, f"<think>{THOUGHTS}</think>Four."),  # what the template has begun, begun again
    ],
)
async def test_thoughts_are_told_apart_under_both_names_and_counted(serve: Serve, template: str, text: str) -> None:
    async with serve(template, text) as server:
        reply = await ask(server)
        chunks = await chunks_of(server, CHAT, {"messages": QUESTION, "temperature": 0})
    choice, usage = reply["choices"][0], reply["usage"]
    assert choice["message"]["content"] == "Four."
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == THOUGHTS
    assert choice["finish_reason"] == "stop"
    tail = "</think>\n\nFour." if "\n\nFour" in text else "</think>Four."
    num_in_prompt_or_marks = 1 if text.startswith("<think>") and template is HYBRID else 0
    num_after = len(tail) - len("</think>") + 1 + 1  # a token per byte, one for the mark, and the end token
    num_thoughts = usage["completion_tokens"] - num_after - num_in_prompt_or_marks
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_thoughts
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == choice["message"][name]
    order = [name for delta in deltas for name in ("reasoning", "content") if delta.get(name)]
    assert order == sorted(order, reverse=True)


async def test_the_clients_own_stream_adds_up_to_the_whole_answer(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
    fields: Any = {"model": "bundled", "messages": QUESTION, "temperature": 0, "tools": [PAINT], "n": 2}
    async with serve(HYBRID, f"<think>\n{THOUGHTS}\n</think>\n\nFour.\n{call}") as server, client_of(server) as client:
        whole = await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
    for choice, streamed in zip(whole.choices, final.choices, strict=True):
        assert streamed.message.content == choice.message.content == "Four."
        for name in ("reasoning", "reasoning_content"):
            assert getattr(streamed.message, name) == getattr(choice.message, name) == THOUGHTS
        ((made,), (same,)) = (streamed.message.tool_calls or [], choice.message.tool_calls or [])
        assert same.type == "function"
        assert (made.function.name, made.function.arguments) == (same.function.name, same.function.arguments)
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * (len(THOUGHTS) + 2)


async def test_thoughts_are_scored_like_any_other_tokens(serve: Serve) -> None:
    async with serve(HYBRID, "<think>Hm.</think>Four.") as server:
        reply = await ask(server, logprobs=True)
        chunks = await chunks_of(server, CHAT, {"messages": QUESTION, "temperature": 0, "logprobs": True})
    whole = reply["choices"][0]["logprobs"]["content"]
    streamed = [each["choices"][0]["logprobs"] for each in chunks]
    assert len(whole) == reply["usage"]["completion_tokens"]
    assert [token["token"] for each in streamed if each for token in each["content"]] == [
        *("<think>", *"Hm.", "</think>", *"Four.", "<|im_end|>")
    ]
    assert [token["token"] for token in whole] == [
        token["token"] for each in streamed if each for token in each["content"]
    ]


@pytest.mark.parametrize("text", ["Four.", "<thin Four."])
async def test_a_model_that_may_think_need_not(serve: Serve, text: str) -> None:
    async with serve(HYBRID, text) as server:
        reply = await ask(server)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_thoughts_that_the_prompt_has_closed_do_not_begin_again(serve: Serve, fields: dict[str, Any]) -> None:
    async with serve(HYBRID, "<think>Four.") as server:
        message = await message_of(server, **fields)
        formed = await message_of(server, **fields, response_format=FORM)
    assert message == {"role": "assistant", "content": "<think>Four.", "refusal": None}
    assert formed["content"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HYBRID, f"<think>{THOUGHTS}</think>Four."),
        (ALWAYS, f"{THOUGHTS}</think>Four."),
    ],
)
async def test_structure_begins_behind_the_thoughts(serve: Serve, template: str, text: str) -> None:
    async with serve(template, text) as server:
        formed = await message_of(server, response_format=FORM)
        chosen = await message_of(server, structured_outputs={"choice": ["yes", "no"]})
        lark = await message_of(server, structured_outputs={"grammar": 'start: "x" "y"'})
    assert (formed["content"], lark["content"]) == ('{"a": 1}', "xy")
    assert chosen["content"] in ("yes", "no")
    for message in (formed, chosen, lark):
        assert message["reasoning"] == THOUGHTS


async def test_structure_begins_at_once_if_the_model_does_not_think(serve: Serve) -> None:
    async with serve(HYBRID, '{"b": Four.') as server:
        message = await message_of(server, response_format=FORM)
    assert message == {"role": "assistant", "content": '{"a": 1}', "refusal": None}


async def test_a_structure_is_reached_though_the_model_would_end_while_it_thinks(serve: Serve, script: Script) -> None:
    async with serve(ALWAYS, "Hm.") as server:
        script.token_ids = [*script.token_ids, *server.llm.inputs.tokenizer.encode("</think>")]
        message = await message_of(server, response_format=FORM)
    assert message["content"] == '{"a": 1}'


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": FORM}])
async def test_calls_come_behind_the_thoughts(serve: Serve, fields: dict[str, Any]) -> None:
    call = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
    async with serve(HYBRID, f"<think>I call <tool_call>.</think>\n\n{call}") as server:
        reply = await ask(server, tools=[PAINT], parallel_tool_calls=False, **fields)
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["reasoning"] == "I call <tool_call>."
    assert [each["function"] for each in choice["message"]["tool_calls"]] == [
        {"name": "paint", "arguments": '{"colour": "red"}'}
    ]


async def test_a_forced_call_begins_with_the_vocabularys_own_token(serve: Serve) -> None:
    async with serve(HYBRID, "Four.") as server:
        forced: Any = {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
        reply = await ask(server, **forced, reasoning_effort="none", return_token_ids=True)
        token = server.llm.inputs.tokenizer.backend.token_to_id("<tool_call>")
    assert reply["choices"][0]["token_ids"][0] == token
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "paint"


async def test_a_strict_functions_call_is_enforced_behind_thoughts_and_text(serve: Serve) -> None:
    strict = {"type": "function", "function": {**PAINT["function"], "strict": True}}  # type: ignore[dict-item]
    async with serve(HYBRID, "<think>Hm.</think>Well.\n<tool_call>oops") as server:
        message = await message_of(server, tools=[strict], parallel_tool_calls=False)
    assert (message["reasoning"], message["content"]) == ("Hm.", "Well.")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"colour": "red"}']


async def test_marks_that_are_special_tokens_are_seen(serve: Serve) -> None:
    async with serve(MISTRAL, 'Well. [TOOL_CALLS]paint[ARGS]{"colour": "red"}') as server:
        message = await message_of(server, tools=[PAINT])
        forced = await message_of(server, tools=[PAINT], tool_choice="required", parallel_tool_calls=False)
    assert (message["content"], forced["content"]) == ("Well.", None)
    for each in (message, forced):
        assert each["tool_calls"][0]["function"] == {"name": "paint", "arguments": '{"colour": "red"}'}


async def test_elements_are_read_by_the_types_of_the_functions(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "write", "parameters": {**schema, "required": ["text", "n"]}}}
    elements = "<parameter=text>\n12\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    call = f"<tool_call>\n<function=write>\n{elements}</function>\n</tool_call>"
    async with serve(HYBRID, call, tool_call_parser=ToolFamily.QWEN3_CODER) as server:
        free = await message_of(server, tools=[tool])
        forced = await message_of(server, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    for message in (free, forced):
        assert message["tool_calls"][0]["function"] == {"name": "write", "arguments": '{"text": "12", "n": 3}'}


async def test_thoughts_that_are_cut_off_are_all_there_is(serve: Serve) -> None:
    """By the limit, or by a stop string, which ends a text wherever it stands, as in vLLM."""
    async with serve(ALWAYS, f"{THOUGHTS}</think>Four.") as server:
        cut = await ask(server, max_tokens=5)
        stopped = await ask(server, stop="let")
    assert cut["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning": "Hm, {",
        "reasoning_content": "Hm, {",
    }
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    assert stopped["choices"][0]["message"]["reasoning"] == "Hm, {"
    assert (cut["choices"][0]["finish_reason"], stopped["choices"][0]["finish_reason"]) == ("length", "stop")


async def test_without_a_parser_thoughts_are_text(serve: Serve) -> None:
    async with serve(HYBRID, "<think>Hm.</think>Four.", reasoning_parser=ReasoningFamily.NONE) as server:
        reply = await ask(server)
        error = await error_of(server, CHAT, {"messages": QUESTION, "reasoning_effort": "low"})
    assert reply["choices"][0]["message"]["content"] == "<think>Hm.</think>Four."
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert error["message"].startswith('reasoning_effort: only "none" is supported: ')


async def test_a_model_that_always_thinks_cannot_be_told_not_to(serve: Serve) -> None:
    async with serve(ALWAYS, "Hm.</think>Four.") as server:
        error = await error_of(server, CHAT, {"messages": QUESTION, "reasoning_effort": "none"})
        other = await error_of(server, "/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}})
        message = await message_of(server, reasoning_effort="low")
    assert (error["param"], other["param"]) == ("reasoning_effort", "reasoning.effort")
    assert error["message"].endswith("this model's chat template cannot keep it from thinking")
    assert message["content"] == "Four."


async def test_marks_that_are_no_tokens_of_the_model_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="reasoning_parser think cannot be used: <think> and </think> are no"):
        async with serving(ServerConfig(reasoning_parser=ReasoningFamily.THINK)):
            raise AssertionError("it started")


async def test_a_message_that_is_continued_goes_on_in_its_thoughts(serve: Serve) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "<think>It is a sum"}]
    async with serve(HYBRID.replace("<|im_end|>", ""), ", so.</think>Four.") as server:
        message = await message_of(server, messages=turns, continue_final_message=True)
    assert (message["reasoning"], message["content"]) == (", so.", "Four.")


async def test_a_mark_in_what_a_user_says_begins_nothing(serve: Serve) -> None:
    async with serve(HYBRID, "Four.") as server:
        message = await message_of(server, messages=user("What does <think>"))
    assert message["content"] == "Four."


# --- responses


async def test_a_response_has_its_reasoning_in_an_item_of_its_own(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
    async with serve(HYBRID, f"<think>\n{THOUGHTS}\n</think>\n\nFour.\n{call}") as server, client_of(server) as client:
        tools: Any = [{"type": "function", **PAINT["function"]}]  # type: ignore[dict-item]
        fields: Any = {"model": "bundled", "input": QUESTION, "temperature": 0, "tools": tools}
        whole = await client.responses.create(**fields)
        events = await _events_of(client, **fields)
        sent_back: Any = [*QUESTION, *[item.model_dump() for item in whole.output], _output_of(whole.output[-1])]
        again = await client.responses.create(model="bundled", input=sent_back, tools=tools, max_output_tokens=1)
    assert events.types == [*OPENING, *REASONING_EVENTS, *MESSAGE_EVENTS, *CALL_EVENTS, COMPLETED]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len(THOUGHTS) + 2
    reasoning = whole.output[0].model_dump(exclude={"id"}, exclude_none=True)
    part = {"type": "reasoning_text", "text": THOUGHTS}
    assert reasoning == {"type": "reasoning", "summary": [], "content": [part], "status": "completed"}
    assert events.last_response["output"][0] == {**reasoning, "id": events.last_response["output"][0]["id"]}
    assert events.joined("response.reasoning_text.delta") == THOUGHTS
    assert events.of_type("response.reasoning_text.done")[0]["text"] == THOUGHTS
    assert events.of_type("response.content_part.done")[0]["part"] == part
    assert again.usage is not None
    rendered = f"<|user|>{QUESTION[0]['content']}<|im_end|><|assistant|><think>{THOUGHTS}</think>Four."
    body = ResponsesRequest.model_validate(
        {"input": [*QUESTION, *[json.loads(item.to_json()) for item in whole.output]]}
    )
    assert rendered in server.llm.inputs.tokenizer.render_chat(body.template_messages(), body.chat_options())


async def _events_of(client: AsyncOpenAI, **fields: Any) -> Events:
    async with client.responses.with_streaming_response.create(**fields, stream=True) as response:
        return Events.of((await response.read()).decode())


def _output_of(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "done"}


async def test_reasoning_that_is_cut_off_is_an_incomplete_item(serve: Serve) -> None:
    async with serve(ALWAYS, f"{THOUGHTS}</think>Four.") as server, client_of(server) as client:
        reply = await client.responses.create(model="bundled", input=QUESTION, temperature=0, max_output_tokens=5)
    assert (reply.status, [item.type for item in reply.output]) == ("incomplete", ["reasoning"])
    assert reply.output[0].model_dump()["status"] == "incomplete"
