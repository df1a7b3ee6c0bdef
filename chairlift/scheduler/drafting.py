"""Guesses at what a sequence says next: what followed, earlier in its text, the tokens that it now ends with.

The text may begin with a guess at the whole answer, the prediction:

    tokens  | prediction | NONE | prompt | answer |

A look-up takes the same time however long the text is: the ends of all runs of two and of four tokens are indexed as
they come, and of earlier places with the same end only the newest few are compared (as LZ77 compressors do).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MATCH = 32
"""Tokens before a guess that are compared; more agreement says no more."""

_NONE = -1  # no token: nothing matches across it
_SHORT, _LONG = 2, 4  # tokens of indexed runs
_MAX_PLACES = 6  # that end as the text does: the newest
_PREDICTED_MATCH = 16  # what a place in the prediction counts for at least: somebody means it to be the answer
_MATCHES = (3, 6, 16)  # tokens before a guess from which on it counts as likelier
_FIRST_RATES = (0.2, 0.4, 0.7, 0.9)  # of guesses with fewer, and so on, until the row has shown what they are
_MAX_INDEXED = 1024  # in a look-up: a long prompt delays no step by more than some two milliseconds
_NEWEST_TOKEN = 0.1  # its weight in a rate


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next, and how many before them were the same where they come from."""

    tokens: Sequence[int]
    num_matched: int

    def cut(self, num_tokens: int) -> "Guess":
        """The first so many tokens of it."""
        return self if len(self.tokens) <= num_tokens else Guess(self.tokens[: max(num_tokens, 0)], self.num_matched)


NO_GUESS = Guess((), 0)


class Rates:
    """How often a row's guesses are right, token by token, by how much of the text before them agreed."""

    def __init__(self) -> None:
        self._shares = list(_FIRST_RATES)

    def of(self, guess: Guess) -> float:
        """The share of right ones among tokens whose predecessors were right."""
        return self._shares[bisect_right(_MATCHES, guess.num_matched)]

    def note(self, guess: Guess, num_accepted: int) -> None:
        """So many of its tokens were right. What came after the first wrong one shows nothing."""
        kind = bisect_right(_MATCHES, guess.num_matched)
        num_tried = min(num_accepted + 1, len(guess.tokens))
        weight = 1 - (1 - _NEWEST_TOKEN) ** num_tried
        self._shares[kind] += weight * (num_accepted / num_tried - self._shares[kind])


class Drafter:
    """Guesses for one sequence. Keeps a copy of its tokens."""

    def __init__(self, num_prompt_tokens: int, prediction: Sequence[int] = ()) -> None:
        self.rates = Rates()
        self._tokens = [*prediction, _NONE]
        self._num_predicted = len(prediction)
        self._start = len(self._tokens)  # of the prompt
        self._num_indexed = 0
        self._newest_short: dict[tuple[int, int], int] = {}  # run -> where it ended last
        self._newest_long: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # by place: the one before that a run of four ended with the same tokens
        # How far back the text is that the last guess came from; it is followed while it agrees.
        self._distance = self._start + num_prompt_tokens if prediction else 0

    def guess(self, token_ids: Sequence[int], num_tokens: int) -> Guess:
        """At most so many tokens, of a sequence that now has `token_ids`: each time there may be more than before."""
        self._tokens += token_ids[len(self._tokens) - self._start :]
        self._index()
        end, best, place = len(self._tokens) - 1, 0, 0
        for candidate in self._places(end):
            num_matched = self._num_matched(candidate, end)
            if num_matched > best:
                best, place = num_matched, candidate
        if not best:
            return NO_GUESS
        self._distance = end - place
        found = self._tokens[place + 1 : place + 1 + num_tokens]
        if place < self._num_predicted:
            best = max(best, _PREDICTED_MATCH)
            found = found[: self._num_predicted - place - 1]
        return Guess(_repeated(found, num_tokens) if place + num_tokens > end else found, best)

    def _places(self, end: int) -> list[int]:
        """Where what comes next may be found: behind each of these."""
        tokens = self._tokens
        places = [end - self._distance] if self._distance and self._distance <= end else []
        place = self._newest_long.get(tuple(tokens[end - _LONG + 1 :]), _NONE)
        if place == _NONE and end:
            place = self._newest_short.get((tokens[end - 1], tokens[end]), _NONE)
            return places if place == _NONE else [*places, place]
        while place != _NONE and len(places) < _MAX_PLACES:
            places.append(place)
            place = self._earlier[place]
        return places

    def _num_matched(self, place: int, end: int) -> int:
        tokens = self._tokens
        most = min(MAX_MATCH, place + 1)
        for back in range(most):
            if tokens[place - back] != tokens[end - back]:
                return back
        return most

    def _index(self) -> None:
        """All places but the last, which is what is looked for; of a long prompt in several goes."""
        tokens, newest, earlier = self._tokens, self._newest_long, self._earlier
        places = range(len(tokens) - 1)[self._num_indexed :][:_MAX_INDEXED]
        for place in places:
            run = tuple(tokens[place - _LONG + 1 : place + 1])
            earlier.append(newest.get(run, _NONE))
            newest[run] = place
            if place:
                self._newest_short[tokens[place - 1], tokens[place]] = place
        self._num_indexed += len(places)


def _repeated(tokens: list[int], num_tokens: int) -> list[int]:
    """What comes behind the text's own end is the same once more."""
    return (tokens * -(-num_tokens // len(tokens)))[:num_tokens] if tokens else tokens
