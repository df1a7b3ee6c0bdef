"""The recurrent states of slots: their tensors, and what a forward pass sees of them.

A layer with a recurrence keeps one float32 vector for each slot beside the keys and values of other layers. Layers
share a tensor, and each has its place in it, so that a copy of a state is a copy of one row:

    live [rows, elements]       the rows of slots, then those of snapshots
    pending [slots, most tentative tokens, inputs]

A state can only move forward, so the inputs of tokens that may be taken back are kept apart, and are applied once the
tokens are accepted. `state_books.py` knows how far each state has come.
"""

from dataclasses import dataclass, replace

import torch

from chairlift.cache.memory import allocate_blocks
from chairlift.plan import Reservation


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Locates a layer's state in the row of a slot, and its inputs among those of a pending token."""

    offset: int
    num_elements: int
    input_offset: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The states of a batch's rows, and how far each has come. Owns nothing.

    The state of row i stands at `starts[i] - num_replayed[i]`. It is zeros there at position 0, whatever the memory
    holds. Its next inputs are the replayed ones in `pending`, then those of the new tokens. The last `num_tentative[i]`
    of the new ones are not taken into the stored state; they are left in `pending`.
    """

    live: torch.Tensor  # float32 [rows, total elements]
    pending: torch.Tensor  # float32 [num_slots, max_tentative, total inputs]
    places: tuple[StatePlace | None, ...]  # by layer; None: it has no state
    slots: tuple[int, ...]  # row of the batch -> slot
    starts: tuple[int, ...]  # by row: the position of its first new token
    num_new: tuple[int, ...]  # by row
    num_replayed: tuple[int, ...]  # by row: pending inputs to apply before those of the new tokens
    num_tentative: tuple[int, ...]  # by row
    counts: torch.Tensor | None = None  # int32 [2, rows]: the last two, on the device, for a graph that is recorded
    # bool [rows], on the device: whether a row's new token is the one that ends its sequence, or comes after it. Such a
    # token, of which the host does not know yet, is tentative. None: every sequence goes on.
    has_ended: torch.Tensor | None = None

    def place(self, layer_idx: int) -> StatePlace:
        """Locates the state of a layer that has one."""
        place = self.places[layer_idx]
        assert place is not None, f"layer {layer_idx} has no state"
        return place

    def read_ends(self) -> "SlotStates":
        """Returns the same with what the device knows of ends in `num_tentative`. Waits for the device."""
        if self.has_ended is None:
            return self
        pairs = zip(self.has_ended.tolist(), self.num_tentative, strict=True)
        return replace(self, num_tentative=tuple(1 if ended else count for ended, count in pairs), has_ended=None)

    def next_step(self) -> "SlotStates":
        """Returns what the next step of a launch sees, in which every row has one new token."""
        nothing = (0,) * len(self.slots)
        return replace(
            self,
            starts=tuple(map(sum, zip(self.starts, self.num_new, strict=True))),
            num_new=(1,) * len(self.slots),
            num_replayed=nothing,
            num_tentative=nothing,
        )


class StateMemory:
    """The states of all slots and snapshots on one device, and the pending inputs of slots."""

    def __init__(
        self,
        places: tuple[StatePlace | None, ...],
        num_slots: int,
        num_snapshots: int,
        max_tentative: int,
        device: torch.device,
    ) -> None:
        """`places`: by layer, at least one of them. MemoryError, or RuntimeError as torch does, without memory."""
        last = next(place for place in reversed(places) if place is not None)
        num_elements, num_inputs = last.offset + last.num_elements, last.input_offset + last.num_inputs
        self._places = places
        self._num_slots = num_slots
        # One plane per row, so that what was never written takes no memory where memory is elastic.
        self._live = allocate_blocks([num_slots + num_snapshots, 1, 1, num_elements], torch.float32, device)
        self._pending = allocate_blocks([num_slots, 1, 1, max_tentative, num_inputs], torch.float32, device)
        self.live = self._live.blocks[:, 0, 0]  # [rows, elements]
        self.pending = self._pending.blocks[:, 0, 0]  # [num_slots, max_tentative, inputs]

    def view(self, reservation: Reservation, num_steps: int) -> SlotStates:
        """Returns what the first of these steps sees."""
        return SlotStates(
            live=self.live,
            pending=self.pending,
            places=self._places,
            slots=reservation.seq_ids,
            starts=reservation.lengths,
            num_new=tuple(reserved - (num_steps - 1) for reserved in reservation.num_reserved),
            num_replayed=reservation.num_replayed,
            num_tentative=reservation.num_tentative,
        )

    def view_recorded(self, counts: torch.Tensor) -> SlotStates:
        """Returns what a graph sees while it is recorded: no numbers of rows, only tensors. `counts`: see there."""
        return SlotStates(self.live, self.pending, self._places, (), (), (), (), (), counts)

    def copy(self, source: int, target: int) -> None:
        """Copies the state of one row to another."""
        self.live[target].copy_(self.live[source])

    def clear(self, row: int) -> None:
        """Zeroes a row, and frees its memory where that is elastic."""
        self._live.clear(row, 0, self.live.shape[1])
        if row < self._num_slots:
            self._pending.clear(row, 0, self.pending.shape[1])
