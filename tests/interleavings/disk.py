"""A disk on which prefixes were saved before the search begins, or since a prompt was computed.

What is read comes part by part when the search says so, may be lost, and may come after nobody waits for it any more.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chairlift.cache.prefixes import pack_tokens
from chairlift.plan import SavedPart
from tests.interleavings.scope import Scope, numbers_of

PART_TOKENS = 64
_MIN_GAIN = 16
_TOKEN_TYPE = "i"


@dataclass(frozen=True)
class SavedNumbers:
    """The numbers of the tokens of a part."""

    numbers: tuple[int, ...]


@dataclass(slots=True)
class Reading:
    """The parts that are still to come."""

    parts: list[SavedPart]
    epoch: int  # in which it began


@dataclass
class Disk:
    """See `SavedPrefixes`."""

    scope: Scope
    epoch: int = 0
    saved: list[tuple[tuple[int, ...], str]] = field(default_factory=list)  # tokens and salts
    readings: dict[int, Reading] = field(default_factory=dict)  # by ticket
    cancelled: dict[int, Reading] = field(default_factory=dict)  # those that may still come
    num_tickets: int = 0

    def begin(self, tokens: bytes, salt: str, num_held: int, most: int) -> int | None:
        longest = max((self._num_common(each, tokens, salt, most) for each in self.saved), default=0)
        if min(longest, most) < num_held + _MIN_GAIN:
            return None
        known = list(array(_TOKEN_TYPE, tokens))[:longest]
        starts = range(num_held // PART_TOKENS * PART_TOKENS, longest, PART_TOKENS)
        ticket = self.num_tickets
        self.num_tickets += 1
        parts = [self._part(ticket, known, salt, start, is_last=start == starts[-1]) for start in starts]
        self.readings[ticket] = Reading(parts, self.epoch)
        return ticket

    def cancel(self, ticket: int) -> None:
        self.cancelled[ticket] = self.readings.pop(ticket)

    def forget(self, tokens: bytes, salt: str) -> None:
        known = tuple(array(_TOKEN_TYPE, tokens))
        self.saved = [each for each in self.saved if each[1] != salt or each[0][: len(known)] != known[: len(each[0])]]

    def forget_all(self) -> None:
        """Nothing that was saved is there any more."""
        self.saved = []
        self.epoch += 1

    def actions(self, left: Mapping[str, int]) -> Iterator[str]:
        """Lists what may happen to readings: their next part comes or is lost, or one comes that nobody waits for."""
        for ticket in self.readings:
            yield f"read {ticket}"
            if left["lose"]:
                yield f"lose {ticket}"
        if left["stale"]:
            yield from (f"stale {ticket}" for ticket in self.cancelled)

    def epoch_of(self, ticket: int) -> int:
        """The epoch in which a reading began."""
        return (self.readings.get(ticket) or self.cancelled[ticket]).epoch

    def read(self, verb: str, ticket: int) -> SavedPart:
        """Returns what comes of a reading if that happens."""
        if verb == "stale":
            return self.cancelled.pop(ticket).parts[-1]
        part = self.readings[ticket].parts.pop(0)
        if part.is_last or verb == "lose":
            del self.readings[ticket]
        return part if verb == "read" else SavedPart(ticket, part.start, part.start, None, is_last=True)

    def _num_common(self, each: tuple[Sequence[int], str], tokens: bytes, salt: str, most: int) -> int:
        """Tokens of a saved prefix that can be read for these: all of a state's, or whole parts."""
        saved, own_salt = each
        own = pack_tokens(saved)
        if self.scope.num_snapshots is not None:
            return len(saved) if own_salt == salt and tokens.startswith(own) and len(saved) <= most else 0
        whole = [end for end in range(PART_TOKENS, len(saved) + 1, PART_TOKENS) if tokens.startswith(own[: 4 * end])]
        return max(whole, default=0) if own_salt == salt else 0

    def _part(self, ticket: int, tokens: Sequence[int], salt: str, start: int, *, is_last: bool) -> SavedPart:
        end = min(start + PART_TOKENS, len(tokens))
        numbers = SavedNumbers(tuple(numbers_of(tokens[:end], salt)[start:]))
        has_state = is_last and self.scope.num_snapshots is not None
        return SavedPart(ticket, start, end, numbers, has_state, is_last)
