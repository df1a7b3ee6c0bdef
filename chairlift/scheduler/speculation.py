"""Speculation: which guesses at the next tokens of decode rows a step verifies.

A step that computes a row's newest token computes its guess beside it, and the sampler draws a token behind each of
them. While a draw is the token that was guessed, the next one counts as well; the first that differs is the last.
A draw depends on a row's seed and the token's index, and logits do not depend on what else is computed, so that the
row's tokens are those that it would have without speculation. Only the time changes.

How much to guess is a question of time. A step of `num_tokens` takes `StepTimes` seconds, which is learned as steps
go by; a guess saves a share of a step if it is right, and how often guesses are is learned by row. What is expected to
take longer than it saves is not verified.
"""

from bisect import bisect_left
from collections.abc import Sequence

from chairlift.config import Auto
from chairlift.scheduler.drafting import FORCED_MATCH, NO_GUESS, Answers, Drafter, Guess
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.plan import NextStep, RowPlan, StepPlan
from chairlift.scheduler.request import RequestState

MAX_DRAFT = 16
"""Tokens of a row's guess: what "auto" verifies at most."""

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SLOWER_STEP, _QUICKER_STEP = 0.1, 0.3  # the newest one's weight in the average
_MOST_SLOWER = 2.0  # than the average: what a step is taken for that takes longer
_NUM_REMEMBERED = 500  # steps
_UNKNOWN_COST = 0.02  # of a further token, as a share of the shortest step: little, so that it is tried
_MIN_GAIN = 1.1  # of what a token is expected to save over what it is expected to take
_MIN_CHANCE = 0.1  # that a token is right: less is not tried, however little it seems to take


class StepTimes:
    """Seconds of a step by the tokens that it computes, as they have been lately. Sizes between are interpolated.

    What else runs on the machine makes a step slower and never faster, so that quick steps are believed sooner than
    slow ones; and a size that did not come for a while is forgotten, lest one bad step keep it from ever coming again.
    """

    def __init__(self) -> None:
        self._known: dict[int, float] = {}  # by size
        self._newest: dict[int, int] = {}  # by size: the number of the step that told
        self._num_steps = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step took so long. Of sizes between two, the nearer one learns."""
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
        """0 while nothing is known at all."""
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
    """Chooses what is verified, and learns from what came of it. Belongs to the scheduler."""

    def __init__(self, max_tokens: int | Auto = "auto") -> None:
        """`max_tokens`: of every guess, whatever it takes; "auto": as many as are expected to save time."""
        self._max_tokens = max_tokens
        self.times = StepTimes()
        self.answers = Answers()
        # Since it was made. Verified tokens that are not part of an answer were wasted.
        self.num_drafted = self.num_accepted = 0
        self.accepted_at: list[int] = []  # by place in the guess

    def add_guesses(self, step: NextStep, placement: Placement) -> None:
        """Adds what decode rows verify, with what prompts left of the budget. No row yields memory for a guess."""
        requests = [row.request for row in step.decode]
        num_tokens = len(requests) + step.num_prompt_tokens
        guesses = self._choose(requests, num_tokens)
        decode, step.decode = step.decode, []
        for row in decode:
            request = row.request
            guess = guesses.get(request.request_id, NO_GUESS).cut(step.num_left)
            wanted = request.num_computed + 1 + len(guess.tokens)
            if guess.tokens and wanted > request.num_held and not placement.provide(request, wanted):
                guess = guess.cut(request.num_held - request.num_computed - 1)
            if guess.tokens:
                step.num_left -= len(guess.tokens)
                step.guessing.append(RowPlan(request, 1 + len(guess.tokens), is_sampled=True, guess=guess))
            else:
                step.decode.append(row)

    def learn(self, row: RowPlan, num_kept: int, num_sampled: int) -> None:
        """A row's guess was verified: so many tokens were sampled up to the first that was not guessed, and so many of
        them are part of the answer.
        """
        request, num_drafted = row.request, len(row.guess.tokens)
        num_accepted = min(num_kept, max(num_sampled - 1, 0))
        rates = None if request.drafter is None else request.drafter.rates
        assert rates is not None, "who has none makes no guess"
        rates.note(row.guess, num_accepted)
        request.num_drafted += num_drafted
        request.num_accepted += num_accepted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def remember(self, request: RequestState) -> None:
        """A request has ended: what its client asks next may be answered alike."""
        drafter = request.drafter
        if drafter is not None and drafter.rates is not None and request.error is None:
            self.answers.remember(_client_of(request), request.token_ids, request.num_prompt_tokens, drafter.rates)

    def note_launch(self, plan: StepPlan, seconds: float) -> None:
        """A launch took so long, all of its steps together."""
        self.times.note(sum(row.num_new_tokens for row in plan.rows), seconds / plan.num_steps)

    def _choose(self, requests: Sequence[RequestState], num_tokens: int) -> dict[str, Guess]:
        """By request: the guess of each that decodes in a step that computes `num_tokens` without guesses."""
        most = MAX_DRAFT if self._max_tokens == "auto" else self._max_tokens
        guesses: dict[str, Guess] = {}
        rates: dict[str, float] = {}
        for request in requests:
            num_wanted = min(most, request.num_remaining - 1)
            if request.drafter is None or request.num_pending or num_wanted <= 0:
                continue
            drafter = request.drafter
            drafter.rates = drafter.rates or self.answers.rates_of(_client_of(request))
            guess = self._guess(request, drafter, num_wanted)
            if guess.tokens:
                guesses[request.request_id] = guess
                rates[request.request_id] = drafter.rates.of(guess)
        if self._max_tokens == "auto" and guesses:
            guesses = self._worthwhile(guesses, rates, len(requests), num_tokens)
        return guesses

    def _guess(self, request: RequestState, drafter: Drafter, num_tokens: int) -> Guess:
        """What a grammar forces, or else what was said elsewhere."""
        if request.grammar is not None:
            forced = request.grammar.foresee()
            if forced is None:
                return NO_GUESS
            if forced:
                return Guess(forced, FORCED_MATCH).cut(num_tokens)
        return drafter.guess(request.token_ids, num_tokens, self.answers.of(_client_of(request)))

    def _worthwhile(
        self, guesses: dict[str, Guess], rates: dict[str, float], num_rows: int, num_tokens: int
    ) -> dict[str, Guess]:
        """The guesses as far as each token is expected to save more than it takes.

        The i-th token of a guess is right with a probability of rate ** i, and saves one row's share of a step that
        only decodes. It takes as long as the tokens of all guesses take on average, so what is worthwhile is worked out
        twice: the second time with the tokens that were left.
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
    """The group that shares answers for guesses: a key's requests, and never those of different salts."""
    return request.options.tenant, request.options.cache_salt


def _num_above(rate: float, threshold: float, most: int) -> int:
    """The largest count, up to `most`, for which rate ** count is above the threshold."""
    count, chance = 0, rate
    while count < most and chance > threshold:
        count, chance = count + 1, chance * rate
    return count
