"""The recurrent states of a device: a number for each row of a slot or a snapshot, which tells what it has taken.

The number of a state is that of the last token it has taken, so a state of other tokens, or of the same ones under
another salt, has another number. Inputs that may be taken back are kept as tokens. What the books call invalid is
overwritten with junk, as in `device.py`; what was freed is zeros.
"""

import sys
from array import array
from collections.abc import Collection, Sequence
from functools import cache

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, cut_tokens, pack_tokens
from chairlift.cache.state_books import StateBooks
from chairlift.plan import Job, SlotLoad, StateCopy, StateScrub, StepPlan
from chairlift.scheduler import Scheduler
from tests.interleavings.disk import SavedNumbers
from tests.interleavings.scope import INVALID, JUNK, NAN, ZERO, Case, Scope, first_number, next_number
from tests.interleavings.violation import require

_TOKEN_TYPE = "i"  # of packed tokens


class DeviceStates:
    """Rows of states, and the pending inputs of slots. There are no rows if layers have none."""

    def __init__(self, scope: Scope) -> None:
        num_rows = 0 if scope.num_snapshots is None else scope.num_slots + scope.num_snapshots
        self.scope = scope
        self.numbers = array("q", [ZERO]) * num_rows
        self.epochs = array("b", [0]) * num_rows  # that of the oldest input which a state has taken
        self.pending: list[list[int]] = [[] for _ in range(scope.num_slots if num_rows else 0)]

    def perform(self, job: Job, since: int) -> None:
        """Copies or frees a row, if the job is about states. Nothing is copied that is older than the epoch `since`."""
        if isinstance(job, StateCopy):
            require(self.epochs[job.source] >= since, f"the state in row {job.source} is copied, though forgotten")
            require(self.numbers[job.source] != ZERO, f"the state in row {job.source} is copied after it was freed")
            self.numbers[job.target], self.epochs[job.target] = self.numbers[job.source], self.epochs[job.source]
        elif isinstance(job, StateScrub):
            self.numbers[job.row] = ZERO
            if job.row < len(self.pending):
                self.pending[job.row] = []

    def load(self, row: int, number: int, epoch: int) -> None:
        """Writes a state that was read into the row of a slot."""
        self.numbers[row], self.epochs[row] = number, epoch

    def advance(self, plan: StepPlan, index: int, case: Case, new: Sequence[int], oldest: int, epoch: int) -> None:
        """Takes a row's inputs: pending ones, then the new ones but the tentative ones, which are pending from here on.

        Without guesses a state stops before the token that ends its sequence, whatever is computed beyond.
        `oldest`: the epoch of what the row may go on from. `epoch`: now.
        """
        if not self.numbers:
            return
        assert plan.reservation is not None
        slot, start = plan.reservation.seq_ids[index], plan.reservation.lengths[index]
        num_replayed, num_tentative = plan.reservation.num_replayed[index], plan.reservation.num_tentative[index]
        position, replayed = start - num_replayed, self.pending[slot][:num_replayed]
        end = sys.maxsize if self.scope.num_guessed else case.end
        number = first_number(case.request.options.cache_salt)
        if position:
            number = self.numbers[slot]
            self._require_number(number, case.numbers[min(position, end) - 1], f"{case.name} goes on from row {slot}")
            require(self.epochs[slot] >= oldest, f"{case.name} goes on from a state that was forgotten")
        if position > end:
            return
        wanted = list(case.tokens[position:start])
        require(replayed == wanted, f"{case.name} replays {replayed}, and its tokens there are {wanted}")
        inputs = [*replayed, *new]
        num_settled = len(inputs) - num_tentative
        for token in inputs[: min(num_settled, end - position)]:
            number = self._after(number, token)
        self.numbers[slot], self.pending[slot] = number, inputs[num_settled:]
        self.epochs[slot] = min(self.epochs[slot], epoch) if position else epoch

    def spoil(self, plan: StepPlan) -> None:
        """Breaks down in the middle of a plan: states and pending inputs of its rows are NaN."""
        for slot in plan.slots if self.numbers else ():
            self.numbers[slot] = NAN
            self.pending[slot] = [INVALID] * len(self.pending[slot])

    def forget_invalid(self, books: StateBooks | None) -> None:
        """Overwrites what the books call invalid. No work on the rows may be pending."""
        if books is None:
            return
        kept = _kept(books).slots
        for row, number in enumerate(self.numbers):
            is_slot = row < len(self.pending)
            if is_slot:
                del self.pending[row][books.reach(row) - books.position(row) :]
            if number != ZERO and not (books.position(row) if is_slot else row in kept):
                self.numbers[row], self.epochs[row] = JUNK, 0

    def check(self, ledger: SlotLedger, warm: PrefixIndex, owners: dict[int, Case], *, is_in_flight: bool) -> None:
        """Checks every state that a request can go on from, as it is once pending work is done.

        `warm`: knows the tokens of warm slots. `owners`: of claimed slots whose contents are certain. What a launch
        in flight leaves may be NaN until its results are known.
        """
        books = ledger.states
        if books is None:
            return
        numbers = self._after_jobs(ledger.owed)
        kept = _kept(books)
        require(self.scope.policy.enable_prefix_caching or not kept.slots, "a state is kept though nothing is reused")
        for row in kept.slots:
            tokens, salt = kept.entry(row)
            if numbers[row] != NAN or not is_in_flight:
                self._require_number(numbers[row], self._number_of(tokens, salt), f"the kept state in row {row}")
        for slot in ledger.warm:
            tokens, salt = warm.entry(slot)
            position, reach = books.position(slot), books.reach(slot)
            if position:
                wanted = self._number_of(cut_tokens(tokens, position), salt)
                self._require_number(numbers[slot], wanted, f"the state of warm slot {slot}")
            pending = array(_TOKEN_TYPE, self.pending[slot][: reach - position]).tobytes()
            is_theirs = pending == cut_tokens(tokens, reach)[len(cut_tokens(tokens, position)) :]
            require(is_theirs or slot in _freed(ledger), f"pending inputs of warm slot {slot} are not its tokens'")
        for slot, case in owners.items():
            position = books.position(slot)
            if 0 < position <= len(case.numbers):
                taken = position if self.scope.num_guessed else min(position, case.end)
                self._require_number(numbers[slot], case.numbers[taken - 1], f"the state of {case.name}")

    def check_freed(self, books: StateBooks | None) -> None:
        """Checks that states that nobody needs take no memory. To be called after a trim."""
        if books is None:
            return
        kept = _kept(books).slots
        for row, number in enumerate(self.numbers):
            is_needed = books.position(row) > 0 if row < len(self.pending) else row in kept
            require(is_needed or number == ZERO, f"row {row} takes memory, and nobody needs its state")

    def _after_jobs(self, jobs: Collection[Job]) -> "array[int]":
        numbers = array("q", self.numbers)
        for job in jobs:
            if isinstance(job, StateCopy):
                numbers[job.target] = numbers[job.source]
            elif isinstance(job, StateScrub):
                numbers[job.row] = ZERO
            elif isinstance(job, SlotLoad) and job.part.has_state:
                assert isinstance(job.part.content, SavedNumbers)
                numbers[job.slot] = job.part.content.numbers[-1]
        return numbers

    def _after(self, number: int, token: int) -> int:
        number = NAN if number == NAN or token == INVALID else next_number(number, token)
        return NAN if number in self.scope.spoiled else number

    def _number_of(self, tokens: bytes, salt: str) -> int:
        return _number_of(tokens, salt, self.scope.spoiled)

    def _require_number(self, found: int, wanted: int, message: str) -> None:
        if found != wanted:
            names = self.scope.owner_of_number
            told, meant = (names.get(number, "that of unknown tokens") for number in (found, wanted))
            require(False, f"{message}: it is {told}, not {meant}")


