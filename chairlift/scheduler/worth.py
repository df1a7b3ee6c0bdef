"""Says which warm slots are most worth keeping beyond the life of the engine: those of most tokens times uses."""

from dataclasses import dataclass

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """The tokens of a warm slot, packed, of which the first `num_valid` can be reused."""

    slot: int
    tokens: bytes
    salt: str
    num_valid: int
    release: int  # the number of the release that made it warm


class SlotWorth:
    """Counts how often the tokens of each slot were used."""

    def __init__(self, slots: SlotLedger, index: PrefixIndex) -> None:
        """`index`: of the tokens of all warm slots, kept by others."""
        self._slots = slots
        self._index = index
        self.num_releases = 0
        self._releases = [0] * slots.num_slots  # by slot: the number of its latest
        self._uses = [0] * slots.num_slots  # by slot: requests that had its tokens, or copied some

    def note_owner(self, slot: int, num_kept: int) -> None:
        """Records that a slot was given to a request, with its first `num_kept` tokens."""
        self._uses[slot] = self._uses[slot] + 1 if num_kept else 1

    def note_copy(self, source: int) -> None:
        """Records that a request copied tokens of a slot."""
        self._uses[source] += 1

    def note_release(self, slot: int) -> None:
        """Records that a slot is released, and may be warm from here on."""
        self.num_releases += 1
        self._releases[slot] = self.num_releases

    def warm_prefixes(self) -> list[WarmPrefix]:
        """Lists what warm slots hold, that of most worth first."""
        warm = self._slots.warm
        slots = sorted(warm, key=lambda slot: -warm[slot] * self._uses[slot])
        return [WarmPrefix(slot, *self._index.entry(slot), warm[slot], self._releases[slot]) for slot in slots]
