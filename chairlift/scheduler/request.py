"""One sequence: the client's request, which never changes, and the engine's progress with it.

There are no phases. Of `num_tokens` tokens, `num_computed` have keys and values in the slot, and the others are still
to compute; a prompt, a chunk of one and a decode step all reduce that difference:

    token_ids  |=== prompt ===============|=== generated ===|- pending -|
               0                     num_computed ^                     ^ num_tokens
                                                  |-- num_uncomputed ---|      decoding: exactly 1

Pending tokens are those of launches in flight: if the device works asynchronously, the next step is planned before they
are known. A launch counts as computed as soon as it has begun, on the assumption that the sequence continues.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chairlift.params import DEFAULT_OPTIONS, FinishReason, RequestOptions, RequestTimes, SamplingParams
from chairlift.plan import SAMPLE, Grammar, RowPlan, RowResult, SamplingKey, TokenFilter, Work
from chairlift.prompt_work import PromptPart, PromptTask, part_of
from chairlift.scheduler.drafting import NO_GUESS, Drafter, Guess

REPETITION_DETECTED = "repetition_detected"  # the stop reason of a sequence that repeats itself, named as in vLLM
TIMED_OUT = "timeout"  # that of a request whose deadline passed


RepetitionWatch = Callable[[int], bool]
"""Takes the next token of a sequence. True if the sequence now ends in a repetition."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Says what is to be computed: a prompt and how to continue it. `max_tokens` is resolved: it fits into a slot.

    The engine itself makes all objects that have state (`new_...`), so that both threads may hold a request. With a
    grammar, the text ends where the grammar does: `min_tokens` and `ignore_eos` have no effect.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    new_grammar: Callable[[], Grammar] | None = None
    prompt_task: PromptTask | None = None  # wanted of the prompt
    options: RequestOptions = DEFAULT_OPTIONS
    new_token_filter: Callable[[], TokenFilter] | None = None
    new_repetition_watch: Callable[[], RepetitionWatch] | None = None
    new_drafter: Callable[[], Drafter] | None = None
    text_may_end_early: bool = False  # what reads its text may end it, before its newest token


@dataclass(slots=True, eq=False)
class Group:
    """Requests that were added together: until one of them gets a slot, they are displaced together or not at all."""

    has_started: bool = False


class Contents:
    """Tells which keys and values in a request's slot are sound, that is, not NaN.

    Tokens are sound once a token was sampled after them, or if they were reused from sound ones. What is not known to
    be sound is neither reused nor left in the slot: attention multiplies even what it masks, and NaN survives that.
    """

    __slots__ = ("_has_bad_surplus", "_is_sampled", "_num_reused")

    def __init__(self, num_reused: int = 0) -> None:
        """`num_reused`: sound tokens that are in the slot when the request gets it."""
        self._num_reused = num_reused
        self._is_sampled = False  # a token was sampled after everything computed before
        self._has_bad_surplus = False  # what was computed after the tokens that count may be NaN

    def copied(self, num_sound: int) -> None:
        """Records that a prefix was copied into the slot, of which `num_sound` tokens are sound."""
        self._num_reused = num_sound

    def sampled(self) -> None:
        """Records that a valid token was sampled after everything computed so far."""
        self._is_sampled = True

    def surplus_failed(self) -> None:
        """Records that what was computed after the tokens that count may be NaN."""
        self._has_bad_surplus = True

    def surplus_scrubbed(self) -> None:
        """Records that what was computed after the tokens that count has been overwritten."""
        self._has_bad_surplus = False

    def spoilt(self) -> None:
        """Records that nothing in the slot is known to be sound any more."""
        self._num_reused, self._is_sampled, self._has_bad_surplus = 0, False, True

    @property
    def has_bad_surplus(self) -> bool:
        """Returns true if what was computed after the tokens that count must be overwritten first."""
        return self._has_bad_surplus

    def num_sound(self, num_computed: int) -> int:
        """Counts the computed tokens that are sound."""
        return num_computed if self._is_sampled else self._num_reused

    def to_scrub(self, num_computed: int) -> int | None:
        """The token from which on the slot must be overwritten when it is released; None: it need not be."""
        num_sound = self.num_sound(num_computed)
        return num_sound if self._has_bad_surplus or num_computed > num_sound else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Progress:
    """The mutable state of a request. Times are seconds by the scheduler's clock."""

    # From its first slot on
    grammar: Grammar | None = None
    token_filter: TokenFilter | None = None
    repetition: RepetitionWatch | None = None
    drafter: Drafter | None = None  # None: nothing is guessed
    may_end_early: bool = False  # before the newest token that was computed for it
    # Whether the host derives from each token what may come next. If so, launches have one step while it runs, because
    # it could use only the first token of several. Masks of a grammar are applied after the forward pass, so the row
    # goes on from a pending token all the same, unless it needs the newest one to be planned.
    needs_each_token: bool = False
    needs_newest_token: bool = False
    has_rules: bool = False  # its work may say something of its tokens so far
    is_paused: bool = False  # it gets no tokens for now, because its reader lags far behind
    # In its slot
    slot: int | None = None
    contents: Contents = field(default_factory=Contents)
    num_computed: int = 0
    num_reused: int = 0  # of those computed: found in the slot, or copied into it
    num_pending: int = 0
    num_launches: int = 0  # launches in flight that write to the slot
    is_stuck: bool = False  # a row of it got no token, so rows in flight that go on from that one get none either
    num_tokens_placed: int = 0  # tokens that it had when it got its slot
    num_held: int = 0  # tokens that its slot has memory for
    guess: Guess = NO_GUESS  # the newest one that is verified
    has_counts: bool = False  # penalties go on from what was counted of its tokens in this slot
    leader: "RequestState | None" = None  # computes a prefix that this one waits to copy
    reading: int | None = None  # the ticket of a saved prefix that is being read for it
    num_restored: int = 0  # of those reused: read from disk
    # If layers have recurrent states: numbers of tokens after which its state is wanted, and at which a chunk ends, and
    # tokens at the end of its prompt that its state does not take at once.
    is_recurrent: bool = False
    state_marks: tuple[int, ...] = ()
    prompt_tail: int = 0
    is_yielding: bool = False  # preempted: it loses its slot once no launch writes to it
    # In total
    num_cached_tokens: int = 0  # of the prompt: reused when it got its first slot
    num_done: int = 0  # of the prompt: tokens that its task is done with
    num_preemptions: int = 0
    num_drafted: int = 0  # tokens that were guessed and verified
    num_accepted: int = 0  # those of them that are in its answer
    admission_time: float | None = None  # when it got its first slot
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    has_end_token: bool = False


