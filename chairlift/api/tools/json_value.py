"""Finds where one JSON value ends in text that comes in pieces. It tracks strings, escapes and depth only."""

import re
from enum import Enum, auto

WHITESPACE = " \t\n\r"
"""What JSON calls whitespace."""

_SCALAR_RUN = re.compile(r"[0-9A-Za-z+.-]*")
_CONTAINER_RUN = re.compile(r"[0-9A-Za-z+.,: \t\n\r-]*")
_STRING_RUN = re.compile(r'[^"\\]*')


class ScanState(Enum):
    READING = auto()
    COMPLETE = auto()
    MALFORMED = auto()


class ValueScanner:
    """One value, from its first character on: a number or word ends before the character that is not part of it."""

    def __init__(self) -> None:
        self.state = ScanState.READING
        self._depth = 0
        self._is_scalar = False
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, position: int) -> int:
        """Reads on at `position`. Returns where the value's characters end, or the one that cannot be part of it."""
        while position < len(text) and self.state is ScanState.READING:
            if self._is_in_string:
                position = self._scan_string(text, position)
            elif self._is_scalar:
                position = self._scan_scalar(text, position)
            else:
                position = self._scan_structure(text, position)
        return position

    def _scan_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        position = _run_end(_STRING_RUN, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._is_escaped = True
        else:
            self._is_in_string = False
            self._complete_at_depth_zero()
        return position + 1

    def _scan_scalar(self, text: str, position: int) -> int:
        end = _run_end(_SCALAR_RUN, text, position)
        if end < len(text):
            self.state = ScanState.COMPLETE
        return end

    def _scan_structure(self, text: str, position: int) -> int:
        if self._depth:
            position = _run_end(_CONTAINER_RUN, text, position)
            if position == len(text):
                return position
        char = text[position]
        if char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._complete_at_depth_zero()
        elif not self._depth and _run_end(_SCALAR_RUN, char, 0):
            self._is_scalar = True
        else:
            self.state = ScanState.MALFORMED
            return position
        return position + 1

    def _complete_at_depth_zero(self) -> None:
        if not self._depth:
            self.state = ScanState.COMPLETE


def _run_end(run: re.Pattern[str], text: str, position: int) -> int:
    match = run.match(text, position)
    assert match is not None  # a run may be empty
    return match.end()
