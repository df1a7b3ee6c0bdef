"""Hermes: text, then `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` any number of times.

Text is content wherever it stands, without the whitespace just before a call; whitespace alone after a call is dropped.
"""

from chairlift.api.tools.answer_parser import AnswerParser, State
from chairlift.api.tools.family import CALL_CLOSING, CALL_OPENING
from chairlift.api.tools.json_value import WHITESPACE


class HermesParser(AnswerParser):
    """See `ToolCallParser`."""

    must_have_arguments = False  # the markers say that it is a call
    after_failure = State.LEAD

    def _read_lead(self, text: str) -> str:
        at = text.find(CALL_OPENING)
        end = at if at >= 0 else len(text) - _num_marker_begun(text, CALL_OPENING)
        content = text[:end].rstrip(WHITESPACE)
        self._add_content(content)
        if at < 0:
            self._held = text[len(content) :]
            return ""
        end += len(CALL_OPENING)
        self._begin_call(text[len(content) : end])
        return text[end:]

    def _read_tail(self, text: str) -> str:
        stripped = text.lstrip(WHITESPACE)
        if CALL_CLOSING.startswith(stripped[: len(CALL_CLOSING)]):
            if len(stripped) < len(CALL_CLOSING):
                self._held = text
                return ""
            text = stripped[len(CALL_CLOSING) :]
        self._state = State.LEAD
        return text

    def _read_broken(self, text: str) -> str:
        at = text.find(CALL_CLOSING)
        end = at if at >= 0 else len(text) - _num_marker_begun(text, CALL_CLOSING)
        self._add_arguments(text[:end])
        if at < 0:
            self._held = text[end:]
            return ""
        self._end_call(State.LEAD)
        return text[end + len(CALL_CLOSING) :]

    def _is_droppable(self, text: str) -> bool:
        if self._state is State.TAIL:  # a closing marker that was cut off, at most
            return True
        return self._num_calls > 0 and not self._has_text and not text.strip(WHITESPACE)


def _num_marker_begun(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)
