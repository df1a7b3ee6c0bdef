"""Tests what `/v1/responses` makes of a body: the messages that its items become, and what is refused, and by which
name.
"""

from typing import Any, get_type_hints

import pytest
from openai.types.responses import response_create_params
from pydantic import ValidationError

from chairlift.api.description import fields_of
from chairlift.api.errors import error_reply
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.wire.extras import EngineExtras
from chairlift.errors import InvalidRequest
from chairlift.params import SamplingParams, StructuredOutputs
from tests.api.contract import CHAT, COMPLETIONS, body_of

CALL_A = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
CALL_B = {"type": "function_call", "call_id": "b", "name": "g", "arguments": ""}
OUTPUT_A = {"type": "function_call_output", "call_id": "a", "output": "one"}
PARTS = [{"type": "input_text", "text": "t"}, {"type": "input_text", "text": "wo"}]
OUTPUT_B = {"type": "function_call_output", "call_id": "b", "output": PARTS}
USER, USER_TEXT = {"role": "user", "content": "u"}, {"type": "input_text", "text": "b"}
MESSAGE_A = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MESSAGE_B = {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}}
TOOL = {"type": "function", "name": "f"}


def parse(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields})


def complaint(**fields: Any) -> tuple[str | None, str]:
    """The field that a client is told of, and the message."""
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        parse(**fields).template_messages()
    failure = error_reply(caught.value)
    assert failure.status == 400
    return failure.detail.param, failure.detail.message


ADDED = {"id": "x", "status": "completed", "phase": "final_answer", "created_by": "them", "agent": {"name": "a"}}
THOUGHT: dict[str, Any] = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "abc", "status": None}
SHOWN = {**THOUGHT, "content": [{"type": "reasoning_text", "text": "Let me see."}]}
TEXT: dict[str, Any] = {"type": "output_text", "text": "t", "annotations": [], "logprobs": None, "parsed": {"a": 1}}
SAID = {"type": "message", "role": "assistant", "content": [TEXT], **ADDED}
REFUSED = {"id": "msg_1", "status": "completed", "content": [TEXT, {"type": "refusal", "refusal": "f"}]}
TOLD_A = {"role": "tool", "content": "one", "tool_call_id": "a"}
TOLD_B = {"role": "tool", "content": "two", "tool_call_id": "b"}
MESSAGES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "a string is what the user says": ("u", [USER]),
    "messages come in both forms and with all roles": (
        [
            {"role": "system", "content": "a"},
            {"role": "developer", "content": [USER_TEXT]},
            {"type": "message", "role": "user", "content": PARTS},
            {"type": "message", "role": "assistant", **REFUSED},
            {"role": "user", "content": ""},
        ],
        [
            {"role": "system", "content": "a"},
            {"role": "system", "content": "b"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "tf"},
            {"role": "user", "content": ""},
        ],
    ),
    "calls in a row are one message": (
        [USER, CALL_A, CALL_B, OUTPUT_A, OUTPUT_B],
        [USER, {"role": "assistant", "content": "", "tool_calls": [MESSAGE_A, MESSAGE_B]}, TOLD_A, TOLD_B],
    ),
    "calls join the text before them and an output parts them": (
        [{"role": "assistant", "content": "t"}, CALL_A, OUTPUT_A, CALL_B, OUTPUT_B],
        [
            *({"role": "assistant", "content": "t", "tool_calls": [MESSAGE_A]}, TOLD_A),
            *({"role": "assistant", "content": "", "tool_calls": [MESSAGE_B]}, TOLD_B),
        ],
    ),
    "items that other servers' models wrote come back with what those added to them": (
        [THOUGHT, SAID, SHOWN, {**CALL_A, **ADDED}, OUTPUT_A, USER],
        [
            {"role": "assistant", "content": "t", "reasoning_content": "Let me see.", "tool_calls": [MESSAGE_A]},
            *(TOLD_A, USER),
        ],
    ),
}


@pytest.mark.parametrize("rule", MESSAGES)
def test_items_become_the_messages_of_a_chat(rule: str) -> None:
    items, expected = MESSAGES[rule]
    assert parse(input=items).template_messages() == expected
    instructions = {"role": "system", "content": "Be brief."}
    assert parse(input=items, instructions="Be brief.").template_messages() == [instructions, *expected]


