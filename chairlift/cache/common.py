"""Which slots begin alike because one was copied from the other, so that all of them can be read in one place.

Attention that reads the same memory for every row finds it in the processor's caches from the second row on. A copy is
complete all the same: when the place where it is read goes, another copy takes its part.
"""

from dataclasses import dataclass

_MIN_TOKENS = 128  # fewer are not worth the books


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """The first tokens of some slot stand at the beginning of this one, too."""

    slot: int
    num_tokens: int


class CommonPrefixes:
    """By slot where else its beginning can be read. Every chain of copies leads to one place."""

    def __init__(self) -> None:
        self._prefixes: dict[int, CommonPrefix] = {}

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def of(self, slot: int) -> CommonPrefix:
        """That slot itself, with no tokens, if it has nothing in common with another."""
        return self._prefixes.get(slot) or CommonPrefix(slot, 0)

    def note_copy(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of `source` are now those of `target`, whatever that held before."""
        self.cut(target, 0)
        known = self.of(source)
        self._set(target, CommonPrefix(known.slot if known.num_tokens >= num_tokens else source, num_tokens))

    def cut(self, slot: int, num_kept: int) -> None:
        """What a slot holds beyond its first tokens will be overwritten."""
        if not self._prefixes:
            return
        own = self.of(slot)
        self._set(slot, CommonPrefix(own.slot, min(own.num_tokens, num_kept)))
        losing = {
            each: prefix.num_tokens
            for each, prefix in self._prefixes.items()
            if prefix.slot == slot and prefix.num_tokens > num_kept
        }
        if losing:
            heir = max(losing, key=lambda each: losing[each])
            for each, num_tokens in losing.items():
                self._set(each, CommonPrefix(heir, 0 if each == heir else num_tokens))

    def _set(self, slot: int, prefix: CommonPrefix) -> None:
        if prefix.num_tokens >= _MIN_TOKENS:
            self._prefixes[slot] = prefix
        else:
            self._prefixes.pop(slot, None)
