"""Speculation: which guesses at the next tokens of decode rows a step verifies.

A step computes a row's guess together with its newest token, and the sampler draws a token after each of these. Draws
count up to and including the first that differs from the guess. A draw depends on the row's seed and the token's index,
and logits do not depend on what else is computed, so the row gets the tokens that it would get without speculation.
Only the time changes.

How much to guess depends on time. `StepTimes` learns how long a step of so many tokens takes, and each row learns how
often its guesses are right; a right one saves a share of a step. Tokens that are expected to take longer than they save
are not verified.
"""

from bisect import bisect_left
from collections.abc import Sequence

from chairlift.config import MAX_DRAFT, Auto
from chairlift.plan import StepPlan
from chairlift.scheduler.drafting import FORCED_MATCH, NO_GUESS, Answers, Drafter, Guess, IndexBudget
from chairlift.scheduler.next_step import NextStep
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.request import RequestState

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SLOWER_STEP, _QUICKER_STEP = 0.1, 0.3  # weight of the newest step in the average
_MOST_SLOWER = 2.0  # times the average: the most that a slower step counts as
_NUM_REMEMBERED = 500  # steps
_UNKNOWN_COST = 0.02  # of a token beyond the largest known size, as a share of its step: low, so that it is tried
_MIN_GAIN = 1.1  # least ratio of the time that a token is expected to save to the time that it takes
_MIN_CHANCE = 0.1  # least probability that a token is right, however little time it seems to take


class StepTimes:
    """Recent seconds of a step, by the number of tokens that it computes; interpolated between known sizes.

    Other load on the machine makes a step slower and never faster, so quick steps have more weight than slow ones. A
    size that did not occur for a while is forgotten, so that one slow step does not rule it out for ever.
    """

    def __init__(self) -> None:
        self._known: dict[int, float] = {}  # by size
        self._newest: dict[int, int] = {}  # by size: the number of its newest step
        self._num_steps = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Records the time of a step, for the nearest of `_SIZES`."""
        index = min(bisect_left(_SIZES, num_tokens), len(_SIZES) - 1)
        if index and num_tokens - _SIZES[index - 1] < _SIZES[index] - num_tokens:
            index -= 1
        size = _SIZES[index]
        seconds *= size / num_tokens if num_tokens > _SIZES[-1] else 1.0
        known = self._known.get(size, seconds)
        weight = _QUICKER_STEP if seconds < known else _SLOWER_STEP
        self._known[size] = known + weight * (min(seconds, _MOST_SLOWER * known) - known)
        self._num_steps += 1
        self._newest[size] = self._num_steps
        stalest = min(self._newest, key=self._newest.__getitem__)
        if self._newest[stalest] <= self._num_steps - _NUM_REMEMBERED:
            del self._newest[stalest], self._known[stalest]

    def of(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens is expected to take; 0 while nothing is known."""
        if not self._known:
            return 0.0
        sizes = sorted(self._known)
        place = bisect_left(sizes, num_tokens)
        if place == len(sizes):
            return self._known[sizes[-1]] * (1 + _UNKNOWN_COST * (num_tokens - sizes[-1]))
        if not place or sizes[place] == num_tokens:
            return self._known[sizes[place]]
        below, above = sizes[place - 1 : place + 1]
        share = (num_tokens - below) / (above - below)
        return self._known[below] + share * (self._known[above] - self._known[below])


