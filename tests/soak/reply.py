"""Replies read strictly: whole and streamed ones become a `ParsedReply`; what breaks the protocol is an error."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.events import EventReader

DONE = b"[DONE]"
_ENDS = {"stop", "length", "tool_calls"}
_RESPONSE_ENDS = {"completed": "stop", "incomplete": "length"}


class Wrong(Exception):
    """The reply is not what it should be."""


class ErrorEvent(Exception):
    """The stream ended with an error object."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(json.dumps(error))
        self.code = error["code"]


@dataclass(slots=True)
class Choice:
    """One answer: its text, its tool calls (name and arguments) and the number of its scored tokens."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    num_scored: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class ParsedReply:
    """All answers by their index."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def check_complete(self, num_choices: int) -> None:
        """Every choice is there once and has ended as a choice may end."""
        if set(self.choices) != set(range(num_choices)):
            raise Wrong(f"choices {sorted(self.choices)} where there should be {num_choices}")
        for index, choice in self.choices.items():
            if choice.finish_reason not in _ENDS:
                raise Wrong(f"choice {index} ended with finish_reason {choice.finish_reason!r}")
        usage = self.usage
        if usage is not None and usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
            raise Wrong(f"a usage that does not add up: {usage}")


def parse_object(raw: bytes) -> dict[str, Any]:
    """JSON that must be an object."""
    try:
        parsed = json.loads(raw)
    except ValueError as error:
        raise Wrong(f"no JSON: {raw[:200]!r}") from error
    if not isinstance(parsed, dict):
        raise Wrong(f"no JSON object: {raw[:200]!r}")
    return parsed


def read_error(raw: bytes) -> dict[str, Any]:
    """The error of an error body, which must be OpenAI's, whatever the status."""
    error = _get(parse_object(raw), "error")
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        raise Wrong(f"an error of another shape: {error}")
    if not error["message"] or not error["type"]:
        raise Wrong(f"an error without words: {error}")
    return error


def read_whole(raw: bytes) -> ParsedReply:
    """A completion or a chat that did not stream."""
    body = parse_object(raw)
    reply = ParsedReply(usage=_get(body, "usage"))
    for item in _get(body, "choices"):
        choice = Choice(finish_reason=item["finish_reason"], num_scored=_num_scored(item))
        message = item.get("message", {})
        choice.text = (message["content"] or "") if message else item["text"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        choice.calls = [(call["name"], call["arguments"]) for call in calls]
        if reply.choices.setdefault(item["index"], choice) is not choice:
            raise Wrong(f"choice {item['index']} comes twice")
    return reply


def read_response(body: dict[str, Any]) -> ParsedReply:
    """A response that has come to its end."""
    if body["status"] not in _RESPONSE_ENDS:
        raise Wrong(f"a response with status {body['status']}: {body['error']}")
    choice = Choice(finish_reason=_RESPONSE_ENDS[body["status"]])
    for item in body["output"]:
        if item["type"] == "message":
            choice.text += "".join(part["text"] for part in item["content"])
        else:
            choice.calls.append((item["name"], item["arguments"]))
    if choice.calls and body["status"] == "completed":
        choice.finish_reason = "tool_calls"
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
    return ParsedReply({0: choice}, {ours: body["usage"][theirs] for ours, theirs in names.items()})


def read_stream(raw: bytes, is_response: bool) -> tuple[ParsedReply, bool]:
    """Returns what has come of a stream, and whether that is all of it. `ErrorEvent` if the server says so in the
    stream.
    """
    events = EventReader().feed(raw)
    is_done = events[-1:] == [DONE] and not is_response
    chunks = [parse_object(event) for event in (events[:-1] if is_done else events)]
    for event, chunk in zip(events, chunks, strict=False):
        if "error" in chunk:
            raise ErrorEvent(read_error(event))
    return _read_events(chunks) if is_response else (_read_chunks(chunks), is_done)


def _read_chunks(chunks: Iterable[dict[str, Any]]) -> ParsedReply:
    reply, identities = ParsedReply(), set()
    for chunk in chunks:
        identities.add(tuple(_get(chunk, name) for name in ("id", "created", "model", "object")))
        if len(identities) > 1:
            raise Wrong(f"one stream, two identities: {identities}")
        if reply.usage is not None:
            raise Wrong("a chunk after the usage")
        for item in _get(chunk, "choices"):
            _add_chunk(reply, item)
        reply.usage = chunk.get("usage")
        if reply.usage is not None and chunk["choices"]:
            raise Wrong("a usage chunk with choices")
    return reply


def _add_chunk(reply: ParsedReply, item: dict[str, Any]) -> None:
    is_new = item["index"] not in reply.choices
    choice, delta = reply.choices.setdefault(item["index"], Choice()), item.get("delta")
    if choice.finish_reason is not None:
        raise Wrong(f"choice {item['index']} goes on after its end")
    if delta is not None and is_new != ("role" in delta):
        raise Wrong("the role belongs into a choice's first chunk, and nowhere else")
    choice.text += item["text"] if delta is None else delta.get("content") or ""
    for call in (delta or {}).get("tool_calls", []):
        if call["index"] == len(choice.calls):
            choice.calls.append((call["function"]["name"], ""))
        name, arguments = choice.calls[call["index"]]
        choice.calls[call["index"]] = (name, arguments + call["function"].get("arguments", ""))
    choice.num_scored += _num_scored(item)
    choice.finish_reason = item["finish_reason"]


def _read_events(events: list[dict[str, Any]]) -> tuple[ParsedReply, bool]:
    """Numbered events of a response, of which the last repeats all that the others brought."""
    deltas = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
    for number, event in enumerate(events):
        if event.get("sequence_number") != number:
            raise Wrong(f"event {number} says that it is {event.get('sequence_number')}")
        if event["type"] in deltas:
            deltas[event["type"]] += event["delta"]
        elif event["type"] in ("response.failed", "error"):
            raise Wrong(f"the stream ended with {event}")
        elif event["type"] in ("response.completed", "response.incomplete"):
            if number != len(events) - 1:
                raise Wrong(f"after the end came {events[number + 1]}")
            reply = read_response(event["response"])
            whole = [reply.choices[0].text, "".join(arguments for _, arguments in reply.choices[0].calls)]
            if list(deltas.values()) != whole:
                raise Wrong(f"the deltas made {deltas}, the whole is {whole}")
            return reply, True
    return ParsedReply(), False


def _num_scored(item: dict[str, Any]) -> int:
    logprobs = item.get("logprobs") or {"tokens": []}
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])


def _get(body: dict[str, Any], name: str) -> Any:
    if name not in body:
        raise Wrong(f"{name} is missing in {str(body)[:200]}")
    return body[name]
