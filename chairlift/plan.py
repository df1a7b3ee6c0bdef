"""A step as values: what the scheduler wants computed, and what came of it. Nothing here refers to a request.

    schedule() -> StepPlan -> the device -> a RowResult for each row -> update()

Whoever computes a plan needs nothing else, so plans can be sent to other processes, recorded and computed again. Plain
Python. Objects that are made by the hundred in every step are not frozen, because a frozen one takes more than twice as
long to make; nobody changes them all the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chairlift.params import SamplingParams, TokenLogprobs
from chairlift.prompt_work import PromptPart, PromptResult

ON_DEVICE = -1
"""An input token that the host does not know yet: the newest one that the device has sampled in the row's slot."""

MOST_ENDS = 16
"""A launch notices the end of a sequence that has at most so many end tokens."""


class Grammar(Protocol):
    """The state of a sequence in the grammar that it must follow. One per sequence."""

    @property
    def is_ready(self) -> bool:
        """False while its row must be skipped because the mask for its next token is late."""
        ...

    @property
    def keeps_pace(self) -> bool:
        """Returns true if its masks take less than a step, so that a row may be planned while a token is pending."""
        ...

    def foresee(self) -> Sequence[int] | None:
        """Returns likely next tokens, because the grammar allows no other text; None: no guess can be verified now.

        The first call returns None, since they are computed only after it.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Takes the next token. True if the text is complete and nothing can follow. Raises if it does not fit."""
        ...


class TokenFilter(Protocol):
    """Restricts which tokens the sampler may draw, in addition to a grammar. One per sequence."""

    @property
    def follows_text(self) -> bool:
        """Returns true if these depend on the tokens so far; constant."""
        ...

    def forbidden_after(self, token_ids: Sequence[int], start: int) -> Collection[int]:
        """Returns the tokens that must not follow these, which are generated from `start` on.

        The tokens may have grown since the last call.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SamplingKey:
    """Settings by which a sequence's tokens are drawn: the same object in all its steps."""

    tag: str  # names the sequence, for observers
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    end_token_ids: frozenset[int] = frozenset()  # sampling one of them is the end
    min_tokens: int = 0  # generated before one of these may be
    grammar: Grammar | None = None  # makes the masks; belongs to this process
    token_filter: TokenFilter | None = None  # likewise


@dataclass(frozen=True, slots=True)
class Work:
    """The outcome wanted of a row, beside keys and values."""

    is_sampled: bool = False  # a token is sampled after its own new tokens, and one after each of its guess
    part: PromptPart | None = None  # of what the request wants of its prompt
    history: Sequence[int] | None = None  # the sequence's tokens, if its counts for penalties begin (again) with them
    forbidden: Collection[int] = ()  # tokens that must not be sampled, beside those of its key


COMPUTE, SAMPLE = Work(), Work(is_sampled=True)


@dataclass(slots=True)
class RowPlan:
    """One sequence's share of a step: tokens to compute in its slot, and the work on them."""

    key: SamplingKey
    slot: int
    start: int  # tokens of the slot that are computed already
    input_ids: Sequence[int]  # the new tokens, with those of the guess; ON_DEVICE for one that the host does not know
    num_output_tokens: int  # generated before the token that is sampled first
    work: Work
    guess: Sequence[int] = ()  # tokens that may come next, at the end of the new ones
    num_tentative: int = 0  # new tokens at the end that a recurrent state does not take yet, as they may be taken back

    @property
    def num_new_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_sampled(self) -> bool:
        return self.work.is_sampled


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A copy of the first tokens of one slot to another: keys and values of all layers."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Zeroes the tokens `[start, end)` of a slot and frees their memory.

    Either they may be NaN, which masking does not remove, because attention multiplies masked elements by zero; or the
    memory is needed elsewhere. Everything written beyond `end` is sound or was scrubbed before.
    """

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of a recurrent state from one row to another; rows of snapshots follow those of the slots."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateScrub:
    """Frees the memory of a row of recurrent states that nobody needs, and of its pending inputs if it is a slot's."""

    row: int


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of a saved prefix that was read for a request: its tokens `[start, end)`.

    `content` None: it could not be read. `has_state`: a recurrent state after its last token is part of it.
    """

    ticket: int  # of the request's reading
    start: int
    end: int
    content: object | None = field(repr=False)
    has_state: bool = False
    is_last: bool = False  # nothing follows


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Writes the tokens `[start, end)` of a part into a slot and, if the part has a state, that as well."""

    slot: int
    start: int
    end: int
    part: SavedPart


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Names the tokens `[start, end)` of a slot and, if a row is given, the recurrent state in that row."""

    slot: int
    start: int
    end: int
    state_row: int | None = None


Job = SlotCopy | Scrub | StateCopy | StateScrub | SlotLoad
"""Work on the cache's tensors, done in order and before what is planned after it."""


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A slot that has the same first `num_tokens` tokens as another."""

    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Writes announced for some slots: row i may write up to `num_reserved[i]` tokens after `lengths[i]`."""

    ticket: int  # tells this reservation from an earlier one of the same slots
    seq_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    num_reserved: tuple[int, ...]
    common_prefixes: tuple[CommonPrefix, ...] = ()  # by row: the slot that has the same first tokens; empty: none
    # By row, if layers have recurrent states: pending inputs that lead to its first new token, and how many of its new
    # tokens are tentative.
    num_replayed: tuple[int, ...] = ()
    num_tentative: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: decode rows, those with a guess, prefill rows; `num_steps > 1` only if all are decode rows."""

    rows: tuple[RowPlan, ...]
    num_decode_rows: int
    num_steps: int
    # By row: tokens that it gets if it does not end and its whole guess is right.
    num_expected: tuple[int, ...] = ()
    # Once the books count it as begun: what precedes it, and what it may write.
    jobs: tuple[Job, ...] = ()
    reservation: Reservation | None = None

    @property
    def is_decode(self) -> bool:
        """Returns true if every row decodes without a guess."""
        return self.num_decode_rows == len(self.rows)

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        return [row.slot for row in self.rows]

    @property
    def num_new_tokens(self) -> list[int]:
        """The number of new tokens of each row."""
        return [len(row.input_ids) for row in self.rows]

    @property
    def num_tentative(self) -> list[int]:
        """The number of each row's new tokens that a recurrent state does not take yet."""
        return [row.num_tentative for row in self.rows]


@dataclass(slots=True)
class RowResult:
    """The result of one row."""

    token_ids: list[int] = field(default_factory=list)  # one per step of the launch, up to an error
    logprobs: Sequence[TokenLogprobs] = ()  # one per token, if asked for
    prompt_result: PromptResult | None = None  # of the work's part
    error: str | None = None  # why no valid token follows these; the other rows are sound
    stop_reason: str | None = None  # of an error: GRAMMAR_LIMIT if the client can avoid it
    is_late: bool = False  # its mask was late: it has no token yet, and must be computed again
    has_bad_surplus: bool = False  # what was computed beyond these tokens may be NaN