@pytest.mark.parametrize(
    ("bad_input", "message"),
    [
        (3, "input: Input should be a valid string or a list"),
        ([3], "input.0: Input should be an object"),
        ([{"type": "item_reference", "id": "msg_1"}], "input.0: type 'item_reference' is not supported"),
        ([{"type": "web_search_call", "id": "w"}], "input.0: type 'web_search_call' is not supported"),
        ([{"id": "msg_1"}], "input.0: type None is not supported"),
        ([{"role": "user"}], "input.0.content: Field required"),
        ([{"role": "tool", "content": "a"}], "input.0.role: Input should be 'user'"),
        ([{"role": "user", "content": "a", "foo": 1}], "unknown or unsupported field: input.0.foo"),
        ([{**OUTPUT_A, "str": 1}], "unknown or unsupported field: input.0.str"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input.0.content.0: type 'input_image' is not"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text: Field required"),
        ([{"role": "user", "content": ["a"]}], "input.0.content.0: Input should be an object"),
        ([{**CALL_A, "namespace": "n"}], "input.0.namespace is not supported"),
        ([{**CALL_A, "async": True}], "input.0.async: only false is supported"),
        ([CALL_A, {**OUTPUT_A, "output": [{"type": "output_text"}]}], "input.1.output.0: type 'output_text' is not"),
    ],
)
def test_an_item_that_is_not_understood_is_named(bad_input: Any, message: str) -> None:
    param, said = complaint(input=bad_input)
    assert said.startswith(message)
    assert param is not None
    assert param.split(".")[0] == "input"


def test_sampling_settings_go_over_the_models_defaults() -> None:
    defaults = SamplingParams(temperature=0.3, top_k=5, max_tokens=None)
    assert parse().params(defaults) == defaults
    given = parse(temperature=1, top_p=0.5, max_output_tokens=7, include=["message.output_text.logprobs"])
    params = given.params(defaults)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.logprobs) == (1.0, 0.5, 5, 7, 0)


NULL_SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "null"}, "strict": True, "description": "d"}


@pytest.mark.parametrize(
    ("fields", "field", "structure"),
    [
        ({"text": {"format": {"type": "text"}}}, None, None),
        ({"text": {"format": {"type": "json_object"}}}, "text", StructuredOutputs(json_object=True)),
        ({"text": {"format": NULL_SCHEMA}}, "text", StructuredOutputs(json={"type": "null"})),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", StructuredOutputs(regex="a")),
    ],
)
def test_text_format_or_our_own_field_is_the_wanted_structure(
    fields: dict[str, Any], field: str | None, structure: StructuredOutputs | None
) -> None:
    wanted = parse(**fields).wanted_structure()
    assert (wanted and wanted.field, wanted and wanted.outputs) == (field, structure)
    if field == "text":
        with pytest.raises(InvalidRequest, match="give only one of text and structured_outputs"):
            parse(**fields, structured_outputs={"regex": "a"}).wanted_structure()


def test_tools_are_shown_to_the_template_in_a_chats_shape() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    body = parse(tools=[{"type": "function", **function, "defer_loading": False}])
    assert body.chat_options().tools == [{"type": "function", "function": function}]
    assert parse(tools=[TOOL], tool_choice="none").chat_options().tools == []


@pytest.mark.parametrize(
    ("tool_choice", "names", "is_forced"),
    [
        (None, ["f", "g"], False),
        ("auto", ["f", "g"], False),
        ("none", [], False),
        ("required", ["f", "g"], True),
        ({"type": "function", "name": "g"}, ["g"], True),
    ],
)
def test_tool_choice_says_what_may_and_must_be_called(tool_choice: Any, names: list[str], is_forced: bool) -> None:
    body = parse(tools=[TOOL, {"type": "function", "name": "g"}], tool_choice=tool_choice)
    assert [function.name for function in body.functions_to_call()] == names
    assert (body.call_mode == "required") is is_forced


def test_every_field_that_the_client_can_send_is_known() -> None:
    """Fields of the installed client, so that one that a newer client sends shows up as a failure."""
    streaming = get_type_hints(response_create_params.ResponseCreateParamsStreaming)
    sent = {*streaming, *get_type_hints(response_create_params.ResponseCreateParamsNonStreaming)}
    ours = {"priority", "cache_salt", "timeout", "structured_outputs", "speculation"}
    ours |= {"chat_template_kwargs", "parse_special_tokens", *EngineExtras.model_fields}
    codex = {"client_metadata"}
    sampling = set(SamplingParams.model_fields) - {"n", "max_tokens", "logprobs", "prompt_logprobs"}
    assert sent | ours | codex | sampling == {row.name for row in fields_of(ResponsesRequest)}


