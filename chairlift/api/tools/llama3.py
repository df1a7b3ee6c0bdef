"""Llama 3: the whole answer is `{"name": "f", "parameters": {...}}`, or several of them with `;` or whitespace between.

`<|python_tag|>` may stand before a call. An answer that begins with anything else is content from its first character
to its last. So is one that begins like a call and is none, be it the JSON that the user asked for.
"""

from chairlift.api.tools.answer_parser import AnswerParser, State
from chairlift.api.tools.family import PYTHON_TAG
from chairlift.api.tools.json_value import WHITESPACE

_SEPARATOR = ";"


class Llama3JsonParser(AnswerParser):
    """See `ToolCallParser`."""

    must_have_arguments = True  # an object with a name is not a call yet
    after_failure = State.PLAIN

    def _read_lead(self, text: str) -> str:
        return self._read_ahead(text, text.lstrip(WHITESPACE))

    def _read_tail(self, text: str) -> str:
        return self._read_ahead(text, _past_separator(text))

    def _read_ahead(self, text: str, ahead: str) -> str:
        """`ahead` is the end of the text where a call may begin."""
        if ahead.startswith(PYTHON_TAG):
            ahead = ahead[len(PYTHON_TAG) :].lstrip(WHITESPACE)
        if ahead.startswith("{"):
            self._begin_call(text[: -len(ahead)])
            return ahead
        if PYTHON_TAG.startswith(ahead):  # or there is nothing yet but whitespace
            self._held = text
            return ""
        self._state = State.PLAIN
        return text

    def _read_broken(self, text: str) -> str:
        self._add_arguments(text)
        return ""

    def _is_droppable(self, text: str) -> bool:
        return self._state is State.TAIL and not _past_separator(text)


def _past_separator(text: str) -> str:
    return text.lstrip(WHITESPACE).removeprefix(_SEPARATOR).lstrip(WHITESPACE)
