"""The form in which a chat template reads what a message says: a text, or a list of parts.

Templates of models that also see images go through parts, `[{"type": "text", "text": ...}]`, and some of them show
nothing of a text, without an error; others show nothing of parts. What a template reads is found by trying: a probe
conversation is rendered in both forms, role by role, because templates treat roles differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Render = Callable[[list[dict[str, Any]]], str | None]
"""Renders messages; None if the template refuses them."""

_USER, _SYSTEM, _ASSISTANT, _TOOL = "user", "system", "assistant", "tool"
_CALL_ID = "chairlift"  # nine letters and digits, which is what Mistral's templates require
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
_PROBES = {  # user first: the others have users' messages beside theirs
    _USER: ((_USER,), (_SYSTEM, _USER)),
    _SYSTEM: ((_SYSTEM, _USER),),
    _ASSISTANT: ((_USER, _ASSISTANT, _USER), (_USER, _ASSISTANT)),
    _TOOL: ((_USER, _ASSISTANT, _TOOL), (_SYSTEM, _USER, _ASSISTANT, _TOOL)),
}
"""Conversations to try for each role: the roles of their messages."""


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The roles whose messages a template reads as parts, and those of which it shows nothing in either form."""

    in_parts: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()  # it renders no conversation with them

    def apply(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their content as a text, or as one part of text: some templates look at the first alone.

        Roles that were not tried are treated as users. A list that has anything but parts of text stays as it is.
        """
        return [self._in_form(message) if isinstance(message, dict) else message for message in messages]

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = str(message.get("role")), message.get("content")
        wants_parts = (role if role in _PROBES else _USER) in self.in_parts
        if isinstance(content, list) and content and all(map(_is_text_part, content)):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            return message
        return {**message, "content": [{"type": "text", "text": content}] if wants_parts else content}


NO_PARTS = ContentForms()


def find_content_forms(render: Render, default: ContentForms = NO_PARTS) -> ContentForms:
    """Tries both forms for each role, and prefers text where both are shown. `default`: for roles shown in neither."""
    in_parts, unseen, refused = set[str](), set[str](), set[str]()
    for role, conversations in _PROBES.items():
        shown = [
            _is_shown(render, conversation, role, in_parts | {role} if is_parts else in_parts)
            for is_parts in (False, True)
            for conversation in conversations
        ]
        as_text, as_parts = shown[: len(conversations)], shown[len(conversations) :]
        if True not in as_text and (True in as_parts or role in default.in_parts):
            in_parts.add(role)
        if True not in shown:
            (unseen if False in as_text else refused).add(role)
    return ContentForms(frozenset(in_parts), frozenset(unseen), frozenset(refused))


def _is_shown(render: Render, roles: Sequence[str], probed: str, in_parts: set[str]) -> bool | None:
    """True if the template shows what the probed role says; None if it refuses the conversation."""
    said = f"This is what the {probed} says."
    messages: list[dict[str, Any]] = []
    for role in roles:
        message: dict[str, Any] = {"role": role, "content": said if role == probed else "Something else."}
        if role == _ASSISTANT and _TOOL in roles:
            message |= {"content": "", "tool_calls": [_CALL]}
        elif role == _TOOL:
            message |= {"tool_call_id": _CALL_ID, "name": "probe"}
        messages.append(message)
    rendered = render(ContentForms(frozenset(in_parts)).apply(messages))
    if rendered is None:
        return None
    # A template that prints the list itself does not read its parts.
    said, rendered = said.lower(), rendered.lower()
    return said in rendered and f"'text': '{said}" not in rendered and f'"text": "{said}' not in rendered


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
