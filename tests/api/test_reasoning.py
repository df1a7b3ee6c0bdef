"""Thoughts over HTTP. The model is random; a script says what it wants to write, and the rest of the server is real."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from chairlift.api import ServerConfig
from chairlift.api.answers import ReasoningFamily, ToolFamily
from chairlift.errors import ConfigurationError
from tests.api.conftest import Server, SharedServer
from tests.api.contract import (
    CALL_EVENTS,
    CHAT,
    COMPLETED,
    MESSAGE_EVENTS,
    OPENING,
    RESPONSES,
    Events,
    body_of,
    client_of,
    error_of,
    post,
    serving,
    user,
    warning_of,
    whole_and_chunks,
)
from tests.support.scripted_model import ALWAYS, END_TOKEN, HYBRID, MISTRAL, install, make_thinking_checkpoint

THOUGHTS = "Hm, {let me see."
QUESTION: Any = user("What is 2 + 2?")
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
SCHEMA = {"properties": {"colour": {"enum": ["red"]}}, "required": ["colour"], "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "paint", "parameters": {"type": "object", **SCHEMA}}
PAINT = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
FORCED: dict[str, Any] = {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
REASONING_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
]

Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[dict[str, SharedServer]]:
    """By template and configuration."""
    servers: dict[str, SharedServer] = {}
    yield servers
    for each in servers.values():
        await each.close()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: dict[str, SharedServer]) -> Serve:
    """Lends a server whose model has this template, and wants to write that text."""
    script = install(monkeypatch)

    @asynccontextmanager
    async def lend(template: str, text: str, **config: Any) -> AsyncIterator[Server]:
        name = f"{template} {config}"
        if name not in servers:
            model = make_thinking_checkpoint(tmp_path, template)
            servers[name] = SharedServer(ServerConfig(**config), {"model": model})
        async with servers[name].lent() as server:
            script.token_ids = [*server.llm.inputs.tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
            yield server

    return lend


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    return await post(server, CHAT, {"messages": QUESTION, "temperature": 0, **fields})


async def message_of(server: Server, **fields: Any) -> dict[str, Any]:
    message: dict[str, Any] = (await ask(server, **fields))["choices"][0]["message"]
    return message


OPEN, CLOSED = HYBRID.replace("<|im_end|>", ""), {"chat_template_kwargs": {"enable_thinking": False}}
CONTINUED = {
    "messages": [*QUESTION, {"role": "assistant", "content": "<think>It is a sum"}],
    "continue_final_message": True,
}
THINKING = f"<think>{THOUGHTS}</think>Four."
ANSWERS: list[tuple[str, str, dict[str, Any], str, str, int]] = [
    (HYBRID, f"<think>\n{THOUGHTS}\n</think>\n\nFour.", {}, THOUGHTS, "Four.", 18),
    (ALWAYS, f"{THOUGHTS}\n</think>\n\nFour.", {}, THOUGHTS, "Four.", 17),
    (ALWAYS, THINKING, {}, THOUGHTS, "Four.", 17),  # what the template has begun, begun again
    (OPEN, ", so.</think>Four.", CONTINUED, ", so.", "Four.", 5),
    # A model that may think need not, and thoughts that the prompt has closed do not begin again.
    (HYBRID, "Four.", {}, "", "Four.", 0),
    (HYBRID, "<thin Four.", {}, "", "<thin Four.", 0),
    (HYBRID, "Four.", {"messages": user("What does <think>")}, "", "Four.", 0),
    (HYBRID, "<think>Four.", CLOSED, "", "<think>Four.", 0),
    (HYBRID, "<think>Four.", {"reasoning_effort": "none"}, "", "<think>Four.", 0),
    # Structure begins behind the thoughts, and at once if there are none.
    *(
        (template, text, fields, THOUGHTS, content, 16)
        for template, text in ((HYBRID, THINKING), (ALWAYS, f"{THOUGHTS}</think>Four."))
        for fields, content in (
            ({"response_format": FORM}, '{"a": 1}'),
            ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
            ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
        )
    ),
    (HYBRID, "<think>Four.", {**CLOSED, "response_format": FORM}, "", '{"a": 1}', 0),
    (HYBRID, "<think>Four.", {"reasoning_effort": "none", "response_format": FORM}, "", '{"a": 1}', 0),
    (HYBRID, '{"b": Four.', {"response_format": FORM}, "", '{"a": 1}', 0),
]


@pytest.mark.parametrize(("template", "text", "fields", "reasoning", "content", "num_thoughts"), ANSWERS)
async def test_thoughts_are_told_apart_under_both_names_and_counted(
    serve: Serve, template: str, text: str, fields: dict[str, Any], reasoning: str, content: str, num_thoughts: int
) -> None:
    async with serve(template, text) as server:
        body = {"messages": QUESTION, "temperature": 0, **fields}
        whole, chunks = await whole_and_chunks(server, CHAT, body)
    (choice,) = whole["choices"]
    thoughts = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None, **thoughts}
    assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thoughts
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    order = [name for delta in deltas for name in ("reasoning", "content") if delta.get(name)]
    assert order == sorted(order, reverse=True)


async def test_the_clients_own_stream_adds_up_to_the_whole_answer(serve: Serve) -> None:
    fields: Any = {"model": "bundled", "messages": QUESTION, "temperature": 0, "tools": [PAINT], "n": 2}
    async with serve(HYBRID, f"<think>\n{THOUGHTS}\n</think>\n\nFour.\n{CALL}") as server, client_of(server) as client:
        whole = await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
    for choice in (*whole.choices, *final.choices):
        assert choice.message.content == "Four."
        assert choice.message.to_dict()["reasoning"] == choice.message.to_dict()["reasoning_content"] == THOUGHTS
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("paint", '{"colour": "red"}')
    assert (len(whole.choices), len(final.choices)) == (2, 2)
    details = whole.usage and whole.usage.completion_tokens_details
    assert details
    assert details.reasoning_tokens == 2 * (len(THOUGHTS) + 2)


async def test_thoughts_are_scored_like_any_other_tokens(serve: Serve) -> None:
    async with serve(HYBRID, "<think>Hm.</think>Four.") as server:
        body = {"messages": QUESTION, "temperature": 0, "logprobs": True}
        whole, chunks = await whole_and_chunks(server, CHAT, body, is_alone=False)
    for choices in ([whole["choices"][0]], [chunk["choices"][0] for chunk in chunks]):
        told = [token["token"] for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
        assert told == ["<think>", *"Hm.", "</think>", *"Four.", "<|im_end|>"]
        assert len(told) == whole["usage"]["completion_tokens"]


async def test_a_structure_is_reached_though_the_model_would_end_while_it_thinks(serve: Serve) -> None:
    async with serve(ALWAYS, "Hm.<|im_end|></think>") as server:
        message = await message_of(server, response_format=FORM)
    assert message["content"] == '{"a": 1}'


LISTED = 'Well. [TOOL_CALLS]paint[ARGS]{"colour": "red"}'  # marks that are special tokens
CALLS: list[tuple[str, str, dict[str, Any], str | None, str | None]] = [
    (HYBRID, f"<think>I call <tool_call>.</think>\n\n{CALL}", FORCED, "I call <tool_call>.", None),
    (
        *(HYBRID, f"<think>I call <tool_call>.</think>\n\n{CALL}"),
        *({"tools": [PAINT], "parallel_tool_calls": False, "response_format": FORM}, "I call <tool_call>.", None),
    ),
    # A strict function's call is enforced behind thoughts and text.
    (
        HYBRID,
        "<think>Hm.</think>Well.\n<tool_call>oops",
        {"tools": [STRICT], "parallel_tool_calls": False},
        "Hm.",
        "Well.",
    ),
    (MISTRAL, LISTED, {"tools": [PAINT]}, None, "Well."),
    (MISTRAL, LISTED, FORCED, None, None),
]


@pytest.mark.parametrize(("template", "text", "fields", "reasoning", "content"), CALLS)
async def test_calls_come_behind_thoughts_and_text(
    serve: Serve, template: str, text: str, fields: dict[str, Any], reasoning: str | None, content: str | None
) -> None:
    async with serve(template, text) as server:
        (choice,) = (await ask(server, **fields))["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message.get("reasoning")) == ("tool_calls", content, reasoning)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "paint", "arguments": '{"colour": "red"}'}]


async def test_a_forced_call_begins_with_the_vocabularys_own_token(serve: Serve) -> None:
    async with serve(HYBRID, "Four.") as server:
        (choice,) = (await ask(server, **FORCED, reasoning_effort="none", return_token_ids=True))["choices"]
        token = server.llm.inputs.tokenizer.backend.token_to_id("<tool_call>")
    assert choice["token_ids"][0] == token
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "paint"


async def test_elements_are_read_by_the_types_of_the_functions(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "write", "parameters": {**schema, "required": ["text", "n"]}}}
    elements = "<parameter=text>\n12\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    call = f"<tool_call>\n<function=write>\n{elements}</function>\n</tool_call>"
    async with serve(HYBRID, call, tool_call_parser=ToolFamily.QWEN3_CODER) as server:
        messages = [await message_of(server, **{**fields, "tools": [tool]}) for fields in ({}, FORCED)]
    for message in messages:
        assert message["tool_calls"][0]["function"] == {"name": "write", "arguments": '{"text": "12", "n": 3}'}


async def test_thoughts_that_are_cut_off_are_all_there_is(serve: Serve) -> None:
    """By the limit, or by a stop string, which ends a text wherever it stands, as in vLLM."""
    async with serve(ALWAYS, f"{THOUGHTS}</think>Four.") as server:
        cut = await ask(server, max_tokens=5)
        stopped = await ask(server, stop="let")
    said = {"role": "assistant", "content": "", "refusal": None, "reasoning": "Hm, {", "reasoning_content": "Hm, {"}
    assert cut["choices"][0]["message"] == said
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    assert stopped["choices"][0]["message"]["reasoning"] == "Hm, {"
    assert (cut["choices"][0]["finish_reason"], stopped["choices"][0]["finish_reason"]) == ("length", "stop")


async def test_without_a_parser_thoughts_are_text(serve: Serve) -> None:
    async with serve(HYBRID, "<think>Hm.</think>Four.", reasoning_parser=ReasoningFamily.NONE) as server:
        reply = await ask(server)
    assert reply["choices"][0]["message"]["content"] == "<think>Hm.</think>Four."
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_effort_asked_of_a_model_without_thoughts_is_a_warning(serve: Serve) -> None:
    async with serve(HYBRID, "Four.", reasoning_parser=ReasoningFamily.NONE) as server:
        asked = (
            (CHAT, {"messages": QUESTION, "reasoning_effort": "max", "verbosity": "high", "stream": True}),
            ("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}),
            (CHAT, {"messages": QUESTION, "reasoning_effort": "none", "verbosity": "medium"}),
        )
        chat, response, idle = [await warning_of(server, path, body) for path, body in asked]
    no_thoughts = "was left out: this model does not write its thoughts apart from its answer"
    verbosity = "verbosity was left out: ask for it in a message"
    assert chat == f'299 - "{verbosity}", 299 - "reasoning_effort {no_thoughts}"'
    assert response == f'299 - "text.{verbosity}", 299 - "reasoning.effort {no_thoughts}"'
    assert idle is None


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


async def test_a_response_has_its_reasoning_in_an_item_of_its_own(serve: Serve) -> None:
    async with serve(HYBRID, f"<think>\n{THOUGHTS}\n</think>\n\nFour.\n{CALL}") as server, client_of(server) as client:
        tools: Any = [{"type": "function", **FUNCTION}]
        fields: Any = {"model": "bundled", "input": QUESTION, "temperature": 0, "tools": tools}
        whole = await client.responses.create(**fields)
        async with client.responses.with_streaming_response.create(**fields, stream=True) as response:
            events = Events.of((await response.read()).decode())
        dumped: list[Any] = [item.model_dump() for item in whole.output]
        done = {"type": "function_call_output", "call_id": dumped[-1]["call_id"], "output": "done"}
        sent_back: Any = [*QUESTION, *dumped, done]
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
    sent = [*QUESTION, *[json.loads(item.to_json()) for item in whole.output]]
    body = body_of(RESPONSES).model_validate({"input": sent})
    assert rendered in server.llm.inputs.tokenizer.render_chat(body.template_messages(), body.chat_options())


async def test_reasoning_that_is_cut_off_is_an_incomplete_item(serve: Serve) -> None:
    async with serve(ALWAYS, f"{THOUGHTS}</think>Four.") as server, client_of(server) as client:
        reply = await client.responses.create(model="bundled", input=QUESTION, temperature=0, max_output_tokens=5)
    assert (reply.status, [item.type for item in reply.output]) == ("incomplete", ["reasoning"])
    assert reply.output[0].model_dump()["status"] == "incomplete"
