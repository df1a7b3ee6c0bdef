"""Work on a prompt, beside its keys and values, as values: what is wanted, a row's part of that, what came of it.

    Request.prompt_task --part_of--> Work.part --the device--> RowResult.prompt_result --followed_by--> the whole

Each kind has a task and a result here, and is computed in `engine/sampling/prompt_results.py`. Whatever lies between
hands tasks, parts and results on without knowing their kind. Plain Python, and everything can be pickled.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from operator import add
from typing import ClassVar, Self

from chairlift.params import TokenLogprobs


class PromptTask(ABC):
    """Says what a request wants computed from the last hidden states of its prompt. A value."""

    __slots__ = ()
    is_all: ClassVar[bool] = False
    """True if the request wants nothing else, and ends once this is done; no token is sampled then."""

    @abstractmethod
    def span(self, num_tokens: int) -> range:
        """Returns the tokens of a prompt of that length whose hidden states it reads, by index, step 1."""

    def beginning(self) -> "PromptResult | None":
        """Returns what is known of the result before anything is computed; None: nothing."""
        return None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A row's part of a task: the hidden states of some of its new tokens."""

    task: PromptTask
    first: int  # the first of these tokens, by its index in the row's new ones
    num_tokens: int
    following: Sequence[int]  # the tokens that follow these in the prompt; none follows its last one


def part_of(task: PromptTask, prompt: Sequence[int], start: int, num_new: int, num_done: int) -> PromptPart | None:
    """Cuts out the part of a row whose new tokens begin at `start`; None: it has none.

    `num_done`: tokens of the prompt that are done with, if they are computed again after a preemption.
    """
    span = task.span(len(prompt))
    first, end = max(start, span.start, num_done), min(start + num_new, span.stop)
    if first >= end:
        return None
    return PromptPart(task, first - start, end - first, prompt[first + 1 : end + 1])


class PromptResult(ABC):
    """Says what came of a task, or of a part of one. Nobody changes it, but for the names of tokens."""

    __slots__ = ()

    @abstractmethod
    def followed_by(self, later: Self) -> Self:
        """Returns one result for this part of the prompt and the next one."""

    @property
    def is_sound(self) -> bool:
        """False if it was computed from what is no finite number."""
        return True

    @property
    def size(self) -> int:
        """Estimates the cost of passing it on, in scored tokens."""
        return 1

    def pieces(self, max_size: int) -> Iterator[Self]:  # noqa: ARG002 - most are small
        """Yields parts of it, of about that size at most, in order."""
        yield self

    def name_tokens(self, text_of: Callable[[int], str]) -> None:  # noqa: B027 - most name none
        """Sets the texts of the tokens that it names by their ids."""


@dataclass(frozen=True, slots=True)
class ScoreTask(PromptTask):
    """Wants the log-probability of each token of the prompt but the first, and of the likeliest ones in its place."""

    num_top: int  # likeliest tokens to report at each

    def span(self, num_tokens: int) -> range:
        """See `PromptTask`. A hidden state scores the token that follows."""
        return range(num_tokens - 1)

    def beginning(self) -> "PromptScores":
        """See `PromptTask`. The first token has none."""
        return PromptScores([None])


@dataclass(frozen=True, slots=True)
class PromptScores(PromptResult):
    """The log-probabilities of tokens of a prompt; None for its first."""

    positions: Sequence[TokenLogprobs | None]

    def followed_by(self, later: Self) -> Self:
        """See `PromptResult`."""
        return type(self)([*self.positions, *later.positions])

    @property
    def size(self) -> int:
        """See `PromptResult`. Each position has as many scores as the last one."""
        return len(self.positions) * len(self.positions[-1] or ()) if self.positions else 0

    def pieces(self, max_size: int) -> Iterator[Self]:
        """See `PromptResult`."""
        step = max(1, max_size * len(self.positions) // max(1, self.size))
        for start in range(0, len(self.positions), step):
            yield type(self)(self.positions[start : start + step])

    def name_tokens(self, text_of: Callable[[int], str]) -> None:
        """See `PromptResult`."""
        for position in self.positions:
            for token, each in (position or {}).items():
                each.decoded_token = text_of(token)


def scores_in(result: PromptResult | None) -> Sequence[TokenLogprobs | None]:
    """Returns the log-probabilities of a result; none if it has no such thing."""
    return result.positions if isinstance(result, PromptScores) else ()


class Pooling(StrEnum):
    """Says of which last hidden states a prompt's vector is made."""

    LAST = "last"  # that of its last token
    MEAN = "mean"  # the mean of all of them


@dataclass(frozen=True, slots=True)
class PoolTask(PromptTask):
    """Wants a vector for the whole prompt, made of hidden states after the final norm."""

    is_all: ClassVar[bool] = True
    pooling: Pooling

    def span(self, num_tokens: int) -> range:
        """See `PromptTask`. For a mean every token is computed, also what another prompt has begun with."""
        return range(num_tokens - 1 if self.pooling is Pooling.LAST else 0, num_tokens)


@dataclass(frozen=True, slots=True)
class PooledStates(PromptResult):
    """The sum of some hidden states of a prompt.

    A sum of several is counted in whole units, so that it is the same wherever the prompt was cut.
    """

    sums: "array[float] | array[int]"  # [hidden], in units
    num_tokens: int
    unit: float = 1.0
    is_finite: bool = True

    def followed_by(self, later: Self) -> Self:
        """See `PromptResult`."""
        sums = array(self.sums.typecode, map(add, self.sums, later.sums))
        return type(self)(sums, self.num_tokens + later.num_tokens, self.unit, self.is_finite and later.is_finite)

    @property
    def is_sound(self) -> bool:
        """See `PromptResult`."""
        return self.is_finite

    @property
    def size(self) -> int:
        """See `PromptResult`. Numbers of a vector cost less than those of scores, but not nothing."""
        return 1 + len(self.sums) // 100


@dataclass(frozen=True, slots=True)
class LabelTask(PromptTask):
    """Wants the logits of some tokens after the prompt, such as those of an answer with yes and with no."""

    is_all: ClassVar[bool] = True
    token_ids: tuple[int, ...]

    def span(self, num_tokens: int) -> range:
        """See `PromptTask`."""
        return range(num_tokens - 1, num_tokens)


@dataclass(frozen=True, slots=True)
class LabelLogits(PromptResult):
    """The logits of the tokens that a `LabelTask` names, in their order."""

    values: tuple[float, ...]

    def followed_by(self, later: Self) -> Self:  # noqa: ARG002 - there is none
        """See `PromptResult`."""
        raise AssertionError("a prompt has one last token")

    @property
    def is_sound(self) -> bool:
        """See `PromptResult`."""
        return all(map(isfinite, self.values))
