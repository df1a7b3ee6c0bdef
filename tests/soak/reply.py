"""Replies read strictly: whole and streamed ones become a `ParsedReply`; what breaks the protocol is an error."""

import json
from abc import ABC, abstractmethod
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


def read_whole(raw: bytes) -> ParsedReply:
    """The reply of a request that did not stream."""
    body = parse_object(raw)
    reply = ParsedReply(usage=_get(body, "usage"))
    for item in _get(body, "choices"):
        choice = Choice(finish_reason=item["finish_reason"], num_scored=_num_scored(item))
        message = item.get("message")
        if message is None:
            choice.text = item["text"]
        else:
            choice.text = message["content"] or ""
            calls = [call["function"] for call in message.get("tool_calls", [])]
            choice.calls = [(call["name"], call["arguments"]) for call in calls]
        if reply.choices.setdefault(item["index"], choice) is not choice:
            raise Wrong(f"choice {item['index']} comes twice")
    return reply


def read_error(raw: bytes) -> dict[str, Any]:
    """The error of an error body, which must be OpenAI's, whatever the status."""
    error = _get(parse_object(raw), "error")
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        raise Wrong(f"an error of another shape: {error}")
    if not error["message"] or not error["type"]:
        raise Wrong(f"an error without words: {error}")
    return error


class EventStream(ABC):
    """A streamed reply while it comes. `Wrong` if the protocol is broken, `ErrorEvent` if the server says so."""

    def __init__(self) -> None:
        self.reply = ParsedReply()
        self.is_done = False
        self._reader = EventReader()

    def feed(self, piece: bytes) -> None:
        """Whatever bytes came."""
        for event in self._reader.feed(piece):
            if self.is_done:
                raise Wrong(f"after the end came {event[:80]!r}")
            if event == DONE:
                self.is_done = True
                continue
            chunk = parse_object(event)
            if "error" in chunk:
                raise ErrorEvent(read_error(event))
            self._take(chunk)

    @abstractmethod
    def _take(self, chunk: dict[str, Any]) -> None: ...


class ChunkStream(EventStream):
    """Chunks of completions or of a chat, and [DONE]."""

    def __init__(self) -> None:
        super().__init__()
        self._identity: tuple[object, ...] | None = None

    def _take(self, chunk: dict[str, Any]) -> None:
        identity = tuple(_get(chunk, name) for name in ("id", "created", "model", "object"))
        if self._identity not in (None, identity):
            raise Wrong(f"one stream, two identities: {self._identity} and {identity}")
        self._identity = identity
        if self.reply.usage is not None:
            raise Wrong("a chunk after the usage")
        self._take_choices(_get(chunk, "choices"))
        if chunk.get("usage") is not None:
            if chunk["choices"]:
                raise Wrong("a usage chunk with choices")
            self.reply.usage = chunk["usage"]

    def _take_choices(self, items: Iterable[dict[str, Any]]) -> None:
        for item in items:
            is_new = item["index"] not in self.reply.choices
            choice = self.reply.choices.setdefault(item["index"], Choice())
            if choice.finish_reason is not None:
                raise Wrong(f"choice {item['index']} goes on after its end")
            delta = item.get("delta")
            if delta is None:
                choice.text += item["text"]
            else:
                if is_new != ("role" in delta):
                    raise Wrong("the role belongs into a choice's first chunk, and nowhere else")
                _add_delta(choice, delta)
            choice.num_scored += _num_scored(item)
            choice.finish_reason = item["finish_reason"]


def _add_delta(choice: Choice, delta: dict[str, Any]) -> None:
    choice.text += delta.get("content") or ""
    for call in delta.get("tool_calls", []):
        if call["index"] == len(choice.calls):
            choice.calls.append((call["function"]["name"], ""))
        name, arguments = choice.calls[call["index"]]
        choice.calls[call["index"]] = (name, arguments + call["function"].get("arguments", ""))


def _num_scored(item: dict[str, Any]) -> int:
    logprobs = item.get("logprobs")
    if logprobs is None:
        return 0
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])


def parse_object(raw: bytes) -> dict[str, Any]:
    """JSON that must be an object."""
    try:
        parsed = json.loads(raw)
    except ValueError as error:
        raise Wrong(f"no JSON: {raw[:200]!r}") from error
    if not isinstance(parsed, dict):
        raise Wrong(f"no JSON object: {raw[:200]!r}")
    return parsed


def _get(body: dict[str, Any], name: str) -> Any:
    if name not in body:
        raise Wrong(f"{name} is missing in {str(body)[:200]}")
    return body[name]


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
    used = body["usage"]
    usage = {
        "prompt_tokens": used["input_tokens"],
        "completion_tokens": used["output_tokens"],
        "total_tokens": used["total_tokens"],
    }
    return ParsedReply({0: choice}, usage)


class ResponseStream(EventStream):
    """Numbered events of a response, of which the last repeats all that the others brought."""

    def __init__(self) -> None:
        super().__init__()
        self._num_events = 0
        self._text = ""
        self._arguments = ""

    def _take(self, chunk: dict[str, Any]) -> None:
        if chunk.get("sequence_number") != self._num_events:
            raise Wrong(f"event {self._num_events} says that it is {chunk.get('sequence_number')}")
        self._num_events += 1
        match chunk["type"]:
            case "response.output_text.delta":
                self._text += chunk["delta"]
            case "response.function_call_arguments.delta":
                self._arguments += chunk["delta"]
            case "response.failed" | "error":
                raise Wrong(f"the stream ended with {chunk}")
            case "response.completed" | "response.incomplete":
                self._finish(chunk["response"])

    def _finish(self, body: dict[str, Any]) -> None:
        self.is_done = True
        self.reply = read_response(body)
        choice = self.reply.choices[0]
        if self._text != choice.text or self._arguments != "".join(arguments for _, arguments in choice.calls):
            raise Wrong(f"the deltas made {self._text!r} and {self._arguments!r}, the whole is {choice}")
