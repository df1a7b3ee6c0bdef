"""Keeps how far the recurrent state of each slot has come. Plain Python, no tensors; not thread-safe.

A state cannot go back, so it stops before tokens that may be taken back. Their inputs are pending, and the next row of
the slot applies those of them that count before its own (`num_replayed`):

    tokens  |=========================|- - pending - -|
            0                     position           reach

A slot of `num_tokens` valid tokens can go on if they end between the two. Otherwise its state stands at 0 again, where
it is zeros whatever the memory holds; one that holds tokens then needs the state of another row.
"""

from collections.abc import Container

from chairlift.cache.snapshots import Snapshots

PROMPT_TAIL = 8
"""Tokens at the end of a prompt that its state takes with the next row only: what a chat template puts before an answer
is often not in the next turn, so a state before it is good for more prompts than one behind it."""


class StateBooks:
    """Positions and pending inputs of the live states, by slot, and the states that are kept beside them."""

    def __init__(self, num_slots: int, max_tentative: int, num_snapshots: int = 0, row_bytes: int = 0) -> None:
        """`max_tentative`: tokens at the end of a row that may be taken back. `row_bytes`: of one state."""
        self.max_tentative = max_tentative
        self.stops_at_ends = False  # no state takes an end token, or what a launch computes after one
        self.row_bytes = row_bytes
        self.snapshots = Snapshots(num_slots, num_snapshots)
        self._positions = [0] * num_slots
        self._reaches = [0] * num_slots
        self._written = set[int]()  # slots whose states take memory

    def position(self, slot: int) -> int:
        """Returns how many tokens the slot's state has taken."""
        return self._positions[slot]

    def reach(self, slot: int) -> int:
        """Returns how many tokens it would have taken with all pending inputs."""
        return self._reaches[slot]

    def stand(self, slot: int, position: int, num_pending: int = 0) -> None:
        """Records how many tokens the slot's state has taken, and how many inputs are pending after these."""
        self._positions[slot], self._reaches[slot] = position, position + num_pending
        if position + num_pending:
            self._written.add(slot)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Records that only the first `num_tokens` tokens of the slot count."""
        if self._positions[slot] > num_tokens:
            self.stand(slot, 0)
        self._reaches[slot] = min(self._reaches[slot], num_tokens)

    def stop(self, slot: int, num_tokens: int) -> None:
        """Records that the slot's state took `num_tokens` tokens only, because the last one of its sequence follows."""
        if self._positions[slot] > num_tokens:
            self.stand(slot, num_tokens)

    def reclaim_unused(self, claimed: Container[int]) -> list[int]:
        """Returns the rows that have memory but no state, so that the caller frees it."""
        unused = [slot for slot in sorted(self._written) if slot not in claimed and not self._positions[slot]]
        self._written.difference_update(unused)
        for slot in unused:
            self._reaches[slot] = 0  # its pending inputs are freed as well
        return unused + self.snapshots.reclaim_unused()

    def num_replayed(self, slot: int, num_tokens: int) -> int:
        """Returns how many pending inputs lead to `num_tokens` tokens. ValueError if the state cannot get there."""
        position = self._positions[slot]
        if not position <= num_tokens <= self._reaches[slot]:
            raise ValueError(
                f"slot {slot} cannot go on after {num_tokens} tokens: its state has taken {position}, and pending"
                f" inputs reach to {self._reaches[slot]}"
            )
        return num_tokens - position

    def check_tentative(self, slot: int, num_tentative: int, num_new: int, num_steps: int) -> None:
        """ValueError if so many of a row's new tokens cannot be tentative."""
        most = min(num_new, self.max_tentative) if num_steps == 1 else 0
        if not 0 <= num_tentative <= most:
            raise ValueError(f"slot {slot}: {num_tentative} of {num_new} new tokens cannot be tentative, {most} can")