class RequestState(_Progress):
    """A request and its progress. Belongs to the scheduler's thread alone."""

    __slots__ = (
        *("request_id", "params", "options", "max_tokens", "min_tokens", "seed", "prompt_task", "eos_token_ids"),
        *("is_prompt_only", "end_token_ids", "token_ids", "num_prompt_tokens", "group", "arrival_time", "queue_time"),
        *("key", "_new"),
    )

    def __init__(self, request: Request, arrival_time: float, group: Group | None = None) -> None:
        """`group`: of the requests that were added together; None: it was added alone."""
        super().__init__()
        self._new: Request | None = request  # until it starts
        self.request_id = request.request_id
        self.params = request.params
        self.options = request.options
        self.max_tokens = request.max_tokens
        self.seed = request.seed
        self.prompt_task = request.prompt_task
        self.is_prompt_only = request.prompt_task is not None and request.prompt_task.is_all  # nothing is generated
        has_grammar = request.new_grammar is not None
        self.min_tokens = 0 if has_grammar else request.params.min_tokens
        ignores_eos = request.params.ignore_eos and not has_grammar
        self.eos_token_ids: frozenset[int] = frozenset() if ignores_eos else request.eos_token_ids
        self.end_token_ids = self.eos_token_ids.union(request.params.stop_token_ids)  # sampling one of them is the end
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.group = group or Group()
        self.arrival_time = arrival_time
        self.queue_time = arrival_time  # when it was last queued, for the first time or again

    def start(self, now: float) -> None:
        """Called when it gets a slot. The first time, makes its grammar, filters and drafter, or fails the request."""
        self.num_tokens_placed = len(self.token_ids)
        request, self._new = self._new, None
        if request is None:
            return
        self.admission_time = now
        self.group.has_started = True
        try:
            self.grammar = request.new_grammar() if request.new_grammar else None
            self.token_filter = request.new_token_filter() if request.new_token_filter else None
            self.repetition = request.new_repetition_watch() if request.new_repetition_watch else None
        except Exception as error:  # a grammar's, for instance: other requests continue
            self.fail(f"the request could not be started: {error}")
        follows_text = self.token_filter is not None and self.token_filter.follows_text
        self.needs_each_token = self.grammar is not None or follows_text
        self.needs_newest_token = follows_text
        if request.new_drafter is not None and not follows_text:
            self.drafter = request.new_drafter()
        self.has_rules = self.token_filter is not None or self.params.has_penalty
        self.may_end_early = request.text_may_end_early or self.repetition is not None
        self.key = SamplingKey(
            self.request_id,
            self.params,
            self.seed,
            self.num_prompt_tokens,
            self.end_token_ids,
            self.min_tokens,
            self.grammar,
            self.token_filter,
        )

    def work_to_sample(self) -> Work:
        """The work of a row that is planned now and catches up with all its tokens, so that a new one can be drawn."""
        if not self.has_rules:
            return SAMPLE
        history: list[int] | None = None
        if self.params.has_penalty:
            history = None if self.has_counts else list(self.token_ids)
            self.has_counts = True
        if self.token_filter is None:
            return Work(is_sampled=True, history=history)
        forbidden = self.token_filter.forbidden_after(self.token_ids, self.num_prompt_tokens)
        return Work(is_sampled=True, history=history, forbidden=forbidden)

    def part_of_task(self, start: int, num_new: int) -> PromptPart | None:
        """Returns the part of its task that a row does with so many new tokens from `start` on; None: it has none."""
        task = self.prompt_task
        if task is None or start >= self.num_prompt_tokens:
            return None
        return part_of(task, self.token_ids[: self.num_prompt_tokens], start, num_new, self.num_done)

    def end_at_mark(self, num_new: int) -> int:
        """Cuts a chunk of `num_new` tokens where a state is wanted. Within the prompt's tail the one before will do."""
        start, last = self.num_computed, len(self.token_ids)
        if start + num_new == last and num_new >= self.prompt_tail:
            last -= self.prompt_tail
        return min([num_new, *(mark - start for mark in self.state_marks if start < mark < last)])

    def num_tentative(self, num_guessed: int = 0) -> int:
        """Counts the tokens of its next row that may be taken back, if there is a recurrent state.

        These are its guess and, if its mask may be late, the token before that.
        """
        return num_guessed + (self.grammar is not None) if self.is_recurrent else 0

    def reuse(self, num_tokens: int) -> None:
        """Records that `num_tokens` tokens are in its slot already; after a preemption they do not count as cached."""
        self.num_computed = self.num_reused = num_tokens
        if not self.num_preemptions:
            self.num_cached_tokens = num_tokens

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.arrival_time, self.admission_time, self.first_token_time)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def max_reused(self) -> int:
        """Tokens that need not be computed for it: one is left, so that there are logits, and all that its task reads.

        After a preemption, what its task is done with is not read again.
        """
        most = len(self.token_ids) - 1
        if self.prompt_task is None:
            return most
        span = self.prompt_task.span(self.num_prompt_tokens)
        return most if self.num_done >= span.stop else min(most, max(span.start, self.num_done))

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated; 0 or less if it will have ended with those pending."""
        return self.max_tokens - self.num_output_tokens

    @property
    def can_be_planned(self) -> bool:
        """Returns true unless it needs a pending token or a late mask, or is known to end."""
        grammar = self.grammar
        if grammar is not None and not grammar.is_ready:
            return False
        if not self.num_pending:
            return True
        if self.needs_newest_token or self.is_stuck or self.is_yielding or self.num_remaining <= 0:
            return False
        return grammar is None or grammar.keeps_pace

    @property
    def is_ready(self) -> bool:
        """Returns true unless it waits in its slot for what it need not compute: for a leader, or for the disk."""
        return self.leader is None and self.reading is None

    @property
    def may_allow_nothing(self) -> bool:
        """Returns true if its own constraints may leave no token, though all logits are numbers."""
        return self.grammar is not None or self.token_filter is not None

    def record(self, row: RowPlan, result: RowResult) -> list[int]:
        """Records the result of its row. Returns the tokens that count."""
        if result.prompt_result is not None and (part := row.work.part) is not None:
            self.num_done = row.start + part.first + part.num_tokens
            if self.is_prompt_only and result.error is None and self.num_done == self.num_prompt_tokens:
                self.contents.sampled()  # as good as: what came last was made of all that was computed before
                self.finish_reason = FinishReason.LENGTH
        self.is_stuck = result.is_late and self.num_pending > 0
        if result.is_late:
            self.has_counts = False  # the tokens that do not count may be among them
            return []
        return self.accept(result.token_ids, result.error, result.stop_reason)

    def accept(self, sampled: list[int], error: str | None = None, stop_reason: str | None = None) -> list[int]:
        """Appends sampled tokens up to and including the one that ends the sequence; returns those kept.

        `error`: why no valid token follows them. It counts only if the sequence gets that far.
        """
        kept = sampled
        if sampled:
            self.contents.sampled()
            if self.max_tokens == 0:  # only the prompt was to be computed
                self.finish_reason, kept = FinishReason.LENGTH, []
        for index, token in enumerate(kept):
            self.token_ids.append(token)
            if self._ends_with(token):
                kept = kept[: index + 1]
                break
        if error is not None and self.finish_reason is None:
            self.fail(error, stop_reason)
        return kept

    def drop_surplus(self) -> None:
        """After its end, uncounts what was computed for tokens that did not come or do not count."""
        self.num_computed = min(self.num_computed, max(self.num_prompt_tokens, len(self.token_ids) - 1))

    def fail(self, reason: str, stop_reason: str | None = None) -> None:
        """Ends the sequence: it cannot be computed."""
        self.finish_reason = FinishReason.ABORT
        self.stop_reason = stop_reason
        self.error = reason
        self.contents.spoilt()

    def _ends_with(self, token: int) -> bool:
        num_output = len(self.token_ids) - self.num_prompt_tokens  # the pending ones come after it
        is_repeating = self.repetition is not None and self.repetition(token)
        if token in self.end_token_ids and num_output > self.min_tokens:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = None if token in self.eos_token_ids else token
            self.has_end_token = True
        elif self.grammar is not None and self._completes_grammar(self.grammar, token):
            self.finish_reason = self.finish_reason or FinishReason.STOP
        elif num_output >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif is_repeating and num_output >= self.min_tokens:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = REPETITION_DETECTED
        else:
            return False
        return True

    def _completes_grammar(self, grammar: Grammar, token: int) -> bool:
        try:
            return grammar.advance(token)
        except Exception as error:  # an error in a grammar affects its request alone
            self.fail(f"the grammar failed: {error}")
            return True
