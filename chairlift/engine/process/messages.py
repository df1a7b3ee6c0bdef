"""The messages between the engine's process and its workers, beside those that threads send each other."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from chairlift.engine.thread import Update, describe_death
from chairlift.errors import EngineDead
from chairlift.scheduler import Request, TokenEvent

_MAX_SCORES = 2048
"""Scored tokens in one message. Pickling one takes 2 microseconds, in which no other thread of the process runs."""


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Told:
    number: int
    answer: Any
    error: Exception | None


@dataclass(frozen=True, slots=True)
class NumberedAdd:
    """`Add`, with a number for each sequence, by request id, that stands for it from here on."""

    requests: list[Request]
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class Release:
    """The worker no longer needs the grammar with this number."""

    number: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EnginesGrammar:
    """Stands for a compiled grammar in a worker, as a request's `new_grammar`."""

    number: int

    def __call__(self) -> NoReturn:
        raise AssertionError("only the engine's process can start it")


@dataclass(slots=True)
class PackedUpdate:
    """An `Update` in columns, one row per event. An event that is not plain has count 0 and is in `others`."""

    numbers: "array[int]" = field(default_factory=lambda: array("Q"))
    counts: "array[int]" = field(default_factory=lambda: array("H"))  # of tokens
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("I"))  # of all plain events, one after the other
    others: list[TokenEvent] = field(default_factory=list)
    death: EngineDead | None = None
    num_scores: int = 0  # scored tokens in `others`

    @classmethod
    def in_parts(cls, update: Update, numbers: dict[str, int]) -> "list[PackedUpdate]":
        """The update or, if it has many scores, parts of it, to be taken one after the other.

        `numbers`: of sequences, by request id; a sequence that ends is removed.
        """
        parts = [cls()]
        for event in update.events:
            number = numbers[event.request_id]
            if _is_plain(event):
                parts[-1]._add_plain(number, event)
                continue
            for piece in _pieces(event):
                num_scores = _num_scores(piece)
                if parts[-1].num_scores and parts[-1].num_scores + num_scores > _MAX_SCORES:
                    parts.append(cls())
                parts[-1]._add_other(number, piece, num_scores)
            if event.finish_reason is not None:
                del numbers[event.request_id]
        if update.death is not None:
            parts[-1].death = EngineDead(describe_death(update.death))
        return parts

    def unpack(self, names: dict[int, str]) -> Update:
        """`names`: of sequences, by number; a sequence that ends is removed."""
        events, others, tokens, end = list[TokenEvent](), iter(self.others), self.tokens.tolist(), 0
        seconds = iter(self.seconds)
        for number, num_tokens in zip(self.numbers, self.counts, strict=True):
            if num_tokens:
                begin, end = end, end + num_tokens
                events.append(TokenEvent(names[number], tokens[begin:end], None, token_seconds=next(seconds)))
            else:
                events.append(next(others))
                if events[-1].finish_reason is not None:
                    del names[number]
        return Update(events, self.death)

    def _add_plain(self, number: int, event: TokenEvent) -> None:
        self.numbers.append(number)
        self.counts.append(len(event.new_token_ids))
        self.seconds.append(event.token_seconds or 0.0)
        self.tokens.extend(event.new_token_ids)

    def _add_other(self, number: int, event: TokenEvent, num_scores: int) -> None:
        self.numbers.append(number)
        self.counts.append(0)
        self.others.append(event)
        self.num_scores += num_scores


def _is_plain(event: TokenEvent) -> bool:
    """True if it has only tokens, and is neither a sequence's beginning nor its end."""
    if event.times is not None or event.finish_reason is not None or not event.new_token_ids:
        return False
    has_scores = bool(event.logprobs) or event.prompt_result is not None
    return event.token_seconds is not None and not has_scores and not event.num_drafted


def _pieces(event: TokenEvent) -> Iterator[TokenEvent]:
    """The event with the last piece of its prompt's result, after events that have only the others, if it is large."""
    if event.prompt_result is None or event.prompt_result.size <= _MAX_SCORES:
        yield event
        return
    *others, last = event.prompt_result.pieces(_MAX_SCORES)
    for result in others:
        piece = TokenEvent(event.request_id, [], None, prompt_result=result)
        piece.num_drafted, piece.num_accepted = event.num_drafted, event.num_accepted
        yield piece
    yield replace(event, prompt_result=last)


def _num_scores(event: TokenEvent) -> int:
    return sum(map(len, event.logprobs)) + (0 if event.prompt_result is None else event.prompt_result.size)
