"""`/v1/responses`, read as strictly: its items become a `ParsedReply` of one choice."""

from typing import Any

from tests.soak.reply import Choice, ErrorEvent, ParsedReply, Wrong, parse_object, read_error
from tests.support.events import EventReader

_ENDS = {"completed": "stop", "incomplete": "length"}
_LAST_EVENTS = {"response.completed", "response.incomplete"}


def read_response(body: dict[str, Any]) -> ParsedReply:
    """A response that has come to its end."""
    if body["status"] not in _ENDS:
        raise Wrong(f"a response with status {body['status']}: {body['error']}")
    choice = Choice(finish_reason=_ENDS[body["status"]])
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


class ResponseStream:
    """A streamed response while it comes: numbered events, of which the last repeats all that the others brought."""

    def __init__(self) -> None:
        self.reply = ParsedReply()
        self.is_done = False
        self._reader = EventReader()
        self._num_events = 0
        self._text = ""
        self._arguments = ""

    def feed(self, piece: bytes) -> None:
        """Whatever bytes came."""
        for event in self._reader.feed(piece):
            self._take(event)

    def _take(self, event: bytes) -> None:
        if self.is_done:
            raise Wrong(f"after the last event came {event[:80]!r}")
        news = parse_object(event)
        if "error" in news:
            raise ErrorEvent(read_error(event))
        if news.get("sequence_number") != self._num_events:
            raise Wrong(f"event {self._num_events} says that it is {news.get('sequence_number')}")
        self._num_events += 1
        match news["type"]:
            case "response.output_text.delta":
                self._text += news["delta"]
            case "response.function_call_arguments.delta":
                self._arguments += news["delta"]
            case "response.failed" | "error":
                raise Wrong(f"the stream ended with {news}")
            case kind if kind in _LAST_EVENTS:
                self._finish(news["response"])

    def _finish(self, body: dict[str, Any]) -> None:
        self.is_done = True
        self.reply = read_response(body)
        choice = self.reply.choices[0]
        if self._text != choice.text or self._arguments != "".join(arguments for _, arguments in choice.calls):
            raise Wrong(f"the deltas made {self._text!r} and {self._arguments!r}, the whole is {choice}")
