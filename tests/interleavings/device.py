"""A device whose slots hold a number for each token, which tells what the token is and what came before it.

Every row must find in its slot the numbers of its own request, so a copy that is too short, a scrub of the wrong
tokens or a slot given to two requests is seen when it is read, or before (`check`). Whatever the books call invalid is
overwritten with junk as soon as no work on the slots is pending, so stale contents are never right by chance.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chairlift.cache.ledger import SlotLedger
from chairlift.params import Logprob
from chairlift.plan import ON_DEVICE, Job, RowPlan, RowResult, Scrub, SlotCopy, SlotLoad, StepPlan
from chairlift.prompt_work import PooledStates, PoolTask, PromptPart, PromptScores
from tests.interleavings.device_states import DeviceStates
from tests.interleavings.disk import SavedNumbers
from tests.interleavings.scope import (
    INVALID,
    JUNK,
    NAN,
    ZERO,
    Case,
    CountingGrammar,
    Scope,
    first_number,
    next_number,
    next_token,
)
from tests.interleavings.violation import Violation, require

NO_MEMORY, NO_NUMBER = "the device ran out of memory", "its logits are not numbers"
WHOLE = 2**31  # pooled numbers are those beyond multiples of this
_NO_TOKEN = 0
_UNMASKED = -3  # a token that was sampled for a row whose mask was late


@dataclass(slots=True)
class Launch:
    """A launch whose results are not taken yet."""

    plan: StepPlan
    results: list[RowResult]
    is_out_of_memory: bool = False

    def num_coming(self, name: str) -> int:
        """Counts the tokens that it brings a request."""
        rows = zip(self.plan.rows, self.results, strict=True)
        return sum(len(result.token_ids) for row, result in rows if row.key.tag == name)

    @property
    def void_slots(self) -> set[int]:
        """The slots of rows that go on from tokens which do not count."""
        rows = zip(self.plan.rows, self.results, strict=True)
        return {row.slot for row, result in rows if result.is_late and ON_DEVICE in row.input_ids}


@dataclass(frozen=True, slots=True)
class Masks:
    """Holds what comes too late in a launch: the masks of these rows, and those after the guessed tokens of another
    one.
    """

    late: tuple[str, ...] = ()
    short: str = ""
    coming: Mapping[str, int] = field(default_factory=dict)  # by request: tokens that launches in flight bring it


class Device:
    """The slots' contents. Launches are computed at once, as a device does its work in order."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.contents = [array("q", [ZERO]) * scope.max_seq_len for _ in range(scope.num_slots)]
        # In which epoch each number was computed: an epoch ends when all prefixes are forgotten.
        self.epochs = [array("b", [0]) * scope.max_seq_len for _ in range(scope.num_slots)]
        self.newest = [_NO_TOKEN] * scope.num_slots  # the token that was sampled last in each slot
        self.states = DeviceStates(scope)

    def perform(self, jobs: Sequence[Job], ledger: SlotLedger, since: int = 0) -> None:
        """Performs copies and scrubs. Nothing may be copied that was computed before the epoch `since`."""
        for job in jobs:
            if isinstance(job, SlotCopy):
                end = job.num_tokens
                oldest = min(self.epochs[job.source][:end], default=since)
                require(oldest >= since, f"a prefix in slot {job.source} is copied, though it was forgotten")
                self.contents[job.target][:end] = self.contents[job.source][:end]
                self.epochs[job.target][:end] = self.epochs[job.source][:end]
            elif isinstance(job, Scrub):
                size = max(0, job.end - job.start)
                require(job.end <= ledger.max_seq_len, f"a scrub beyond slot {job.slot}")
                self.contents[job.slot][job.start : job.end] = array("q", [ZERO]) * size
            elif isinstance(job, SlotLoad):
                self._load(job, since)
            else:
                self.states.perform(job, since)

    def _load(self, job: SlotLoad, since: int) -> None:
        """Writes what was read into a slot. It counts as computed now, since `World` knows when it was saved."""
        saved = job.part.content
        assert isinstance(saved, SavedNumbers)
        first = job.start - job.part.start
        require(
            0 <= first <= job.end - job.part.start <= len(saved.numbers), f"slot {job.slot} gets more than was read"
        )
        numbers = saved.numbers[first : job.end - job.part.start]
        self.contents[job.slot][job.start : job.end] = array("q", numbers)
        self.epochs[job.slot][job.start : job.end] = array("b", [since]) * len(numbers)
        if job.part.has_state:
            self.states.load(job.slot, saved.numbers[-1], since)

    def compute(
        self, plan: StepPlan, ledger: SlotLedger, epoch: int, placed: dict[str, int], masks: Masks
    ) -> list[RowResult]:
        """Computes a plan. `placed`: each request's epoch. `masks`: those that come too late in this launch.

        A row that goes on from a token which was sampled without its mask writes junk, and gets none.
        """
        results = []
        for index, row in enumerate(plan.rows):
            case = self.scope.cases[row.key.tag]
            if ON_DEVICE in row.input_ids and self.newest[row.slot] == _UNMASKED:
                require(not self.states.numbers, f"{case.name} spoils its recurrent state")
                self._write(row, plan.num_steps, JUNK)
                results.append(RowResult(is_late=True))
                continue
            self._check_reads(plan, index, case, placed[case.name])
            self._check_mask(row, case, masks)
            require(
                row.start + row.num_new_tokens + plan.num_steps - 1 <= ledger.budget.limits[row.slot],
                f"{case.name} writes beyond the memory of slot {row.slot}",
            )
            inputs, drawn = self._compute_row(row, plan.num_steps, epoch)
            self.states.advance(plan, index, case, inputs, placed[case.name], epoch)
            result = self._result_of(row, drawn, masks)
            if drawn:
                self.newest[row.slot] = _UNMASKED if result.is_late else drawn[-1]
            results.append(result)
        return results

    def run_out_of_memory(self, plan: StepPlan) -> list[RowResult]:
        """Returns what an engine makes of a plan for which there is no memory; what its rows have written by then is
        unknown.

        The same rows come again or fail as in the engine's runner.
        """
        has_states = bool(self.states.numbers)
        num_repeated = 0 if plan.is_decode or has_states else plan.num_decode_rows
        results = []
        for index, row in enumerate(plan.rows):
            is_repeated = index < num_repeated and not row.guess
            self._write(row, plan.num_steps, JUNK if is_repeated else NAN)
            results.append(RowResult(is_late=True) if is_repeated else RowResult(error=NO_MEMORY, has_bad_surplus=True))
        self.states.spoil(plan)
        return results

    def fail(self, plan: StepPlan) -> None:
        """Breaks down in the middle of a plan: what its rows have written is NaN."""
        for row in plan.rows:
            self._write(row, plan.num_steps, NAN)
        self.states.spoil(plan)

    def forget_invalid(self, ledger: SlotLedger, busy: set[int]) -> None:
        """Overwrites what the books call invalid, unless work on the slots is pending. `busy`: slots in a launch."""
        if ledger.owed:
            return
        for slot, contents in enumerate(self.contents):
            start = ledger.num_loaded(slot)
            stale, size = contents[start:], len(contents) - start
            if NAN in stale:  # which nothing but a scrub or a write removes
                contents[start:] = array("q", [NAN if number == NAN else JUNK for number in stale])
            else:
                contents[start:] = array("q", [JUNK]) * size
            self.epochs[slot][start:] = array("b", [0]) * size
            if slot not in busy:
                self.newest[slot] = _NO_TOKEN
        self.states.forget_invalid(ledger.states)

    def check(self, ledger: SlotLedger) -> None:
        """Checks that what warm slots offer is sound, and free ones hold no NaN, once no work on them is pending."""
        if ledger.owed:
            return
        warm = ledger.warm
        for slot, contents in enumerate(self.contents):
            if ledger.contains(slot):
                continue
            valid = contents[: warm.get(slot, 0)]
            require(JUNK not in valid and ZERO not in valid, f"warm slot {slot} has lost what it offers")
            require(NAN not in contents, f"slot {slot} was released with NaN in it")

    def check_slot(self, slot: int, length: int, case: Case) -> None:
        """Checks that a claimed slot holds the first `length` tokens of its request."""
        wanted = array("q", case.numbers[:length])
        if self.contents[slot][:length] != wanted:
            self._explain(slot, wanted, f"slot {slot} of {case.name}")

    def _check_reads(self, plan: StepPlan, index: int, case: Case, epoch: int) -> None:
        """Checks what a row finds in its slot, and in the one that it shares a prefix with."""
        row = plan.rows[index]
        wanted = array("q", case.numbers[: row.start])
        contents = self.contents[row.slot]
        if contents[: row.start] != wanted:
            self._explain(row.slot, wanted, f"{case.name} reads slot {row.slot}")
        require(not row.start or min(self.epochs[row.slot][: row.start]) >= epoch, f"{case.name} reuses the forgotten")
        end = row.start + row.num_new_tokens
        require(
            NAN not in contents[end:], f"{case.name} computes in slot {row.slot} before NaN, which masks do not stop"
        )
        require(row.num_new_tokens > 0, f"{case.name} has a row without tokens")
        assert plan.reservation is not None
        require(plan.reservation.lengths[index] == row.start, f"{case.name} starts elsewhere than the books say")
        if plan.reservation.common_prefixes:
            shared = plan.reservation.common_prefixes[index]
            if self.contents[shared.slot][: shared.num_tokens] != wanted[: shared.num_tokens]:
                self._explain(shared.slot, wanted[: shared.num_tokens], f"{case.name} reads slot {shared.slot}")

    def _check_mask(self, row: RowPlan, case: Case, masks: Masks) -> None:
        """Checks that the mask of a row is its own, and that of its next token.

        It is applied once the grammar has consumed the tokens of the launches before.
        """
        grammar = row.key.grammar
        if isinstance(grammar, CountingGrammar) and row.is_sampled:
            num_consumed = grammar.num_taken + masks.coming.get(case.name, 0)
            require(row.num_output_tokens == num_consumed, f"{case.name} gets the mask of another token")

    def _explain(self, slot: int, wanted: "array[int]", message: str) -> None:
        for position, number in enumerate(wanted):
            found = self.contents[slot][position]
            if found != number:
                names = self.scope.owner_of_number
                raise Violation(f"{message}: token {position} is {names.get(found, 'unknown')}, not {names[number]}")

    def _compute_row(self, row: RowPlan, num_steps: int, epoch: int) -> tuple[list[int], list[int]]:
        """Writes a row's tokens. Returns these, and those sampled: after its last, each guessed one and each step."""
        salt = self.scope.cases[row.key.tag].request.options.cache_salt
        contents, epochs = self.contents[row.slot], self.epochs[row.slot]
        number = contents[row.start - 1] if row.start else first_number(salt)
        first_sampled = row.start + row.num_new_tokens - 1 - len(row.guess)
        inputs, drawn = list[int](), list[int]()
        for position in range(row.start, row.start + row.num_new_tokens + num_steps - 1):
            index = position - row.start
            token = row.input_ids[index] if index < row.num_new_tokens else drawn[-1]
            if token == ON_DEVICE:
                token = self.newest[row.slot]
                require(token != _NO_TOKEN, f"{row.key.tag} wants a token that the device does not have")
            inputs.append(token)
            number = NAN if number == NAN or token == INVALID else next_number(number, token)
            number = NAN if number in self.scope.spoiled else number
            contents[position], epochs[position] = number, epoch
            if row.is_sampled and position >= first_sampled:
                drawn.append(next_token(number))
        return inputs, drawn

    def _result_of(self, row: RowPlan, drawn: list[int], masks: Masks) -> RowResult:
        if row.work.part is not None and isinstance(row.work.part.task, PoolTask):
            return self._pool(row, row.work.part)
        part = row.work.part
        scores = None if part is None else PromptScores([{token: Logprob(0.0, 1)} for token in part.following])
        grammar = row.key.grammar
        if row.is_sampled and (row.key.tag in masks.late or (grammar is not None and not grammar.is_ready)):
            return RowResult(is_late=True, prompt_result=scores)
        own = drawn
        if row.guess and row.key.tag == masks.short:
            own = drawn[:1]
        elif row.guess:
            wrong = (at for at, token in enumerate(row.guess) if drawn[at] != token)
            own = drawn[: next(wrong, len(row.guess)) + 1]
        is_bad = INVALID in own
        return RowResult(
            own[: own.index(INVALID)] if is_bad else own,
            prompt_result=scores,
            error=NO_NUMBER if is_bad else None,
            has_bad_surplus=INVALID in drawn,
        )

    def _pool(self, row: RowPlan, part: PromptPart) -> RowResult:
        """Sums the numbers of the tokens that the part reads."""
        start = row.start + part.first
        numbers = self.contents[row.slot][start : start + part.num_tokens]
        pooled = PooledStates(array("q", [sum(numbers) % WHOLE]), part.num_tokens, is_finite=NAN not in numbers)
        return RowResult(prompt_result=pooled, error=None if pooled.is_sound else NO_NUMBER)

    def _write(self, row: RowPlan, num_steps: int, number: int) -> None:
        for position in range(row.start, row.start + row.num_new_tokens + num_steps - 1):
            self.contents[row.slot][position] = number
