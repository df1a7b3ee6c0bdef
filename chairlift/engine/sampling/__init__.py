"""From logits to tokens; here what the modules of sampling share: copies, and rows with a guess at their next tokens.

Copies between host and device do not wait for the device. One to the device leaves from pinned memory; one to the host
lands in it, and an `Arrival` says when it is there. On a CPU a tensor is its own copy, and is there at once.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

import torch

from chairlift.cache.memory import send as send
from chairlift.scheduler import StepPlan


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of numbers, as a tensor on the device."""
    return send(torch.tensor(values, dtype=dtype), device)


def bring(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the host: not to be read before an `Arrival` marked after it."""
    return tensor.to("cpu", non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the one on which compiled kernels run, and for which memory is pinned; in this thread, meanwhile."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of all that was launched before it."""

    event: torch.cuda.Event | None  # None: it was over when the launch returned

    @classmethod
    def mark(cls, device: torch.device) -> "Arrival":
        """Marks this place in the device's order of work."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def wait(self) -> None:
        """Returns when the device has got there. Raises what went wrong on it."""
        if self.event is not None:
            self.event.synchronize()


# --- guesses: where tokens are sampled for rows that have one, and which of these count
#
# batch    | newest | guess 1 | guess 2 |      a row of three tokens
# sampled       s1        s2        s3         s2 counts if s1 is guess 1, and s3 if s2 is guess 2 as well

Guessed = Mapping[int, Sequence[int]]
"""By row of the logits: the guessed tokens between its request's own and the one that is sampled.

A request with a guess has a row for each token of it, and one behind the last. Rows of other requests are not there.
"""

NOTHING_GUESSED: Guessed = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens are sampled: behind a row's last token, and behind each token before its guess or in it."""

    tokens: list[int]  # behind this one of the batch
    rows: list[int]  # of the plan
    guessed: Guessed  # by place

    @classmethod
    def of(cls, plan: StepPlan) -> "Places":
        """The places of a plan's first step."""
        tokens: list[int] = []
        rows: list[int] = []
        guessed: dict[int, Sequence[int]] = {}
        end = 0
        for index, row in enumerate(plan.rows):
            end += row.num_new_tokens
            guess = row.guess.tokens
            if guess:
                guessed |= {len(tokens) + count: guess[:count] for count in range(len(guess) + 1)}
            if row.is_sampled:
                tokens += range(end - 1 - len(guess), end)
                rows += [index] * (1 + len(guess))
        return cls(tokens, rows, guessed)


def up_to_wrong(drawn: list[int], guess: Sequence[int]) -> list[int]:
    """The tokens that count of those drawn before and behind each token of a guess; the last of them is no guess."""
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drawn, guess, strict=False)))
    return drawn[: num_right + 1]
