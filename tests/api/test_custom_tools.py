"""Custom tools over HTTP, read by the official client: called with a text, enforced, sent back with their results."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai.types.responses import ResponseCustomToolCall

from chairlift.api import ServerConfig
from chairlift.api.answers import ToolFamily
from tests.api.answers.test_lark import APPLY_PATCH
from tests.api.conftest import Server, SharedServer, client_of
from tests.api.contract import CHAT, Events, error_of, post, user, warning_of
from tests.support.scripted_model import END_TOKEN, HYBRID, install, make_thinking_checkpoint

RESPONSES = "/v1/responses"
PATCH = '*** Begin Patch\n*** Add File: a.py\n+print("é")\n*** End Patch'
# What the model would write: without its grammar, a file that is not begun by a line of its own.
WRITTEN = '{"input": "*** Begin Patch\\n*** Add File: a.py\\n+print(\\"é\\")\\n*** End Patch"}'
FORMAT = {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH}
TOOL: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": FORMAT}
CHAT_FORMAT = {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}}
CHAT_TOOL: dict[str, Any] = {"type": "custom", "custom": {"name": "apply_patch", "format": CHAT_FORMAT}}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}

Serve = Callable[..., AbstractAsyncContextManager[Server]]


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'


def coder(text: str) -> str:
    return f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[dict[ToolFamily, SharedServer]]:
    """Servers by the format of their models' calls."""
    servers: dict[ToolFamily, SharedServer] = {}
    yield servers
    for each in servers.values():
        await each.close()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: dict[ToolFamily, SharedServer]) -> Serve:
    """Lends a server whose model wants to write that text."""
    script = install(monkeypatch)

    @asynccontextmanager
    async def lend(text: str, family: ToolFamily = ToolFamily.HERMES) -> AsyncIterator[Server]:
        if family not in servers:
            model = make_thinking_checkpoint(tmp_path, HYBRID, max_seq_len=2048)
            servers[family] = SharedServer(ServerConfig(tool_call_parser=family), {"model": model})
        async with servers[family].lent() as server:
            script.token_ids = [*server.llm.inputs.tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
            yield server

    return lend


@pytest.mark.parametrize(
    ("family", "text"), [(ToolFamily.HERMES, hermes(WRITTEN)), (ToolFamily.QWEN3_CODER, coder(PATCH))]
)
async def test_a_response_calls_a_custom_tool_with_its_input(serve: Serve, family: ToolFamily, text: str) -> None:
    async with serve(text, family) as server:
        whole = await post(server, RESPONSES, {"input": "Edit.", "tools": [TOOL, SHELL], "temperature": 0})
        async with client_of(server) as client:
            tools: list[Any] = [TOOL, SHELL]
            response: Any = await client.responses.create(model="bundled", input="Edit.", tools=tools, temperature=0)
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert call["id"].startswith("ctc_")
    assert whole["tools"][0] == TOOL
    (same,) = response.output
    assert isinstance(same, ResponseCustomToolCall)
    assert same.input == PATCH


async def test_an_input_is_streamed(serve: Serve) -> None:
    body = {"input": "Edit.", "tools": [TOOL], "temperature": 0, "stream": True}
    async with (
        serve(hermes(WRITTEN)) as server,
        aiohttp.ClientSession(server.url) as http,
        http.post(RESPONSES, json=body) as reply,
    ):
        events = Events.of(await reply.text())
    added, *_, done, ended, _ = events.all[2:]
    assert (added["item"]["type"], added["item"]["input"]) == ("custom_tool_call", "")
    assert len(events.of_type("response.custom_tool_call_input.delta")) > 20
    assert events.joined("response.custom_tool_call_input.delta") == PATCH
    assert (done["type"], done["input"]) == ("response.custom_tool_call_input.done", PATCH)
    assert ended["item"]["input"] == PATCH


async def test_a_chat_calls_a_custom_tool_with_its_input(serve: Serve) -> None:
    body: dict[str, Any] = {"messages": user("Edit."), "tools": [CHAT_TOOL], "temperature": 0}
    chosen = {"type": "custom", "custom": {"name": "apply_patch"}}
    async with serve(hermes(WRITTEN)) as server:
        (choice,) = (await post(server, CHAT, {**body, "tool_choice": chosen}))["choices"]
        async with client_of(server) as client:
            reply = await client.chat.completions.create(model="bundled", stream=False, **body)
            stream = await client.chat.completions.create(model="bundled", stream=True, **body)
            deltas = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "apply_patch", "input": PATCH})
    assert choice["finish_reason"] == "tool_calls"
    (same,) = reply.choices[0].message.tool_calls or []
    assert same.type == "custom"
    assert same.custom.input == PATCH
    told = [delta.model_dump()["custom"] for delta in deltas]
    assert (told[0]["name"], "".join(each["input"] for each in told)) == ("apply_patch", PATCH)


