"""Tests what a request contains and the model does not read: what stands in its place, and who is told."""

import logging
from typing import Any

import pytest

from chairlift.api.anthropic.request import MessagesRequest
from tests.api.anthropic.support import WEATHER
from tests.api.conftest import Server
from tests.api.contract import posted

IMAGE = "[image left out: this model reads text only]"
DOCUMENT = "[document left out: this model reads text only]"
BASE64 = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
ASKED = {"role": "user", "content": "Look."}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}


def told(kinds: str) -> list[str]:
    return [f"parts of tool results were left out ({kinds}), because this model reads text only"]


def messages_of(content: Any, *beside: Any) -> MessagesRequest:
    """A conversation whose last turn is a tool's result and what comes with it."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    turns = [ASKED, USE, {"role": "user", "content": [result, *beside]}]
    return MessagesRequest.model_validate({"max_tokens": 1, "messages": turns})


def test_a_note_stands_for_an_image_or_document_of_a_tool_in_messages() -> None:
    image, document = {"type": "image", "source": BASE64}, {"type": "document", "source": BASE64, "title": "t"}
    body = messages_of([{"type": "text", "text": "a"}, image, document])
    assert body.template_messages()[-1]["content"] == f"a\n{IMAGE}\n{DOCUMENT}"
    assert body.warnings == told("document, image")
    # Claude Code puts the pages of a PDF beside the result.
    beside = messages_of("read", document, {"type": "text", "text": "b"})
    assert [each["content"] for each in beside.template_messages()[-2:]] == ["read", f"{DOCUMENT}\nb"]
    assert beside.warnings == told("document")
    assert messages_of("read").warnings == []


def test_what_a_tool_has_found_is_read_as_text() -> None:
    found = {"type": "search_result", "source": "a.md", "title": "A", "content": [{"type": "text", "text": "a"}]}
    body = messages_of([found, {"type": "tool_reference", "tool_name": "paint"}])
    assert body.template_messages()[-1]["content"] == "A (a.md)\na\npaint"
    assert body.warnings == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_client_and_the_log_are_told_all_that_was_left_out(
    server: Server, caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    body = messages_of([{"type": "image", "source": BASE64}]).model_dump(exclude_none=True, mode="json")
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    sentences = [
        "tools of type web_search_20250305 are not supported here and were left out, so the model has no tools",
        *told("image"),
    ]
    caplog.set_level(logging.INFO)
    async with posted(server, {**body, "tools": tools, "stream": is_streamed}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Warning"] == ", ".join(f'299 - "{each}"' for each in sentences)
        await response.read()
    (record,) = [each for each in caplog.records if each.getMessage() == "request"]
    assert record.chairlift_fields["warning"] == "; ".join(sentences)  # type: ignore[attr-defined]


PAINT: Any = {**WEATHER, "name": "paint", "description": "Paints ü.", "defer_loading": True}
FOUND = {"type": "tool_reference", "tool_name": "paint"}


def with_tools(*tools: Any, content: Any = (FOUND,), **fields: Any) -> MessagesRequest:
    body = messages_of(list(content)).model_dump(exclude_none=True, mode="json")
    return MessagesRequest.model_validate({**body, "tools": tools, **fields})


def names_shown(body: MessagesRequest) -> list[str]:
    """The tools at the beginning of the prompt."""
    tools: list[Any] = body.chat_options().tools
    return [tool["function"]["name"] for tool in tools]


def test_a_tool_that_comes_late_is_described_where_it_was_found() -> None:
    before, body = with_tools(WEATHER, content=[]), with_tools(WEATHER, PAINT, content=[FOUND, FOUND])
    assert body.chat_options() == before.chat_options()
    assert body.template_messages()[:-1] == before.template_messages()[:-1]
    first, second = body.template_messages()[-1]["content"].split("\n")
    assert first.startswith(
        'paint: {"type": "function", "function": {"name": "paint", "description": "Paints ü.", "parameters": {"'
    )
    assert second == "paint"
    assert [function.name for function in body.functions_to_call()] == ["get_weather", "paint"]


@pytest.mark.parametrize(
    ("tools", "fields", "names"),
    [
        ([WEATHER, {**PAINT, "defer_loading": False}], {}, ["get_weather", "paint"]),
        ([WEATHER, PAINT], {"content": []}, ["get_weather", "paint"]),  # nothing else would show it
        ([PAINT], {}, ["paint"]),  # templates explain calls only beside tools
        ([WEATHER, PAINT], {"tool_choice": {"type": "none"}}, []),
    ],
)
def test_a_tool_that_no_result_describes_is_shown_at_the_beginning(tools: Any, fields: Any, names: list[str]) -> None:
    body = with_tools(*tools, **fields)
    assert names_shown(body) == names
    assert body.template_messages()[-1]["content"] in ("", "paint")
