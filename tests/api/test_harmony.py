"""Harmony over HTTP, by a tiny gpt-oss; a script says what it wants to write, and the rest of the server is real."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken
from transformers import AutoTokenizer

from chairlift.api import ServerConfig
from chairlift.api.answers import ReasoningFamily, ToolFamily
from chairlift.errors import ConfigurationError
from tests.api.conftest import Server, SharedServer
from tests.api.contract import CHAT, RESPONSES, error_of, post, serving, user, warning_of, whole_and_chunks
from tests.support.checkpoints import make_checkpoint
from tests.support.scripted_model import END_TOKEN, install

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALLING = f'{ANALYSIS}I look.{NEXT}<|channel|>commentary to=functions.paint <|constrain|>json<|message|>{{"n": 1}}'
# As gpt-oss shows conversations, but for the identity, the date and the types of parameters.
TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}
{%- if tools %} Calls go to the commentary channel.{% endif %}<|end|>
{%- if messages[0].role == "system" %}{% set instructions = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- if instructions or tools %}<|start|>developer<|message|>{{ instructions }}
{%- for tool in tools or [] %}
// {{ tool.function.description + "\\n" }}type {{ tool.function.name }} = any;{% endfor %}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
{%- if message.role == "assistant" and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments|tojson }}<|call|>
{%- elif message.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == "tool" -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content|tojson }}<|end|>
{%- else %}<|start|>user<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
STRICT: Any = {"type": "function", "function": {**PAINT["function"], "strict": True}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
QUESTION = user("What is 2 + 2?")

Serve = Callable[..., AbstractAsyncContextManager[Server]]


def make_model(directory: Path, marks: list[str] = MARKS) -> str:
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 2}
    make_checkpoint(directory, model_type="gpt_oss", eos_token_id=END_TOKEN, max_position_embeddings=2048, **experts)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedServer]:
    server = SharedServer(ServerConfig(), {"model": make_model(tmp_path_factory.mktemp("harmony"))})
    yield server
    await server.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, shared: SharedServer) -> Serve:
    """Lends the server, whose model wants to write that text."""
    script = install(monkeypatch)

    @asynccontextmanager
    async def lend(text: str) -> AsyncIterator[Server]:
        async with shared.lent() as server:
            script.token_ids = [*server.llm.inputs.tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
            yield server

    return lend


async def message_of(server: Server, **fields: Any) -> dict[str, Any]:
    reply = await post(server, CHAT, {"messages": QUESTION, "temperature": 0, **fields})
    message: dict[str, Any] = reply["choices"][0]["message"]
    return message


async def shown(server: Server, **fields: Any) -> str:
    """The conversation as the model sees it."""
    tokens = (await post(server, "/tokenize", {"messages": QUESTION, **fields}))["tokens"]
    text: str = (await post(server, "/detokenize", {"tokens": tokens}))["prompt"]
    return text


@pytest.mark.parametrize("tools", [{}, {"tools": [PAINT]}])
async def test_channels_are_told_apart_streamed_or_not(serve: Serve, tools: dict[str, Any]) -> None:
    async with serve(f"{ANALYSIS}Hm, so.{NEXT}{FINAL}Four.") as server:
        whole, _ = await whole_and_chunks(server, CHAT, {"messages": QUESTION, "temperature": 0, **tools})
    (choice,) = whole["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm, so.", "Four.")
    assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Hm, so.")


async def test_a_call_and_its_result_go_round(serve: Serve) -> None:
    """No call follows the first one, though parallel calls are allowed."""
    async with serve(CALLING + "<|call|><|start|>assistant" + CALLING) as server:
        whole, _ = await whole_and_chunks(server, CHAT, {"messages": QUESTION, "temperature": 0, "tools": [PAINT]})
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("paint", {"n": 1})
    result = {"role": "tool", "content": "done", "tool_call_id": call["id"]}
    turns = [*QUESTION, choice["message"], result]
    async with serve(f"{FINAL}It is done.") as server:
        prompt = await shown(server, messages=turns, tools=[PAINT])
        message = await message_of(server, messages=turns, tools=[PAINT])
    assert message["content"] == "It is done."
    assert prompt.endswith(
        "<|end|><|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.paint<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        '<|start|>functions.paint to=assistant<|channel|>commentary<|message|>"done"<|end|><|start|>assistant'
    )


async def test_responses_have_items_of_reasoning_and_calls(serve: Serve) -> None:
    tool = {"type": "function", "strict": False, **PAINT["function"]}
    body = {"input": "Hi", "tools": [tool], "temperature": 0, "reasoning": {"effort": "high"}}
    async with serve(CALLING) as server:
        response = await post(server, RESPONSES, body)
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["output"][1]["arguments"] == '{"n": 1}'


@pytest.mark.parametrize("lead", ["", f"{ANALYSIS}Hm.{NEXT}"])
async def test_a_forced_call_comes_after_the_analysis(serve: Serve, lead: str) -> None:
    wanted = lead + "<|channel|>commentary to=functions.paint<|message|>" + '{"m": "x", "n": 7}'
    async with serve(wanted) as server:
        message = await message_of(server, tools=[PAINT], tool_choice="required", max_tokens=200)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"]).keys() == {"n"}
    assert message.get("reasoning", "") == ("Hm." if lead else "")


async def test_strict_calls_are_enforced_and_final_texts_are_free(serve: Serve) -> None:
    async with serve(CALLING.replace('"n": 1', '"m": 1')) as server:
        called = await message_of(server, tools=[STRICT], max_tokens=200)
    async with serve(f"{ANALYSIS}Hm.{NEXT}{FINAL}Four.") as server:
        said = await message_of(server, tools=[STRICT])
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]).keys() == {"n"}
    assert (said["reasoning"], said["content"]) == ("Hm.", "Four.")


@pytest.mark.parametrize("tools", [{}, {"tools": [PAINT]}])
@pytest.mark.parametrize("reasoning", ["", "Hm."])
async def test_a_structure_is_that_of_the_final_message(serve: Serve, reasoning: str, tools: dict[str, Any]) -> None:
    async with serve((ANALYSIS + reasoning + NEXT if reasoning else "") + f"{FINAL}Four.") as server:
        message = await message_of(server, response_format=FORM, max_tokens=200, **tools)
    assert (message.get("reasoning", ""), message["content"]) == (reasoning, '{"a": 1}')


async def test_the_effort_is_shown_as_one_that_the_model_knows(serve: Serve) -> None:
    async with serve("") as server:
        efforts = [None, "minimal", "low", "high", "xhigh"]
        given = [{} if each is None else {"chat_template_kwargs": {"reasoning_effort": each}} for each in efforts]
        prompts = [await shown(server, **fields) for fields in given]
        error = await error_of(server, CHAT, {"messages": QUESTION, "reasoning_effort": "none"})
        warning = await warning_of(server, CHAT, {"messages": QUESTION, "reasoning_effort": "high", "max_tokens": 1})
    named = [prompt.partition("Reasoning: ")[2].partition("<|end|>")[0] for prompt in prompts]
    assert named == ["medium", "low", "low", "high", "high"]
    assert error["param"] == "reasoning_effort"
    assert warning is None


async def test_later_system_messages_are_shown_as_the_users(serve: Serve) -> None:
    late = {"role": "system", "content": "Be brief."}
    async with serve(f"{FINAL}Four.") as server:
        warning = await warning_of(server, CHAT, {"messages": [*QUESTION, late], "max_tokens": 1})
    assert warning is not None
    assert "later system messages shown as the user's" in warning


async def test_a_vocabulary_without_the_marks_and_other_parsers_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, MARKS[:-2])
    with pytest.raises(ConfigurationError, match=r"tool_call_parser harmony cannot be used: <\|call\|> is not a token"):
        async with serving(ServerConfig(tool_call_parser=ToolFamily.HARMONY), model=model):
            raise AssertionError("it started")
    with pytest.raises(ConfigurationError, match="reasoning_parser think cannot be used with harmony"):
        async with serving(ServerConfig(reasoning_parser=ReasoningFamily.THINK), model=model):
            raise AssertionError("it started")
