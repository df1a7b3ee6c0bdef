"""The ids of tool calls, for chat templates that accept only ids of nine letters and digits, as Mistral's do."""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

_NEEDS_SHORT = re.compile(r"id\s*\|\s*length\s*!=\s*9")
_SHORT = re.compile(r"[A-Za-z0-9]{9}")


def needs_short_ids(template: str) -> bool:
    """True if a chat template (Jinja source) refuses ids of another length."""
    return _NEEDS_SHORT.search(template) is not None


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with nine letters and digits in place of every other id of a call: equal ones for equal ids, in
    every request, so that results still belong to their calls, and prompts begin alike.
    """
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if isinstance(message.get("tool_call_id"), str):
        more["tool_call_id"] = _short(message["tool_call_id"])
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        more["tool_calls"] = [
            {**call, "id": _short(str(call.get("id", index)))} if isinstance(call, dict) else call
            for index, call in enumerate(calls)
        ]
    return {**message, **more}


def _short(call_id: str) -> str:
    return call_id if _SHORT.fullmatch(call_id) else sha256(call_id.encode(errors="replace")).hexdigest()[:9]