ACCEPTED: list[dict[str, Any]] = [
    # Agents send these whatever the model.
    {"reasoning": {"effort": None, "summary": "auto", "generate_summary": None}, "tool_choice": "auto", "tools": []},
    {"include": ["reasoning.encrypted_content"], "parallel_tool_calls": False, "store": False, "stream": True},
    {"text": None},
    {"reasoning": {"effort": "none", "context": "auto"}, "text": {"format": None, "verbosity": None}},
    # Defaults may be written out.
    {"background": False, "truncation": "disabled", "text": {"verbosity": "medium"}, "top_logprobs": 0, "store": True},
    {"prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False}, "tool_choice": "none"},
    {"reasoning": {"mode": "standard"}, "context_management": [], "truncation": "auto"},
    # Built-in tools have nothing to limit or to tell.
    {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"], "max_tool_calls": 3},
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    body = parse(**fields)
    assert body.template_messages() == [{"role": "user", "content": "hi"}]
    assert not body.has_logprobs
    assert body.warnings == []


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"text": {"verbosity": "low"}}, "text.verbosity was left out: ask for it in a message"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode was left out: there is one mode"),
    (
        {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
        "context_management was left out: nothing is compacted; leave out of input what the model may forget",
    ),
]


@pytest.mark.parametrize(("fields", "warning"), LEFT_OUT)
def test_what_cannot_be_honoured_but_does_no_harm_is_left_out(fields: dict[str, Any], warning: str) -> None:
    assert parse(**fields).warnings == [warning]


def test_a_response_is_sampled_with_the_same_fields_as_a_chat_or_a_completion() -> None:
    repetition = {"max_pattern_size": 4, "min_count": 3}
    fields: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["a", "b"], "repetition_penalty": 1.1}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"65": 1.5}, "stop_token_ids": [1]}
    fields |= {"min_tokens": 2, "ignore_eos": True, "bad_words": ["c"], "allowed_token_ids": [1, 2]}
    fields |= {"truncate_prompt_tokens": 9, "repetition_detection": repetition}
    as_sent = {**fields, "repetition_detection": {**repetition, "min_pattern_size": None}}
    chat = body_of(CHAT).model_validate({"messages": [{"role": "user", "content": "a"}], **as_sent})
    completion = body_of(COMPLETIONS).model_validate({"prompt": "a", **as_sent})
    for body in (parse(**as_sent), chat, completion):
        assert body.params(SamplingParams()) == SamplingParams(**fields)


CHOSEN = {"type": "function", "name": "z"}
CALLER = {**TOOL, "allowed_callers": ["programmatic"]}
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("foo", {"foo": 1}, "unknown or unsupported field: foo"),
    ("max_tokens", {"max_tokens": 1}, "unknown or unsupported field"),
    ("background", {"background": True}, "background: only false is supported: "),
    ("truncation", {"truncation": "middle"}, "truncation: Input should be 'auto' or 'disabled'"),
    ("text", {"text": {"verbosity": "curt"}}, "Input should be 'low', 'medium' or 'high'"),
    ("prompt_cache_options.prewarm", {"prompt_cache_options": {"prewarm": True}}, "every request is"),
    ("include", {"include": ["message.audio"]}, "'message.audio' is not supported"),
    ("reasoning", {"reasoning": {"effort": "little"}}, "Input should be 'none', 'minimal', 'low'"),
    ("top_logprobs", {"top_logprobs": 1}, "only allowed with include"),
    ("top_logprobs", {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "equal to 20"),
    ("max_output_tokens", {"max_output_tokens": 0}, "greater than or equal to 1"),
    ("stream_options", {"stream_options": {}}, "only allowed with stream: true"),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": True}}, ""),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
    ("tools.0.allowed_callers", {"tools": [CALLER]}, 'only ["direct"] is'),
    ("tools.0.defer_loading", {"tools": [{**TOOL, "defer_loading": True}]}, "only false is supported"),
    ("tools.0.output_schema", {"tools": [{**TOOL, "output_schema": {}}]}, "is not supported"),
    ("tool_choice", {"tool_choice": "required"}, "only allowed with tools"),
    ("seed", {"seed": "7"}, "seed: Input should be a valid integer"),
    ("tool_choice", {"tools": [TOOL], "tool_choice": CHOSEN}, "there is no tool 'z'"),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "type 'mcp' is not supported"),
    ("text", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "type json_schema needs a schema"),
    ("text", {"text": {"format": {"type": "text", "schema": {}}}}, "name and schema go"),
    ("text.format.json_schema", {"text": {"format": {"type": "json_schema", "json_schema": {}}}}, ""),
]


@pytest.mark.parametrize(("param", "fields", "words"), BAD_FIELDS)
def test_what_cannot_be_served_is_refused_by_name(param: str, fields: dict[str, Any], words: str) -> None:
    said_param, message = complaint(**fields)
    assert said_param == param
    assert words in message


def test_no_input_is_a_400() -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"model": "bundled"})
    assert error_reply(caught.value).detail.param == "input"
