"""What `/v1/responses` makes of a body: the messages that its items become, and what is refused, and by which name."""

from typing import Any, get_type_hints

import pytest
from openai.types.responses import response_create_params
from pydantic import ValidationError

from chairlift.api.errors import error_reply
from chairlift.api.pages import fields_of
from chairlift.api.wire import own_field_names
from chairlift.api.wire.completions import ChatCompletionRequest, CompletionRequest
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.errors import ContextLengthExceeded, InvalidRequest
from chairlift.params import SamplingParams, StructuredOutputs

CALL_A = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
CALL_B = {"type": "function_call", "call_id": "b", "name": "g", "arguments": ""}
OUTPUT_A = {"type": "function_call_output", "call_id": "a", "output": "one"}
OUTPUT_B = {
    "type": "function_call_output",
    "call_id": "b",
    "output": [{"type": "input_text", "text": "t"}, {"type": "input_text", "text": "wo"}],
}
MESSAGE_A = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MESSAGE_B = {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}}
TOOL = {"type": "function", "name": "f"}


def parse(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields})


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return parse(input=list(items), **fields).template_messages()


def complaint(**fields: Any) -> tuple[str | None, str]:
    """The field that a client is told of, and the message."""
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        parse(**fields).template_messages()
    failure = error_reply(caught.value)
    assert failure.status == 400
    return failure.detail.param, failure.detail.message


# --- input


def test_a_string_is_what_the_user_says_and_instructions_come_before_it() -> None:
    assert parse().template_messages() == [{"role": "user", "content": "hi"}]
    assert parse(instructions="Be brief.").template_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_messages_come_in_both_forms_and_with_all_roles() -> None:
    assert messages(
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": x} for x in "cd"]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "e", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "f"},
            ],
        },
        {"role": "user", "content": ""},
    ) == [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "ef"},
        {"role": "user", "content": ""},
    ]


def test_calls_in_a_row_are_one_message() -> None:
    assert messages({"role": "user", "content": "u"}, CALL_A, CALL_B, OUTPUT_A, OUTPUT_B) == [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [MESSAGE_A, MESSAGE_B]},
        {"role": "tool", "content": "one", "tool_call_id": "a"},
        {"role": "tool", "content": "two", "tool_call_id": "b"},
    ]


def test_calls_join_the_text_before_them_and_an_output_parts_them() -> None:
    assert messages({"role": "assistant", "content": "t"}, CALL_A, OUTPUT_A, CALL_B, OUTPUT_B) == [
        {"role": "assistant", "content": "t", "tool_calls": [MESSAGE_A]},
        {"role": "tool", "content": "one", "tool_call_id": "a"},
        {"role": "assistant", "content": "", "tool_calls": [MESSAGE_B]},
        {"role": "tool", "content": "two", "tool_call_id": "b"},
    ]


def test_an_output_must_answer_an_earlier_call() -> None:
    expected = ("input", "input: no function_call with call_id 'a' precedes its output")
    assert complaint(input=[OUTPUT_A]) == expected
    assert complaint(input=[OUTPUT_A, CALL_A]) == expected
    assert complaint(input=[CALL_B, OUTPUT_A]) == expected


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
        (
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input.0.content.0: type 'input_image' is not supported",
        ),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text: Field required"),
        ([{"role": "user", "content": ["a"]}], "input.0.content.0: Input should be an object"),
        ([{**CALL_A, "namespace": "n"}], "input.0.namespace is not supported"),
        ([{**CALL_A, "async": True}], "input.0.async: only false is supported"),
        ([{**CALL_A, "arguments": 1}], "input.0.arguments: Input should be a valid string"),
        (
            [CALL_A, {**OUTPUT_A, "output": [{"type": "input_file"}]}],
            "input.1.output.0: type 'input_file' is not supported",
        ),
    ],
)
def test_an_item_that_is_not_understood_is_named(bad_input: Any, message: str) -> None:
    param, said = complaint(input=bad_input)
    assert said.startswith(message)
    assert param is not None
    assert param.split(".")[0] == "input"


def test_items_that_other_servers_models_wrote_come_back_with_what_those_added_to_them() -> None:
    added = {"id": "x", "status": "completed", "phase": "final_answer", "created_by": "them", "agent": {"name": "a"}}
    thought: dict[str, Any] = {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "encrypted_content": "abc",
        "status": None,
    }
    shown = {**thought, "content": [{"type": "reasoning_text", "text": "Let me see."}]}
    text: dict[str, Any] = {"type": "output_text", "text": "t", "annotations": [], "logprobs": None, "parsed": {"a": 1}}
    said = {"type": "message", "role": "assistant", "content": [text], **added}
    assert messages(thought, said, shown, {**CALL_A, **added}, OUTPUT_A, {"role": "user", "content": "u"}) == [
        {"role": "assistant", "content": "t", "reasoning_content": "Let me see.", "tool_calls": [MESSAGE_A]},
        {"role": "tool", "content": "one", "tool_call_id": "a"},
        {"role": "user", "content": "u"},
    ]


# --- how to answer


def test_sampling_settings_go_over_the_models_defaults() -> None:
    defaults = SamplingParams(temperature=0.3, top_k=5, max_tokens=None)
    assert parse().params(defaults) == defaults
    given = parse(temperature=1, top_p=0.5, max_output_tokens=7, include=["message.output_text.logprobs"])
    params = given.params(defaults)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.logprobs) == (1.0, 0.5, 5, 7, 0)