class Speculation:
    """Chooses which guesses are verified, and learns from the results. Belongs to the scheduler."""

    def __init__(self, max_tokens: int | Auto = "auto") -> None:
        """`max_tokens`: of every guess, whatever time it takes; "auto": as many as are expected to save time."""
        self._max_tokens = max_tokens
        self.times = StepTimes()
        self.answers = Answers()
        # Since creation. Verified tokens that are not part of an answer were wasted.
        self.num_drafted = self.num_accepted = 0
        self.accepted_at: list[int] = []  # by place in the guess

    def add_guesses(self, step: NextStep, placement: Placement) -> None:
        """Adds guesses to decode rows, within the budget that prompts left. No row is preempted for their memory."""
        num_tokens = len(step.decode) + step.num_prompt_tokens
        guesses = self._choose(step.decode, num_tokens)
        decode, step.decode = step.decode, []
        for request in decode:
            guess = guesses.get(request.request_id, NO_GUESS).cut(step.num_left)
            wanted = request.num_computed + 1 + len(guess.tokens)
            if guess.tokens and wanted > request.num_held and not placement.provide(request, wanted):
                guess = guess.cut(request.num_held - request.num_computed - 1)
            if guess.tokens:
                step.num_left -= len(guess.tokens)
                step.guessing.append((request, guess))
            else:
                step.decode.append(request)

    def learn(self, request: RequestState, num_kept: int, num_sampled: int) -> None:
        """Records a verified guess, its newest: `num_sampled` tokens were sampled, up to and including the first that
        was not guessed, and `num_kept` of them are part of the answer.
        """
        num_drafted = len(request.guess.tokens)
        num_accepted = min(num_kept, max(num_sampled - 1, 0))
        rates = None if request.drafter is None else request.drafter.rates
        assert rates is not None, "a guess needs rates"
        rates.note(request.guess, num_accepted)
        request.num_drafted += num_drafted
        request.num_accepted += num_accepted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def remember(self, request: RequestState) -> None:
        """Remembers the answer of a request that has ended: its client's next answer may be similar."""
        drafter = request.drafter
        if drafter is not None and drafter.rates is not None and request.error is None:
            self.answers.remember(_client_of(request), request.token_ids, request.num_prompt_tokens, drafter.rates)

    def note_launch(self, plan: StepPlan, seconds: float) -> None:
        """Records the time of a launch, all of its steps together."""
        self.times.note(sum(plan.num_new_tokens), seconds / plan.num_steps)

    def _choose(self, requests: Sequence[RequestState], num_tokens: int) -> dict[str, Guess]:
        """By request: guesses for a step that computes `num_tokens` tokens without them."""
        most = MAX_DRAFT if self._max_tokens == "auto" else self._max_tokens
        guesses: dict[str, Guess] = {}
        rates: dict[str, float] = {}
        budget = IndexBudget()
        for request in requests:
            num_wanted = min(most, request.num_remaining - 1)
            if request.drafter is None or request.num_pending or num_wanted <= 0:
                continue
            drafter = request.drafter
            drafter.rates = drafter.rates or self.answers.rates_of(_client_of(request))
            guess = self._guess(request, drafter, num_wanted, budget)
            if guess.tokens:
                guesses[request.request_id] = guess
                rates[request.request_id] = drafter.rates.of(guess)
        if self._max_tokens == "auto" and guesses:
            guesses = self._worthwhile(guesses, rates, len(requests), num_tokens)
        return guesses

    def _guess(self, request: RequestState, drafter: Drafter, num_tokens: int, budget: IndexBudget) -> Guess:
        """The tokens that a grammar forces, or else a guess from earlier text."""
        if request.grammar is not None:
            forced = request.grammar.foresee()
            if forced is None:
                return NO_GUESS
            if forced:
                return Guess(forced, FORCED_MATCH).cut(num_tokens)
        return drafter.guess(request.token_ids, num_tokens, self.answers.of(_client_of(request)), budget)

    def _worthwhile(
        self, guesses: dict[str, Guess], rates: dict[str, float], num_rows: int, num_tokens: int
    ) -> dict[str, Guess]:
        """Cuts each guess to the tokens that are expected to save more time than they take.

        The i-th token of a guess is right with a probability of rate ** i, and then saves one row's share of a step
        that only decodes. It takes as long as the tokens of all guesses take on average, which depends on the cut, so
        the cut is computed twice: the second time from the tokens that the first one left.
        """
        saved = self.times.of(num_rows) / num_rows
        chosen = guesses
        for _ in range(2):
            num_drafted = sum(len(guess.tokens) for guess in chosen.values())
            if not num_drafted or not saved:
                break
            taken = (self.times.of(num_tokens + num_drafted) - self.times.of(num_tokens)) / num_drafted
            threshold = max(_MIN_GAIN * taken / saved, _MIN_CHANCE)
            counts = {name: _num_above(rates[name], threshold, len(guess.tokens)) for name, guess in guesses.items()}
            chosen = {name: guesses[name].cut(count) for name, count in counts.items() if count}
        return chosen


def _client_of(request: RequestState) -> tuple[str, str]:
    """Identifies the requests that share answers for guesses: those of one tenant with the same cache salt."""
    return request.options.tenant, request.options.cache_salt


def _num_above(rate: float, threshold: float, most: int) -> int:
    """The largest count, up to `most`, for which rate ** count is above the threshold."""
    count, chance = 0, rate
    while count < most and chance > threshold:
        count, chance = count + 1, chance * rate
    return count
