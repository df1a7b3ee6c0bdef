"""Agents as their own packages run them, on prompts of 5,000 tokens: calls, aborts, retries, sub-agents, prefixes.

The model is random and small; a plan says what it writes, and the rest of the server is real.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from chairlift.api import ServerConfig
from tests.api.conftest import Server, serving
from tests.api.contract import anthropic_client, client_of
from tests.support.scripted_model import install_plan, make_agents_checkpoint

FILES = {f"file_{number}.py": f"print({number})" for number in range(4)}
LONG = "You are a coding agent. " + "Read before you write, and say what you did. " * 100  # 4,524 tokens, one a byte
PATH = {"type": "string", "description": "Which file, from the root of the repository. " * 4}
SCHEMA = {"type": "object", "properties": {"path": PATH}, "required": ["path"], "additionalProperties": False}
MAX_SEQ_LEN = 6144
NAMES = ("read_file", "write_file", "run")
CLAUDE_TOOLS: Any = [{"name": name, "description": name, "input_schema": SCHEMA} for name in NAMES]
FUNCTIONS = [{"name": name, "description": name, "parameters": SCHEMA} for name in NAMES]
OPENAI_TOOLS: Any = [{"type": "function", "function": each} for each in FUNCTIONS]
_TURN = re.compile(r"<\|(\w+)\|>(.*?)<\|im_end\|>", re.DOTALL)

Serve = Callable[..., AbstractAsyncContextManager[Server]]


def plan(prompt: str) -> str:
    """Asked to read a file the model calls a tool, and told what is in it, it says so."""
    role, content = _TURN.findall(prompt)[-1]
    if role == "tool":
        return f"<think>I know it.</think>It says {content}."
    call = json.dumps({"name": "read_file", "arguments": {"path": content.rpartition(" ")[2]}})
    return f"<think>I look.</think>Let me see.<tool_call>{call}</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_agents_checkpoint(tmp_path_factory.mktemp("model"), max_seq_len=MAX_SEQ_LEN)


@pytest.fixture
def serve(model: str, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A server with four slots."""
    set_tracing_disabled(True)
    install_plan(monkeypatch, model, plan)

    @asynccontextmanager
    async def start(**config: Any) -> AsyncIterator[Server]:
        async with serving(ServerConfig(**config), model=model, max_seq_len=MAX_SEQ_LEN) as server:
            yield server
            assert server.num_free_slots == 4

    return start


def billing_line(number: int) -> str:
    """As Claude Code begins its system prompts."""
    return f"x-anthropic-billing-header: cc_version=2.1.37.{number:03x}; cc_entrypoint=cli; cch={number * 7919:05x};"


async def claude_turn(server: Server, messages: list[Any], number: int) -> Any:
    """One request of an agent; its whole reply, which is added to the conversation."""
    system: Any = [{"type": "text", "text": text} for text in (billing_line(number), LONG)]
    sent: Any = {"max_tokens": 1000, "system": system, "tools": CLAUDE_TOOLS, "messages": messages}
    async with anthropic_client(server) as client, client.messages.stream(model="bundled", **sent) as stream:
        reply = await stream.get_final_message()
    messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
    return reply


@pytest.mark.parametrize("keeps_billing_line", [False, True])
async def test_the_second_turn_finds_the_first_in_the_cache_but_for_what_is_behind_a_billing_line_that_is_kept(
    serve: Serve, keeps_billing_line: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Read file_3.py"}]
    async with serve(keep_billing_line=keeps_billing_line) as server:
        first = await claude_turn(server, messages, 1)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        call = first.content[-1]
        assert (call.name, call.input, first.stop_reason) == ("read_file", {"path": "file_3.py"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": FILES[call.input["path"]]}
        messages.append({"role": "user", "content": [result]})
        second = await claude_turn(server, messages, 2)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert second.content[-1].text == "It says print(3)."
    num_first = first.usage.input_tokens + first.usage.output_tokens
    assert num_first > 5_000
    share = second.usage.cache_read_input_tokens / num_first
    # If it is kept there are still the tools, which this template shows before the system.
    assert share < 0.25 if keeps_billing_line else share >= 0.99


async def chat_stream(client: AsyncOpenAI, messages: list[Any]) -> AsyncIterator[ChatCompletionChunk]:
    stream: Any = await client.chat.completions.create(
        model="bundled",
        messages=[{"role": "system", "content": LONG}, *messages],
        tools=OPENAI_TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    async with stream:
        async for chunk in stream:
            yield chunk


async def test_an_agent_that_leaves_in_the_middle_of_a_call_and_asks_again_finds_its_prompt(serve: Serve) -> None:
    messages = [{"role": "user", "content": "Read file_1.py"}]
    async with serve() as server, client_of(server) as client:
        for _ in range(3):
            chunks = chat_stream(client, messages)
            async for chunk in chunks:
                if chunk.choices and chunk.choices[0].delta.tool_calls:
                    break
            await chunks.aclose()  # type: ignore[attr-defined]
        last = [chunk async for chunk in chat_stream(client, messages)]
        calls = [call for chunk in last if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        assert calls[0].function is not None
        assert calls[0].function.name == "read_file"
        arguments = "".join(call.function.arguments or "" for call in calls if call.function is not None)
        assert json.loads(arguments) == {"path": "file_1.py"}
        usage = last[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1 > 5_000


def agent_of(model: Model, asked: list[str]) -> Agent[None]:
    @function_tool(strict_mode=False)  # a grammar would want JSON without the spaces of the plan
    def read_file(path: str) -> str:
        """Reads a file."""
        asked.append(path)
        return FILES[path]

    return Agent("coder", instructions=LONG + LONG[:1000], model=model, tools=[read_file])


@pytest.mark.parametrize("shape", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_sub_agents_of_openais_package_run_side_by_side(serve: Serve, shape: Callable[..., Model]) -> None:
    asked: list[str] = []
    async with serve() as server, client_of(server) as client:
        agent = agent_of(shape(model="bundled", openai_client=client), asked)
        config = RunConfig(tracing_disabled=True)
        first = await Runner.run(agent, "Read file_0.py", run_config=config)
        running = [Runner.run(agent, f"Read {name}", run_config=config) for name in list(FILES)[1:]]
        others = await asyncio.gather(*running)
    assert [run.final_output for run in (first, *others)] == [f"It says print({number})." for number in range(4)]
    assert sorted(asked) == sorted(FILES)
    usages = [run.context_wrapper.usage for run in others]
    assert all(usage.requests == 2 and usage.input_tokens > 10_000 for usage in usages)
    num_cached = sum(usage.input_tokens_details.cached_tokens for usage in usages)
    assert num_cached > 0.99 * sum(usage.input_tokens for usage in usages)
