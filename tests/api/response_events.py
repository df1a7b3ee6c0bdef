"""What the tests of `/v1/responses` streams share: the strictest reading of events."""

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

_ADDED, _DONE = "response.output_item.added", "response.output_item.done"
MESSAGE_EVENTS = [
    *(_ADDED, "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", _DONE),
]
CALL_EVENTS = [_ADDED, *(f"response.function_call_arguments.{kind}" for kind in ("delta", "done")), _DONE]
_ANY_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)  # which takes a while to make
OPENING, COMPLETED = ["response.created", "response.in_progress"], "response.completed"


@dataclass
class Events:
    """A stream's events in order."""

    all: list[dict[str, Any]]

    @classmethod
    def of(cls, raw: str) -> "Events":
        """Each event has its type for a name, its number, and a shape that the client's models read strictly."""
        *blocks, rest = raw.split("\n\n")
        assert rest == ""
        payloads = []
        for block in (each for each in blocks if not each.startswith(":")):
            name, data = block.split("\n")
            payloads.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {payloads[-1]['type']}"
            _ANY_EVENT.validate_json(json.dumps(payloads[-1]), strict=True)
        assert [each["sequence_number"] for each in payloads] == list(range(len(payloads)))
        return cls(payloads)

    @property
    def types(self) -> list[str]:
        """Deltas in a row count as one."""
        return [kind for kind, _ in groupby(each["type"] for each in self.all)]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.all if each["type"] == kind]

    def joined(self, kind: str, output_index: int = 0) -> str:
        return "".join(each["delta"] for each in self.of_type(kind) if each["output_index"] == output_index)

    @property
    def last_response(self) -> dict[str, Any]:
        response: dict[str, Any] = [each for each in self.all if "response" in each][-1]["response"]
        return response


def without_identity(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request have in common; the second may have reused the first one's prompt."""
    items = [{**item, "id": None, "call_id": None} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}
    return {**response, "id": None, "created_at": None, "completed_at": None, "output": items, "usage": usage}
