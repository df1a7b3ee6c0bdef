"""The marks at which regions begin and end, and how they are found in a text that is not complete yet.

A match is final, and text before it is passed on, only if no longer text could change that. Let P be a pattern and N a
character that no text has. The leftmost place at which P followed by N matches as far as the text goes is the leftmost
place from which more text could still become a match, or make one longer. A complete match of P before that place is
what the whole text has there. So the result is the same however the text is split. This holds for patterns that only
go forward. Those that look back, exclude what follows, or refer to earlier parts are applied to the complete text.

Patterns come from files that anybody may have written, and the text from clients' requests, so time is limited.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import regex

from chairlift.api.answers.text import Sighting, num_begun_of

MAX_CPU_S = 0.1  # of a search, as the module regex counts it: the time of all threads of the process

_NEVER = "\U0010fffe"  # not a character, by definition
_TOKENS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P?<\w+>|:|=|.[^:)]*)?|(?:\{\d*,?\d*\}|[*+?])[+?]?|.", re.DOTALL
)
_LEADING_SPACE = re.compile(r"\\s\*(?![?+|]|\Z)")
_SYNTAX = ".^$|()*+?{}[]\\"
_FORWARD_GROUPS = re.compile(r"\(\?(?:P?<\w+>|:|=)")
_FORWARD_ESCAPES = "sSdDwWnrtfvpPxuUZ"
_PROBES = ("a" * 300, " \n" * 500, "<" * 300, "ab1 " * 200, '{"a": "b"}, ' * 50)

_Whose = TypeVar("_Whose")


class Pattern:
    """A pattern that is searched for in a growing text; a mark is a pattern as well."""

    def __init__(self, source: str) -> None:
        """ValueError if the pattern is wrong, matches the empty text everywhere, or takes long on harmless texts."""
        given = source
        source = _LEADING_SPACE.sub("", given, count=1) if _LEADING_SPACE.match(given) else given
        self.drops_space = source != given  # whitespace before a mark is held back anyway
        steady = _steady(source)
        self.is_steady = steady is not None
        body = source if steady is None else steady
        try:
            self._complete = regex.compile(body, regex.DOTALL)
            self._growing = regex.compile(f"(?:{body}){_NEVER}", regex.DOTALL)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a regular expression: {error}") from error
        longest = _longest_literal(source)
        self.literals: tuple[str, ...] = (longest,) if longest else ()  # one of which every match has
        self.begins: tuple[str, ...] = (_leading_literal(source),) if longest else ()  # likewise, and begins with
        self.first_characters = _first_characters(source)
        self.names = frozenset(self._complete.groupindex)
        self._marks: tuple[str, ...] = ()  # if it is any of these texts
        try:
            found = [(self.search(probe, 0), self.find_partial(probe, 0)) for probe in _PROBES]
        except TimeoutError as error:
            raise ValueError("it takes too long") from error
        if all(match is not None and match.end() == 0 for match, _ in found):
            raise ValueError("it matches the empty text")

    @classmethod
    def of_marks(cls, marks: Sequence[str]) -> "Pattern":
        """Any of these texts, the longest that there is."""
        pattern = cls("|".join(map(regex.escape, sorted(marks, key=len, reverse=True))))
        pattern.literals = pattern.begins = pattern._marks = tuple(marks)
        return pattern

    def search(self, text: str, at: int) -> "regex.Match[str] | None":
        """The leftmost match in the text as it is. TimeoutError if that takes too long."""
        return self._complete.search(text, at, timeout=MAX_CPU_S)

    def find_partial(self, text: str, at: int) -> int:
        """Finds the leftmost position at which a match may begin or grow if more text follows."""
        if self._marks:
            return len(text) - max(num_begun_of(mark, text, at) for mark in self._marks)
        found = self._growing.search(text, at, partial=True, timeout=MAX_CPU_S)
        return len(text) if found is None or not found.partial else int(found.start())


@dataclass(frozen=True, slots=True)
class Anchor(Generic[_Whose]):
    """A pattern that begins or ends a region, and what it means."""

    pattern: Pattern
    meaning: _Whose
    may_be_empty: bool = False  # it may match between two characters


@dataclass(frozen=True, slots=True)
class Found(Generic[_Whose]):
    """A mark in a text."""

    meaning: _Whose
    text: str
    captures: dict[str, str]
    drops_space: bool


class Searches:
    """Remembers what patterns have found in the text that is being read.

    A text is looked at anew behind each mark, for all patterns. Without this, one that occurs nowhere would be searched
    for up to the end of the text each time.
    """

    def __init__(self) -> None:
        self._text = ""
        self._matches: dict[Pattern, tuple[int, regex.Match[str] | None]] = {}  # and from where on it is the first
        self._partials: dict[Pattern, tuple[int, int]] = {}  # likewise

    def search(self, pattern: Pattern, text: str, at: int) -> "regex.Match[str] | None":
        """See `Pattern.search`."""
        self._turn_to(text)
        begin, match = self._matches.get(pattern, (len(text) + 1, None))
        if begin > at or (match is not None and match.start() < at) or not pattern.is_steady:
            match = pattern.search(text, at)
            self._matches[pattern] = at, match
        return match

    def find_partial(self, pattern: Pattern, text: str, at: int) -> int:
        """See `Pattern.find_partial`."""
        self._turn_to(text)
        begin, position = self._partials.get(pattern, (len(text) + 1, 0))
        if begin > at or position < at or not pattern.is_steady:
            position = pattern.find_partial(text, at)
            self._partials[pattern] = at, position
        return position

    def _turn_to(self, text: str) -> None:
        if text is not self._text:
            self._text = text
            self._matches.clear()
            self._partials.clear()


class Anchors(Generic[_Whose]):
    """The marks of which any may come next."""

    def __init__(self, anchors: Sequence[Anchor[_Whose]], searches: Searches) -> None:
        self._anchors = anchors
        self._searches = searches
        firsts = [anchor.pattern.first_characters for anchor in anchors]
        known = "".join(first for first in firsts if first is not None)
        # Most text has no character with which a mark begins.
        self._begins = None if None in firsts else re.compile(f"[{re.escape(known)}]" if known else "(?!)")

    def look(self, text: str, at: int, is_over: bool) -> Sighting[Found[_Whose]]:
        """The mark that begins leftmost, the longest of those, the first named of those. See `text.Look`."""
        partial = len(text)
        if self._begins is not None:
            begin = self._begins.search(text, at)
            if begin is None:
                return Sighting(partial)
            at = begin.start()
        best: tuple[tuple[int, int], Anchor[_Whose], regex.Match[str]] | None = None
        for anchor in self._anchors:
            match = self._searches.search(anchor.pattern, text, at)
            if match is not None and (match.end() > match.start() or anchor.may_be_empty):
                rank = (match.start(), -match.end())
                best = (rank, anchor, match) if best is None or rank < best[0] else best
            if not is_over:
                partial = min(partial, self._searches.find_partial(anchor.pattern, text, at))
        if best is None or (best[2].start() >= partial and not is_over):
            return Sighting(partial)
        _, anchor, match = best
        captures = {name: value for name, value in match.groupdict().items() if value is not None}
        found = Found(anchor.meaning, match[0], captures, anchor.pattern.drops_space)
        return Sighting(match.start(), match.end(), found)


def _first_characters(source: str) -> str | None:
    """The characters with which a match may begin; None if they are not known."""
    first, depth, is_begin = "", 0, True
    tokens = _TOKENS.findall(source)
    for part, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if is_begin:
            if not _is_literal(part) or following[:1] in ("*", "?", "{"):
                return None
            first += part[-1]
        depth += part.startswith("(") - (part == ")")
        is_begin = part == "|" and not depth
    return first


def _is_literal(token: str) -> bool:
    is_escaped = len(token) == 2 and token[0] == "\\" and not token[1].isalnum()
    return is_escaped or (len(token) == 1 and token not in _SYNTAX)


def _longest_literal(source: str) -> str:
    """The longest text outside of groups that every match has; empty if there is none."""
    runs, depth = [""], 0
    for match in _TOKENS.finditer(source):
        part = match[0]
        if part == "|" and not depth:
            return ""
        depth += part.startswith("(") - (part == ")")
        if not depth and _is_literal(part):
            runs[-1] += part[-1]
            continue
        if part[0] in "*?{":
            runs[-1] = runs[-1][:-1]  # it belongs to the last character
        runs.append("")
    return max(runs, key=len)


def _leading_literal(source: str) -> str:
    """The text with which every match of a pattern without alternatives begins."""
    text = ""
    tokens = _TOKENS.findall(source)
    for part, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if not _is_literal(part) or following[:1] in ("*", "?", "{"):
            break
        text += part[-1]
    return text


def _steady(source: str) -> str | None:
    """The pattern, with `\\Z` for `$`, if it only goes forward; None if not."""
    parts: list[str] = []
    for match in _TOKENS.finditer(source):
        part = match[0]
        is_escape = len(part) == 2 and part[0] == "\\"
        if is_escape and part[1].isalnum() and part[1] not in _FORWARD_ESCAPES:
            return None
        if part == "^" or (part.startswith("(?") and not _FORWARD_GROUPS.fullmatch(part)):
            return None
        if len(part) > 1 and part[-1] == "+" and part[0] in "*+?{":
            return None
        parts.append(r"\Z" if part == "$" else part)
    return "".join(parts)