async def test_an_input_that_the_grammar_forbids_cannot_be_written(serve: Serve) -> None:
    misplaced = WRITTEN.replace("*** Add File", "** Add File").replace("+print", "print")
    async with serve(hermes(misplaced)) as server:
        free = await post(server, RESPONSES, {"input": "x", "tools": [{**TOOL, "format": None}], "temperature": 0})
        body = {"input": "x", "tools": [TOOL], "temperature": 0, "tool_choice": "required", "max_output_tokens": 200}
        bound = await post(server, RESPONSES, body)
    assert free["output"][0]["input"] == PATCH.replace("*** Add", "** Add").replace("+print", "print")
    assert bound["output"][0]["input"].startswith("*** Begin Patch\n*** ")


async def test_calls_and_their_outputs_come_back(serve: Serve) -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": PATCH, "id": "ctc_1"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done!"}
    function = {"name": "apply_patch", "arguments": WRITTEN}
    said = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}}],
    }
    same = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "Done!"}
    async with serve("Good.") as server:
        response = await post(server, RESPONSES, {"input": [*user("Edit."), call, output], "tools": [TOOL]})
        chats = [await post(server, CHAT, {"messages": [*user("Edit."), each, result]}) for each in (said, same)]
    assert response["output"][0]["content"][0]["text"] == "Good."
    num_tokens = {chat["usage"]["prompt_tokens"] for chat in chats} | {response["usage"]["input_tokens"]}
    assert len(num_tokens) == 1


async def test_a_stored_call_is_part_of_the_conversation(serve: Serve) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "temperature": 0}
    async with serve(hermes(WRITTEN)) as server:
        first = await post(server, RESPONSES, {**body, "input": "Edit.", "store": True})
        (call,) = first["output"]
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done!"}
        stored = await post(server, RESPONSES, {**body, "input": [output], "previous_response_id": first["id"]})
        whole = await post(server, RESPONSES, {**body, "input": [*user("Edit."), call, output]})
    assert stored["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


async def test_a_grammar_that_cannot_be_enforced_is_told(serve: Serve) -> None:
    nested = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    wrong = {"type": "grammar", "syntax": "lark", "definition": "begin: LF"}
    look = {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}
    long = {**TOOL, "format": {**FORMAT, "definition": APPLY_PATCH + "// " * 12_000}}
    async with serve("Good.") as server:
        too_long = await error_of(server, RESPONSES, {"input": "x", "tools": [long, {**long, "name": "b"}]})
        header = await warning_of(server, RESPONSES, {"input": "x", "tools": [{**TOOL, "format": nested}]})
        errors = [
            await error_of(server, RESPONSES, {"input": "x", "tools": [{**TOOL, "format": each}]})
            for each in (wrong, look)
        ]
        unfit = await error_of(server, RESPONSES, {"input": "x", "tools": [{**TOOL, "format": {"type": "grammar"}}]})
    assert header == (
        "299 - \"tools: the grammar of custom tool 'apply_patch' is not enforced: rule start contains itself\""
    )
    assert [error["param"] for error in [*errors, unfit]] == ["tools"] * 3
    beginning = "tools: the grammar of custom tool 'apply_patch' cannot be "
    assert errors[0]["message"] == f"{beginning}read: rule start is not defined"
    assert errors[1]["message"].startswith(f"{beginning}compiled: ")
    assert "look-ahead" in errors[1]["message"]
    assert "has a grammar, with syntax and definition" in unfit["message"]
    assert too_long["message"] == (
        "tools: the grammars of the custom tools have more than 65536 characters; simplify them"
    )
