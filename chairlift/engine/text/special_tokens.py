"""The spellings of special tokens in texts, and how texts are cut so that none of them is parsed as one."""

import re
from collections.abc import Collection, Iterator
from typing import Any


class SpecialTokens:
    """Spellings of special tokens, and where text contains them. Tokens of one character are left out."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = frozenset(text for text in texts if len(text) > 1)
        spelled = "|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))) or "(?!)"
        self._anywhere = re.compile(spelled)
        self._first_character = re.compile(f"(?=(?:{spelled})).", re.DOTALL)  # also where two overlap
        self._beginnings = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))
        self._max_beginning = max(map(len, self._beginnings), default=0)

    def are_in(self, text: str) -> bool:
        """True if the text contains a special token, or ends with what may be the beginning of one."""
        return self._anywhere.search(text) is not None or self._ends_open(text.rstrip())

    def split(self, text: str) -> list[str]:
        """The text cut before and after each special token in it, without empty parts."""
        parts, begin = [], 0
        for match in self._anywhere.finditer(text):
            parts += [text[begin : match.start()], match[0]]
            begin = match.end()
        return [part for part in (*parts, text[begin:]) if part]

    def cut(self, value: Any, cut: str) -> Any:
        """Copies strings, lists and dicts, with the character `cut` within each special token in them.

        It also stands after the beginning of one at the end of a string: the template might complete it with the next.
        """
        if isinstance(value, str):
            text = self._first_character.sub(f"\\g<0>{cut}", value)
            end = len(text.rstrip())
            return f"{text[:end]}{cut}{text[end:]}" if self._ends_open(text[:end]) else text
        if isinstance(value, dict):
            return {self.cut(key, cut): self.cut(each, cut) for key, each in value.items()}
        return [self.cut(each, cut) for each in value] if isinstance(value, list | tuple) else value

    def _ends_open(self, text: str) -> bool:
        sizes = range(1, min(self._max_beginning, len(text)) + 1)
        return any(text[-size:] in self._beginnings for size in sizes)


def strings_in(value: Any) -> Iterator[str]:
    """All strings in lists and dicts, including keys, at any depth."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack += value.keys()
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
