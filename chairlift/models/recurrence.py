"""Drives recurrent layers: takes each row's state through its tokens, one after the other, in float32.

A block says what a single token does to a state (`Step`). The rest is here, and the same for every kind: where states
and pending inputs are, in which order rows go, and where their states are stored. On a CUDA device with Triton a
block's kernels take all tokens of a batch in a few launches instead (`ragged_recurrence`).

    row          start   replayed   new   tentative     inputs of the row           stored after
    0 decodes    120     0          1     0             n                           the first
    1 guesses    77      2          4     3             r r n t t t                 the third
    2 prefills   0       0          5     0             n n n n n                   the fifth, beginning from zeros

A token gets the same bits however its sequence is divided into chunks, and whatever is beside it: `Step` gets the
tokens of several rows at once, and its functions treat each element alike. Torch's own `sum`, `sigmoid`, `silu` and
`softplus` do not, since the last elements of a tensor take another path than those before them; `add_up`, `sigmoid`,
`silu` and `softplus` below do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch

from chairlift.cache.layout import StateParams
from chairlift.cache.states import SlotStates, StatePlace
from chairlift.device import to_device

if TYPE_CHECKING:
    from chairlift.kernels.ragged import LayerStates, RaggedRows

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`step(state [n, num_elements], input [n, num_inputs]) -> output [n, outputs]`: takes one token of each row into its
state, in place. All are float32."""


class Recurrent(Protocol):
    """A block with a recurrence."""

    def make_step(self) -> Step:
        """Prepares its weights in float32."""
        ...

    def advance(self, rows: "RaggedRows", states: "LayerStates", inputs: torch.Tensor) -> torch.Tensor:
        """Takes the inputs of a batch, `[T, num_inputs]`, into the states, by kernels: float32 `[T, outputs]`.

        It must neither wait for the device nor copy to it, so that it can be recorded.
        """
        ...


Recur = Callable[[int, torch.Tensor, Recurrent], torch.Tensor]
"""`recur(layer_idx, inputs [T, num_inputs], block) -> float32 [T, outputs]`; moves the states of the rows."""

_LINEAR_FROM = 20.0  # softplus(x) is x here


def prepare(states: SlotStates) -> Recur:
    """Computes once per step what all layers share. ValueError if rows replay or leave more than is kept of a slot."""
    states = states.read_ends()
    schedule = _Schedule.of(states)

    def recur(layer_idx: int, inputs: torch.Tensor, block: Recurrent) -> torch.Tensor:
        return schedule.run(states, states.place(layer_idx), inputs.float(), block.make_step())

    return recur


def prepare_part(states: SlotStates, start: int, stop: int) -> Recur:
    """As `prepare`, for the new tokens `[start, stop)` of the batch. All parts must be run, in order.

    If a layer has more tokens than these, what is behind them is padding, whose outputs are the last token's.
    """
    recur_part = prepare(_part_of(states.read_ends(), start, stop))

    def recur(layer_idx: int, inputs: torch.Tensor, block: Recurrent) -> torch.Tensor:
        outputs = recur_part(layer_idx, inputs[: stop - start], block)
        return torch.cat((outputs, outputs[-1:].expand(len(inputs) - len(outputs), -1)))

    return recur


def _part_of(states: SlotStates, start: int, stop: int) -> SlotStates:
    """The same for some of the new tokens. What an earlier part left pending is replayed."""
    rows, row_start = [], 0
    for slot, first, num_new, num_replayed, num_tentative in zip(
        states.slots, states.starts, states.num_new, states.num_replayed, states.num_tentative, strict=True
    ):
        begin, end = max(start - row_start, 0), min(stop - row_start, num_new)
        if begin < end:
            num_stored = num_replayed + num_new - num_tentative  # inputs that the state takes in
            left_before = max(0, num_replayed + begin - num_stored) if begin else num_replayed
            left_after = max(0, num_replayed + end - num_stored)
            rows.append((slot, first + begin, end - begin, left_before, left_after))
        row_start += num_new
    slots, starts, counts, replayed, tentative = zip(*rows, strict=True)
    return replace(states, slots=slots, starts=starts, num_new=counts, num_replayed=replayed, num_tentative=tentative)


def prepare_without_states(params: Sequence[StateParams | None]) -> Recur:
    """Runs every token as if it were the first of its sequence and the same as the first one: for dummy runs.

    On a device it allocates as much as kernels do.
    """

    def recur(layer_idx: int, inputs: torch.Tensor, block: Recurrent) -> torch.Tensor:
        described = params[layer_idx]
        assert described is not None, f"layer {layer_idx} has no state"
        state = inputs.new_zeros(1, described.num_elements, dtype=torch.float32)
        output = block.make_step()(state, inputs[:1].float()).expand(len(inputs), -1)
        if inputs.device.type == "cpu":
            return output
        convolved = torch.empty_like(inputs, dtype=torch.float32)
        output = output.contiguous()
        del convolved  # it lives until the outputs are there
        return output

    return recur