def check_junctions(
    plan: StepPlan, marks: dict[str, tuple[int, ...]], scheduler: Scheduler, ledger: SlotLedger
) -> None:
    """Checks that a prompt's state stops where one is wanted, and is kept there.

    `marks`: by request, the numbers of tokens after which a state was wanted before the plan began.
    """
    states, index = ledger.states, scheduler.placement._index
    for row in plan.rows[plan.num_decode_rows :] if states is not None else ():
        assert states is not None
        name = row.key.tag
        request = scheduler.find(name)
        assert request is not None, f"{name} is computed after its end"
        passed = [mark for mark in marks[name] if row.start < mark <= request.num_computed]
        if not passed or row.guess:
            continue
        position = states.position(row.slot)
        is_there = max(passed) - request.prompt_tail <= position <= min(passed)
        require(is_there, f"{name} goes past token {passed[0]}, where its state is wanted")
        if row.slot in index and position and states.snapshots.capacity >= len(plan.rows):
            tokens = pack_tokens(request.token_ids[:position])
            kept = states.snapshots.find(tokens, request.options.cache_salt, position)
            require(kept is not None and kept.num_tokens == position, f"{name} leaves no state after {position}")


def _kept(books: StateBooks) -> PrefixIndex:
    """The rows of snapshots that hold a state, with its tokens."""
    return books.snapshots._index


def _freed(ledger: SlotLedger) -> set[int]:
    return {job.row for job in ledger.owed if isinstance(job, StateScrub)}


@cache
def _number_of(tokens: bytes, salt: str, spoiled: frozenset[int]) -> int:
    number = first_number(salt)
    for token in array(_TOKEN_TYPE, tokens):
        number = NAN if number == NAN else next_number(number, token)
        number = NAN if number in spoiled else number
    return number
