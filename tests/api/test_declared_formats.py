"""Answers over HTTP of models whose format is declared: by the checkpoint, by a file, or by what comes with Chairlift.

The model is random; a script says what it wants to write, and the rest of the server is real.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from chairlift.api import ServerConfig
from chairlift.api.answers import ToolFamily
from chairlift.api.answers.declared import DeclaredFamily
from chairlift.errors import ConfigurationError
from tests.api.conftest import Server
from tests.api.contract import CHAT, client_of, error_of, serving, user, whole_and_chunks
from tests.support.scripted_model import ALWAYS, END_TOKEN, HYBRID, install, make_thinking_checkpoint

PAINT: Any = {
    "type": "function",
    "function": {"name": "paint", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
STRICT: Any = {"type": "function", "function": {**PAINT["function"], "strict": True}}
FUNCTION: Any = {"type": "function", "strict": False, **PAINT["function"]}
QUESTION: Any = user("What is 2 + 2?")
CALLING: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "tools": [PAINT]}
PLAIN = "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{%- endfor -%}"
GENERATION = "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open_pattern": r"<\|call:(?P<name>\w+)\|>",
            "close": "<|done|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
# As Qwen 3's, whose calls are Hermes'.
HERMES: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}

Serve = Callable[..., AbstractAsyncContextManager[Server]]


def make_checkpoint(
    directory: Path, chat_template: str = PLAIN + GENERATION, declares: object = None, special: tuple[str, ...] = ()
) -> str:
    path = make_thinking_checkpoint(directory, chat_template)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in special], special_tokens=True)
    if declares is not None:
        tokenizer.response_template = declares
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A server of such a checkpoint, whose model wants to write that text."""
    script = install(monkeypatch)

    @asynccontextmanager
    async def started(text: str, config: dict[str, Any] | None = None, **checkpoint: Any) -> AsyncIterator[Server]:
        model = make_checkpoint(tmp_path, **checkpoint)
        async with serving(ServerConfig(**(config or {})), model=model) as server:
            script.token_ids = [*server.llm.inputs.tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
            yield server

    return started


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["function"]["name"], each["function"]["arguments"]) for each in message["tool_calls"]]


def file_of(directory: Path, text: str) -> Path:
    path = directory / "declared.json"
    path.write_text(text)
    return path


TEXT = '<hm>\nIt is 4.\n</hm>\nFour. <|call:paint|>{"n": 1}<|done|><|call:paint|>{"n": 2}<|done|>'


async def test_a_checkpoints_declaration_is_followed_streamed_or_not(serve: Serve) -> None:
    """Its marks are special tokens, which are not part of texts otherwise."""
    async with serve(TEXT, declares=TEMPLATE, special=("<|done|>", "<hm>")) as server:
        whole, _ = await whole_and_chunks(server, CHAT, CALLING)
        without, _ = await whole_and_chunks(server, CHAT, {"messages": QUESTION, "temperature": 0})
    (choice,), (said,) = whole["choices"], without["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Four.")
    assert choice["message"]["reasoning"] == "It is 4."
    assert calls_of(choice["message"]) == [("paint", '{"n": 1}'), ("paint", '{"n": 2}')]
    assert said["message"]["content"] == 'Four. <|call:paint|>{"n": 1}<|call:paint|>{"n": 2}'
    assert said["message"]["reasoning"] == "It is 4."


async def test_the_official_client_gets_calls_of_a_declared_format(serve: Serve) -> None:
    async with serve(TEXT, declares=TEMPLATE) as server, client_of(server) as client:
        one = await client.chat.completions.create(
            model="bundled",
            messages=QUESTION,
            tools=[PAINT],
            temperature=0,
            parallel_tool_calls=False,
        )
        response = await client.responses.create(
            model="bundled",
            input="Hi",
            tools=[FUNCTION],
            temperature=0,
        )
        events = [
            event.type
            async for event in await client.responses.create(
                model="bundled",
                input="Hi",
                tools=[FUNCTION],
                temperature=0,
                stream=True,
            )
        ]
    (call,) = one.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("paint", {"n": 1})
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert events.count("response.function_call_arguments.done") == 2