def prepare_from_zero(params: Sequence[StateParams | None], num_rows: int) -> Recur:
    """Runs so many rows of one length from states of zeros, and keeps no states: beside no cache."""

    def recur(layer_idx: int, inputs: torch.Tensor, block: Recurrent) -> torch.Tensor:
        described = params[layer_idx]
        assert described is not None, f"layer {layer_idx} has no state"
        state = inputs.new_zeros(num_rows, described.num_elements, dtype=torch.float32)
        by_token = inputs.float().reshape(num_rows, -1, inputs.shape[1]).transpose(0, 1).contiguous()
        step = block.make_step()
        return torch.stack([step(state, each) for each in by_token], dim=1).flatten(0, 1)

    return recur


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The order in which the inputs of a batch are applied: the first of every row, then the second, and so on.

    Rows with more inputs come first, so that the rows which have one left are always the first ones. Indices are int64.
    """

    counts: list[int]  # by turn: rows that have an input
    order: torch.Tensor  # [R + T]: the inputs, replayed ones before new ones, as they are applied
    new: torch.Tensor  # [T]: where in that order each new token is
    slots: torch.Tensor  # of the rows, as they are ordered
    started: torch.Tensor  # places of the rows that have a state already
    stored: dict[int, torch.Tensor]  # by turn: places of the rows whose states are stored after it
    replayed: tuple[torch.Tensor, ...]  # [R] each: slot, and place among its pending inputs
    left: tuple[torch.Tensor, ...]  # the same for inputs that are left pending, and which of the inputs they are

    @classmethod
    def of(cls, states: SlotStates) -> Self:
        """Makes it for a batch. ValueError as for `prepare`."""
        lengths = _count_inputs(states)
        sources = _number_inputs(states)
        rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        counts = [sum(length > turn for length in lengths) for turn in range(max(lengths, default=0))]
        order = [sources[row][turn] for turn, count in enumerate(counts) for row in rows[:count]]
        applied = {source: index for index, source in enumerate(order)}
        stored: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            stored.setdefault(lengths[row] - states.num_tentative[row] - 1, []).append(place)
        replayed = [(states.slots[row], i) for row, count in enumerate(states.num_replayed) for i in range(count)]
        left = [
            (states.slots[row], index, source)
            for row, count in enumerate(states.num_tentative)
            for index, source in enumerate(sources[row][lengths[row] - count :])
        ]

        def indices(numbers: Sequence[int]) -> torch.Tensor:
            return to_device(numbers, torch.int64, states.live.device)

        def columns(table: Sequence[tuple[int, ...]], width: int) -> tuple[torch.Tensor, ...]:
            return tuple(indices([each[column] for each in table]) for column in range(width))

        return cls(
            counts=counts,
            order=indices(order),
            new=indices([applied[source] for source in range(len(replayed), len(order))]),
            slots=indices([states.slots[row] for row in rows]),
            started=indices([i for i, row in enumerate(rows) if states.starts[row] > states.num_replayed[row]]),
            stored={turn: indices(places) for turn, places in stored.items()},
            replayed=columns(replayed, 2),
            left=columns(left, 3),
        )

    def run(self, states: SlotStates, place: StatePlace, inputs: torch.Tensor, step: Step) -> torch.Tensor:
        """Takes float32 `[T, num_inputs]` through one layer; returns `[T, outputs]`."""
        own = slice(place.input_offset, place.input_offset + place.num_inputs)
        slots, indices = self.replayed
        live = states.live[:, place.offset : place.offset + place.num_elements]
        known = torch.cat((states.pending[slots, indices, own], inputs))
        state = live.new_zeros(len(self.slots), place.num_elements)
        state[self.started] = live[self.slots[self.started]]
        outputs = []
        for turn, arriving in enumerate(torch.split(known[self.order], self.counts)):
            outputs.append(step(state[: len(arriving)], arriving))
            if (places := self.stored.get(turn)) is not None:
                live[self.slots[places]] = state[places]
        slots, indices, sources = self.left
        states.pending[slots, indices, own] = known[sources]
        return torch.cat(outputs)[self.new]


def _count_inputs(states: SlotStates) -> list[int]:
    """Counts the inputs of each row, replayed ones and new ones."""
    most = states.pending.shape[1]
    lengths = [replayed + new for replayed, new in zip(states.num_replayed, states.num_new, strict=True)]
    for name, counts in (("num_replayed", states.num_replayed), ("num_tentative", states.num_tentative)):
        if any(not 0 <= count <= min(most, length) for count, length in zip(counts, lengths, strict=True)):
            raise ValueError(f"{name} must be at most {most}, and at most a row's inputs {lengths}, not {list(counts)}")
    return lengths


def _number_inputs(states: SlotStates) -> list[list[int]]:
    """By row, its inputs in order, as indices of all replayed ones followed by all new ones."""
    numbered, next_replayed, next_new = [], 0, sum(states.num_replayed)
    for replayed, new in zip(states.num_replayed, states.num_new, strict=True):
        numbered.append([*range(next_replayed, next_replayed + replayed), *range(next_new, next_new + new)])
        next_replayed, next_new = next_replayed + replayed, next_new + new
    return numbered


def add_up(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums over a dimension, halves onto halves, so that the order depends on its length alone."""
    while (length := x.shape[dim]) > 1:
        half, num_left = divmod(length, 2)
        halves = x.narrow(dim, 0, half) + x.narrow(dim, length - half, half)
        x = torch.cat((halves, x.narrow(dim, half, 1)), dim) if num_left else halves
    return x.squeeze(dim)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))"""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x)"""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), which is x for large x."""
    return torch.where(x > _LINEAR_FROM, x, torch.log1p(torch.exp(x)))
