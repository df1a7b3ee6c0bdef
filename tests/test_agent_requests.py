"""Requests as coding agents' own programs send them, shortened: Claude Code 2.1, Codex 0.171 and opencode 1.18.

Each is the last request of a session in which a tool has returned something that the model cannot read, or has found
another tool. A plan says what the model writes, and the rest of the server is real.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from chairlift.api import ServerConfig
from tests.api.conftest import Server, serving
from tests.support.scripted_model import install_plan, make_agents_checkpoint

MAX_SEQ_LEN = 8192
ANSWER = "I see."
_TURN = re.compile(r"<\|(\w+)\|>(.*?)<\|im_end\|>", re.DOTALL)
PNG = "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAF0lEQVR4nGP4z8BAEiJN9aiGUQ1DSgMAkPn/Afnh"
PATH_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"file_path": {"type": "string", "description": "The absolute path to the file to read"}},
    "required": ["file_path"],
    "additionalProperties": False,
}
REMINDER = "<system-reminder>\n# currentDate\nToday's date is 2026-11-27.\n</system-reminder>\n\n"
EPHEMERAL = {"type": "ephemeral"}
THOUGHT = {"type": "thinking", "thinking": "I look.", "signature": "77f9b7522b7c9ec51be17b2360b3862d"}


@dataclass
class Recorded:
    """A server whose model says `ANSWER`, and the prompts that it has read."""

    server: Server
    prompts: list[str] = field(default_factory=list)

    @property
    def last_turns(self) -> list[tuple[str, str]]:
        """Returns who said what in the last prompt."""
        return [(role, content) for role, content in _TURN.findall(self.prompts[-1])]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Recorded]:
    model = make_agents_checkpoint(tmp_path_factory.mktemp("model"), max_seq_len=MAX_SEQ_LEN)
    with pytest.MonkeyPatch.context() as patch:
        prompts: list[str] = []

        def answer(prompt: str) -> str:
            prompts.append(prompt)
            return ANSWER

        install_plan(patch, model, answer)
        async with serving(ServerConfig(clamp_max_tokens=True), model=model, max_seq_len=MAX_SEQ_LEN) as server:
            yield Recorded(server, prompts)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def send(recorded: Recorded, path: str, body: Any, **headers: str) -> tuple[str, str | None]:
    """The stream that answers, and what its client is warned of."""
    url = recorded.server.url + path
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        text = await response.text()
        assert response.status == 200, text
        return text, response.headers.get("Warning")


def claude(*turns: Any, tools: Any) -> dict[str, Any]:
    """A request of `claude -p`."""
    listed = {"role": "system", "content": "Available agent types for the Agent tool:\n- claude: Catch-all."}
    billing = "x-anthropic-billing-header: cc_version=2.1.197.d4c; cc_entrypoint=sdk-cli; cch=00000;"
    texts = (billing, "You are a Claude agent.", "You are an agent that helps users.")
    asked = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Look.", "cache_control": EPHEMERAL}]
    return {
        "model": "bundled",
        "messages": [{"role": "user", "content": asked}, listed, *turns],
        "system": [{"type": "text", "text": text, "cache_control": EPHEMERAL} for text in texts],
        "tools": tools,
        "metadata": {"user_id": '{"device_id":"20e6a9d6e2cc","account_uuid":"","session_id":"d872fc18-69f4-442d"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


BETAS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,mid-conversation-system-2026-04-07",
    "Authorization": "Bearer none",
}
READ = {"name": "Read", "description": "Reads a file.", "input_schema": PATH_SCHEMA}


def claude_calls(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    said = {"type": "text", "text": "Let me see.", "citations": None}
    used = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
    return {"role": "assistant", "content": [THOUGHT, said, used]}


async def test_claude_code_goes_on_after_a_picture_and_a_pdf(recorded: Recorded) -> None:
    picture = {"type": "image", "source": {"type": "base64", "data": PNG, "media_type": "image/png"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"}}
    body = claude(
        claude_calls("toolu_1", "Read", {"file_path": "/pic.png"}),
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture]}]},
        claude_calls("toolu_2", "Read", {"file_path": "/doc.pdf"}),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "PDF file read: /doc.pdf (303 bytes)"},
                {**pdf, "cache_control": EPHEMERAL},
            ],
        },
        tools=[READ],
    )
    text, warning = await send(recorded, "/v1/messages?beta=true", body, **BETAS)
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert (
        warning == '299 - "parts of tool results were left out (document, image), because this model reads text only"'
    )
    turns = recorded.last_turns
    assert [content for role, content in turns if role == "tool"] == [
        "[image left out: this model reads text only]",
        "PDF file read: /doc.pdf (303 bytes)",
    ]
    assert turns[-1] == ("user", "[document left out: this model reads text only]")
    assert turns[0] == ("system", "You are a Claude agent.\nYou are an agent that helps users.")


async def test_what_claude_code_finds_by_tool_search_leaves_the_beginning_as_it_was(recorded: Recorded) -> None:
    search = {"name": "ToolSearch", "description": "Fetches schemas.", "input_schema": {"type": "object"}}
    fetch = {"name": "WebFetch", "description": "Fetches a URL.", "input_schema": PATH_SCHEMA, "defer_loading": True}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
    }
    turns = [
        claude_calls("toolu_1", "ToolSearch", {"query": "select:WebFetch", "max_results": 5}),
        {"role": "user", "content": [result, {"type": "text", "text": "Tool loaded.", "cache_control": EPHEMERAL}]},
    ]
    await send(recorded, "/v1/messages?beta=true", claude(tools=[READ, search]), **BETAS)
    before = recorded.prompts[-1]
    text, warning = await send(recorded, "/v1/messages?beta=true", claude(*turns, tools=[READ, search, fetch]), **BETAS)
    assert recorded.prompts[-1].startswith(before.removesuffix("<|assistant|>"))
    (found,) = [content for role, content in recorded.last_turns if role == "tool"]
    assert json.loads(found.removeprefix("WebFetch: "))["function"] == {
        "name": "WebFetch",
        "description": "Fetches a URL.",
        "parameters": PATH_SCHEMA,
    }
    assert warning is None
    usage = json.loads(text.partition("data: ")[2].partition("\n")[0])["message"]["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * len(before)  # a byte is a token, and so is a special token


def codex_message(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": "msg_5acbb51f-f164-5798-ac6f-b9be1d454a45", "role": role, "content": content}


async def test_codex_goes_on_after_a_picture(recorded: Recorded) -> None:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "high"}
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    view = {
        "type": "function",
        "name": "view_image",
        "description": "View an image.",
        "strict": False,
        "parameters": schema,
    }
    items = [
        codex_message("developer", "You are a coding agent running in the Codex CLI."),
        codex_message("developer", "<skills_instructions>", "<permissions instructions>"),
        codex_message("user", "<environment_context>"),
        codex_message("user", "Look."),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I look."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "status": "completed",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "view_image",
            "arguments": '{"path": "/pic.png"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": [picture]},
    ]
    body = {
        "model": "bundled",
        "stream": True,
        "input": items,
        "tools": [
            view,
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "Sub-agents.",
                "tools": [{"type": "function"}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a21adc-e3fd-7293-a48f-18062008a0cb",
        "client_metadata": {"thread_id": "01a21aeb", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
    }
    text, warning = await send(recorded, "/v1/responses", body)
    assert "event: response.completed\n" in text
    assert warning == (
        '299 - "tools of type namespace, web_search are not supported here and were left out",'
        ' 299 - "parts of tool results were left out (image), because this model reads text only"'
    )
    assert recorded.last_turns[-1] == ("tool", "[image left out: this model reads text only]")


async def test_opencode_goes_on_after_a_picture_and_asks_for_more_than_there_is_room_for(recorded: Recorded) -> None:
    arguments = '{"filePath":"/pic.png"}'
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    attached = [
        {"type": "text", "text": "Attached media from tool result:"},
        {
            "type": "text",
            "text": "ERROR: Cannot read image (this model does not support image input). Inform the user.",
        },
    ]
    read = {"name": "read", "description": "Read a file.", "parameters": {"type": "object", "properties": {}}}
    body = {
        "model": "bundled",
        "max_tokens": 8192,
        "messages": [
            {"role": "system", "content": "You are opencode."},
            {"role": "user", "content": '"Look."'},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Image read successfully"},
            {"role": "user", "content": attached},
        ],
        "tools": [{"type": "function", "function": read}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, warning = await send(recorded, "/v1/chat/completions", body)
    assert text.endswith("data: [DONE]\n\n")
    assert warning is None
    assert recorded.last_turns[-2] == ("tool", "Image read successfully")