@pytest.mark.parametrize("field", ["tool_choice", "response_format"])
async def test_what_only_a_grammar_could_ensure_is_refused(serve: Serve, field: str) -> None:
    asked: dict[str, Any] = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    async with serve("Four.", declares=TEMPLATE) as server:
        error = await error_of(server, CHAT, {**CALLING, field: asked[field]})
    assert error["param"] == field
    assert "is declared by a response template, for which there is no grammar" in error["message"]


async def test_strict_functions_are_served_with_a_warning(serve: Serve) -> None:
    async with serve("Four.", declares=TEMPLATE) as server, client_of(server) as client:
        ask = client.chat.completions.with_raw_response.create
        strict = await ask(model="bundled", messages=QUESTION, tools=[STRICT])
        usual = await ask(model="bundled", messages=QUESTION, tools=[PAINT])
    assert strict.headers["warning"].startswith('299 - "strict was left out: ')
    assert "warning" not in usual.headers


async def test_a_shipped_declaration_is_recognised_by_the_chat_template(serve: Serve) -> None:
    """Thoughts that the prompt begins are counted, and types are those of the functions."""
    text = "Hm.</think>Four.<tool_call>paint\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    async with serve(text, chat_template=ALWAYS + "{#<arg_key>#}") as server:
        whole, _ = await whole_and_chunks(server, CHAT, CALLING)
    (choice,) = whole["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Four.")
    assert calls_of(choice["message"]) == [("paint", '{"n": 3}')]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


@pytest.mark.parametrize("parser", [None, DeclaredFamily.DECLARED])
async def test_a_file_declares_the_format_instead_of_the_checkpoint(
    serve: Serve, tmp_path: Path, parser: DeclaredFamily | None
) -> None:
    config = {"response_template": file_of(tmp_path, json.dumps(TEMPLATE)), "tool_call_parser": parser}
    async with serve(TEXT, config, chat_template=HYBRID, declares=HERMES) as server:
        whole, _ = await whole_and_chunks(server, CHAT, CALLING)
    assert calls_of(whole["choices"][0]["message"]) == [("paint", '{"n": 1}'), ("paint", '{"n": 2}')]


async def test_a_hand_written_format_that_reads_the_same_calls_is_used_because_it_enforces(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "paint", "arguments": {"n": 1}}\n</tool_call>'
    forced = {**CALLING, "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"}
    async with serve(call, chat_template=HYBRID, declares=HERMES) as server:
        whole, _ = await whole_and_chunks(server, CHAT, forced)
    assert calls_of(whole["choices"][0]["message"]) == [("paint", '{"n": 1}')]


async def test_a_declaration_that_reads_other_calls_wins_over_the_chat_template(serve: Serve) -> None:
    async with serve(TEXT, chat_template=HYBRID, declares=TEMPLATE) as server:
        whole, _ = await whole_and_chunks(server, CHAT, CALLING)
    assert calls_of(whole["choices"][0]["message"]) == [("paint", '{"n": 1}'), ("paint", '{"n": 2}')]


async def test_a_setting_chooses_the_declaration_or_a_hand_written_format(serve: Serve) -> None:
    call = '<tool_call>{"name": "paint", "arguments": {"n": 1}}</tool_call>'
    async with serve(
        call, {"tool_call_parser": DeclaredFamily.DECLARED}, chat_template=HYBRID, declares=HERMES
    ) as server:
        whole, _ = await whole_and_chunks(server, CHAT, CALLING)
        error = await error_of(server, CHAT, {**CALLING, "tool_choice": "required"})
    assert calls_of(whole["choices"][0]["message"]) == [("paint", '{"n": 1}')]
    assert error["param"] == "tool_choice"
    async with serve(call, {"tool_call_parser": ToolFamily.HERMES}, declares=TEMPLATE) as server:
        whole, _ = await whole_and_chunks(server, CHAT, CALLING)
    assert calls_of(whole["choices"][0]["message"]) == [("paint", '{"n": 1}')]


async def test_a_checkpoints_bad_declaration_is_a_warning_and_the_server_runs(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    bad: dict[str, Any] = {"fields": {"content": {}}}
    with caplog.at_level(logging.WARNING):
        async with serve("Four.", declares=bad) as server, client_of(server) as client:
            reply = await client.chat.completions.create(model="bundled", messages=QUESTION, temperature=0)
            with pytest.raises(openai.BadRequestError, match="does not know how this model's chat template writes"):
                await client.chat.completions.create(model="bundled", messages=QUESTION, tools=[PAINT])
    assert reply.choices[0].message.content == "Four."
    said = "the checkpoint's response_template is not used: start_anchor or start_anchor_pattern is missing"
    assert said in [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_the_older_kind_of_declaration_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path)
    path = Path(model) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "response_schema": {"type": "object"}}))
    with caplog.at_level(logging.WARNING):
        async with serving(ServerConfig(), model=model):
            pass
    assert "the checkpoint's response_schema is not read: response_template has replaced it" in caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"tool_call_parser": DeclaredFamily.DECLARED},
            "the checkpoint declares no response_template; set response_template",
        ),
        ({"response_template": Path("nowhere.json")}, r"response_template nowhere\.json cannot be read: "),
        ({"response_template": '{"fields": 1}'}, "declared.json: fields: Input should be a valid dictionary"),
        ({"response_template": "{"}, "declared.json: Expecting property name"),
        (
            {"response_template": json.dumps(TEMPLATE), "tool_call_parser": ToolFamily.HERMES},
            "response_template and tool_call_parser hermes are both set; leave one out",
        ),
    ],
)
async def test_settings_that_cannot_be_followed_are_refused_at_the_start(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    if isinstance(config.get("response_template"), str):
        config = {**config, "response_template": file_of(tmp_path, config["response_template"])}
    with pytest.raises(ConfigurationError, match=reason):
        async with serving(ServerConfig(**config)):
            raise AssertionError("it started")


GEMMA_TEMPLATE = (
    "{%- for message in messages -%}<|turn>{{ message.role }}\n{{ message.content }}<turn|>{%- endfor -%}"
    "{#<|tool_call>call:#}{%- if add_generation_prompt -%}<|turn>model\n"
    "{%- if not enable_thinking -%}<|channel>thought\n<channel|>{%- endif -%}{%- endif -%}"
)
GEMMA_MARKS = ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


@pytest.mark.parametrize(
    ("thoughts", "content", "asked"),
    [
        (None, None, {"tool_choice": "required"}),
        ("Hm.", None, {"tool_choice": {"type": "function", "function": {"name": "paint"}}}),
        ("Hm.", "Four.", {"tools": [STRICT]}),
    ],
)
async def test_calls_of_gemma_4_are_enforced_also_behind_thoughts(
    serve: Serve, thoughts: str | None, content: str | None, asked: dict[str, Any]
) -> None:
    """The model wants to call another function."""
    text = f"<|channel>thought\n{thoughts}<channel|>" if thoughts else ""
    text += f"{content or ''}<|tool_call>call:point{{n:3}}<tool_call|>"
    body = {**CALLING, "parallel_tool_calls": False, "reasoning_effort": "low" if thoughts else "none", **asked}
    async with serve(text, chat_template=GEMMA_TEMPLATE, special=GEMMA_MARKS) as server:
        whole, _ = await whole_and_chunks(server, CHAT, body)
    (choice,) = whole["choices"]
    assert (choice["message"].get("reasoning"), choice["message"]["content"]) == (thoughts, content)
    assert calls_of(choice["message"]) == [("paint", '{"n": 3}')]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thoughts or "")