@pytest.mark.parametrize(
    ("text_format", "structure"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputs(json_object=True)),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "null"}, "strict": True, "description": "d"},
            StructuredOutputs(json={"type": "null"}),
        ),
    ],
)
def test_text_format_is_the_wanted_structure(text_format: Any, structure: StructuredOutputs | None) -> None:
    wanted = parse(text={"format": text_format}).wanted_structure()
    assert (wanted and wanted.outputs) == structure
    assert (wanted and wanted.field) == (structure and "text")


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


# --- fields


def test_every_field_that_the_client_can_send_is_known() -> None:
    """Fields of the installed client, so that one that a newer client sends shows up as a failure."""
    sent = {
        *get_type_hints(response_create_params.ResponseCreateParamsStreaming),
        *get_type_hints(response_create_params.ResponseCreateParamsNonStreaming),
    }
    ours = {
        "priority",
        "cache_salt",
        "timeout",
        "structured_outputs",
        "chat_template_kwargs",
        "parse_special_tokens",
        "speculation",
    }
    codex = {"client_metadata"}
    sampling = set(SamplingParams.model_fields) - {"n", "max_tokens", "logprobs", "prompt_logprobs"}
    assert sent | ours | codex | sampling == {row.name for row in fields_of(ResponsesRequest)}


def test_what_agents_send_whatever_the_model_is_accepted() -> None:
    parse(
        include=["reasoning.encrypted_content"],
        reasoning={"effort": None, "summary": "auto", "generate_summary": None},
        tool_choice="auto",
        tools=[],
        parallel_tool_calls=False,
        store=False,
        stream=True,
        text=None,
    )
    parse(reasoning={"effort": "none", "context": "auto"}, text={"format": None, "verbosity": None})
    assert not parse(include=["reasoning.encrypted_content"]).has_logprobs


def test_a_response_is_sampled_with_the_same_fields_as_a_chat_or_a_completion() -> None:
    fields: dict[str, Any] = {
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 1.5},
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "min_tokens": 2,
        "ignore_eos": True,
        "bad_words": ["c"],
        "allowed_token_ids": [1, 2],
        "truncate_prompt_tokens": 9,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    }
    as_sent = {**fields, "repetition_detection": {**fields["repetition_detection"], "min_pattern_size": None}}
    params = parse(**as_sent).params(SamplingParams())
    assert params == SamplingParams(**fields)
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **as_sent})
    assert chat.params(SamplingParams()) == params
    completion = CompletionRequest.model_validate({"prompt": "a", **as_sent})
    assert completion.params(SamplingParams()) == params
    wanted = parse(structured_outputs={"regex": "a"}).wanted_structure()
    assert wanted is not None
    assert wanted.outputs.regex == "a"
    both = parse(structured_outputs={"regex": "a"}, text={"format": {"type": "json_object"}})
    with pytest.raises(InvalidRequest, match="give only one of text and structured_outputs"):
        both.wanted_structure()


def test_defaults_may_be_written_out() -> None:
    parse(background=False, truncation="disabled", text={"verbosity": "medium"}, top_logprobs=0, store=True)
    parse(prompt_cache_options={"mode": "implicit", "ttl": "30m", "prewarm": False}, tool_choice="none")


BAD_FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"foo": 1}, "foo", "unknown or unsupported field: foo"),
    "a chat's name": ({"max_tokens": 1}, "max_tokens", "unknown or unsupported field"),
    "background": ({"background": True}, "background", "background: only false is supported: "),
    "truncation": ({"truncation": "auto"}, "truncation", 'truncation: only "disabled" is supported: '),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity", 'text.verbosity: only "medium" is supported'),
    "prewarm": ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "every request is"),
    "include": ({"include": ["web_search_call.results"]}, "include", "'web_search_call.results' is not supported"),
    "effort": ({"reasoning": {"effort": "little"}}, "reasoning", "Input should be 'none', 'minimal', 'low'"),
    "top_logprobs alone": ({"top_logprobs": 1}, "top_logprobs", "only allowed with include"),
    "too many": ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "equal to 20"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    "stream_options": ({"stream_options": {}}, "stream_options", "only allowed with stream: true"),
    "unknown option": ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", ""),
    "chat's tool": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools.0.name"),
    "callers": (
        {"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]},
        "tools.0.allowed_callers",
        'only ["direct"] is',
    ),
    "deferred": ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "only false is supported"),
    "output_schema": ({"tools": [{**TOOL, "output_schema": {}}]}, "tools.0.output_schema", "is not supported"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
    "a seed that is a text": ({"seed": "7"}, "seed", "seed: Input should be a valid integer"),
    "choice of none": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "z"}},
        "tool_choice",
        "there is no tool 'z'",
    ),
    "other choice": ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "type 'mcp' is not supported"),
    "nameless schema": ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text", "name and schema go"),
    "schema of text": ({"text": {"format": {"type": "text", "schema": {}}}}, "text", "name and schema go"),
    "chat's format": ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.json_schema", ""),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_what_cannot_be_served_is_refused_by_name(case: str) -> None:
    fields, param, words = BAD_FIELDS[case]
    said_param, message = complaint(**fields)
    assert said_param == param
    assert words in message


def test_what_is_too_long_is_so_by_the_fields_own_name_and_stays_what_it_is() -> None:
    with pytest.raises(ContextLengthExceeded) as caught, own_field_names(parse().field_names):
        raise ContextLengthExceeded("this model's maximum context length is 8 tokens", "messages")
    assert str(caught.value) == "input: this model's maximum context length is 8 tokens"
    assert caught.value.param == "input"


def test_no_input_is_a_400() -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"model": "bundled"})
    assert error_reply(caught.value).detail.param == "input"
