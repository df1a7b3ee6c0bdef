"""Guesses at what a sequence says next: what followed, somewhere else, the tokens that it now ends with.

The longest such end is looked for in the sequence itself, which may begin with a guess at the whole answer, in what
slots hold behind the same prompt, and in the answers that its client was given lately:

    | prediction | NONE | prompt | answer |        | end of a prompt | answer | NONE | end of a prompt | answer | NONE |

A look-up takes the same time however long a text is: the ends of all runs of two and of four tokens are indexed as
they come, and of earlier places with the same end only the newest few are compared (as LZ77 compressors do).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_MATCH = 32
"""Tokens before a guess that are compared; more agreement says no more."""

FORCED_MATCH = MAX_MATCH + 1
"""What counts as matched before tokens that a grammar forces."""

MAX_CONTINUATIONS, MAX_CONTINUATION = 2, 2**11
"""Slots that begin with a prompt, and tokens behind it in each, in which its answer is looked for."""

_NONE = -1  # no token: no guess goes beyond it
_SHORT, _LONG = 2, 4  # tokens of indexed runs
_MAX_PLACES = 6  # in a text, that end as the sequence does: the newest
_PREDICTED_MATCH = 16  # what a place in the prediction counts for at least: somebody means it to be the answer
_MATCHES = (3, 6, 16, FORCED_MATCH)  # tokens before a guess from which on it counts as likelier
_FIRST_RATES = (0.2, 0.4, 0.7, 0.9, 0.95)  # of guesses with fewer, and so on, until the row has shown what they are
_MAX_INDEXED = 1024  # of a text in a look-up: a long prompt delays no step by more than some two milliseconds
_NEWEST_TOKEN = 0.1  # its weight in a rate
_NEWEST_ANSWER = 0.3  # the weight of its rates in those that its client's next one starts with
_HOPE = 0.05  # by which these go back to the first ones, so that what is not tried any more is tried again
_MAX_REMEMBERED = 2**14  # tokens of one client's answers: so many, and as many older ones
_MAX_REMEMBERED_IN_ALL = 2**17  # of all clients' together: 20 MB
_MAX_ANSWER = 2**12  # tokens of an answer: its first ones


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

    def __init__(self, like: "Rates | None" = None) -> None:
        """`like`: what those of rows before it have come to."""
        self._shares: list[float] = list(_FIRST_RATES if like is None else like._shares)

    def follow(self, ended: "Rates") -> None:
        """Records the rates of a row that has ended, as an estimate for the next one."""
        towards = zip(self._shares, ended._shares, _FIRST_RATES, strict=True)
        mixed = ((share + _NEWEST_ANSWER * (newest - share), first) for share, newest, first in towards)
        self._shares = [share + _HOPE * (first - share) for share, first in mixed]

    def of(self, guess: Guess) -> float:
        """The share of right ones among tokens whose predecessors were right."""
        return self._shares[bisect_right(_MATCHES, guess.num_matched)]

    def note(self, guess: Guess, num_accepted: int) -> None:
        """So many of its tokens were right; those after the first wrong one are not counted."""
        kind = bisect_right(_MATCHES, guess.num_matched)
        num_tried = min(num_accepted + 1, len(guess.tokens))
        weight = 1 - (1 - _NEWEST_TOKEN) ** num_tried
        self._shares[kind] += weight * (num_accepted / num_tried - self._shares[kind])


class Text:
    """Tokens that grow, and where in them a run of tokens ended."""

    def __init__(self, finds_short: bool) -> None:
        """`finds_short`: also runs of two tokens, if there is no longer one; in much text each of them is somewhere."""
        self.tokens: list[int] = []
        self._finds_short = finds_short
        self._num_indexed = 0
        self._newest_short: dict[tuple[int, ...], int] = {}  # run -> where it ended last
        self._newest_long: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # by place: the one before that a run of four ended with the same tokens

    def places(self, ending: tuple[int, ...]) -> list[int]:
        """Where it says what a sequence with this ending, of `_LONG` tokens, ends with: the newest first."""
        self._index()
        places: list[int] = []
        place = self._newest_long.get(ending, _NONE)
        if place == _NONE:
            place = self._newest_short.get(ending[-_SHORT:], _NONE)
            return places if place == _NONE else [place]
        while place != _NONE and len(places) < _MAX_PLACES:
            places.append(place)
            place = self._earlier[place]
        return places

    def _index(self) -> None:
        """All places but the last, behind which there is nothing; of many in several goes."""
        tokens, newest, earlier = self.tokens, self._newest_long, self._earlier
        places = range(len(tokens) - 1)[self._num_indexed :][:_MAX_INDEXED]
        for place in places:
            run = tuple(tokens[max(place - _LONG + 1, 0) : place + 1])
            earlier.append(newest.get(run, _NONE))
            newest[run] = place
            if place and self._finds_short:
                self._newest_short[run[-_SHORT:]] = place
        self._num_indexed += len(places)


@dataclass(slots=True)
class _Client:
    """What is remembered of one."""

    texts: list[Text]  # one or two, the newer one last
    rates: Rates


class Answers:
    """Recent answers, by client: similar questions often have similar answers.

    No other client's are looked at here, so that timing and counts reveal nothing of them.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, _Client] = OrderedDict()  # who came least lately is first
        self._num_tokens = 0

    def of(self, client: Hashable) -> Sequence[Text]:
        """That client's earlier answers, to search for its next one."""
        known = self._clients.get(client)
        return () if known is None else known.texts

    def rates_of(self, client: Hashable) -> Rates:
        """What a new row of that client starts with."""
        known = self._clients.get(client)
        return Rates() if known is None else Rates(like=known.rates)

    def remember(self, client: Hashable, token_ids: Sequence[int], num_prompt_tokens: int, rates: Rates) -> None:
        """A prompt and its answer, of which the first tokens count, and its rates. The oldest make room for it."""
        begin, end = max(num_prompt_tokens - MAX_MATCH, 0), num_prompt_tokens + _MAX_ANSWER
        tokens = [*token_ids[begin:end], _NONE]
        known = self._clients.setdefault(client, _Client([Text(finds_short=False)], Rates()))
        self._clients.move_to_end(client)
        known.rates.follow(rates)
        texts = known.texts
        if texts[-1].tokens and len(texts[-1].tokens) + len(tokens) > _MAX_REMEMBERED:
            texts.append(Text(finds_short=False))
            for older in texts[:-2]:
                self._num_tokens -= len(older.tokens)
            del texts[:-2]
        texts[-1].tokens += tokens
        self._num_tokens += len(tokens)
        while self._num_tokens > _MAX_REMEMBERED_IN_ALL:
            _, forgotten = self._clients.popitem(last=False)
            self._num_tokens -= sum(len(text.tokens) for text in forgotten.texts)

    def forget(self) -> None:
        """All of them."""
        self._clients.clear()
        self._num_tokens = 0


class Drafter:
    """Guesses for one sequence. Keeps a copy of its tokens."""

    def __init__(self, num_prompt_tokens: int, prediction: Sequence[int] = ()) -> None:
        self.rates: Rates | None = None  # of its guesses, from the first one on
        self._text = Text(finds_short=True)
        if prediction:
            self._text.tokens += [*prediction, _NONE]
        self._start = len(self._text.tokens)  # of the prompt
        self._continuations = Text(finds_short=False)
        # The text that the last guess came from, and how far before the own end the place was: it is followed while it
        # agrees.
        self._followed: Text | None = self._text if prediction else None
        self._distance = self._start + num_prompt_tokens

    def add_continuations(self, prompt_token_ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """What followed the prompt where it was said before, the newest first. To be called before the first guess."""
        text, tail = self._continuations, prompt_token_ids[-MAX_MATCH:]
        for continuation in continuations:
            text.tokens += [*tail, *continuation, _NONE]
        if text.tokens and self._followed is None:
            self._followed, self._distance = text, self._start + len(prompt_token_ids) - len(tail)

    def guess(self, token_ids: Sequence[int], num_tokens: int, answers: Sequence[Text] = ()) -> Guess:
        """At most so many tokens, of a sequence that now has `token_ids`: each time there may be more than before.

        `answers`: other texts that it may be found in.
        """
        own = self._text
        own.tokens += token_ids[len(own.tokens) - self._start :]
        end, source, place, num_matched = len(own.tokens) - 1, own, 0, 0
        ending = tuple(own.tokens[-_LONG:])
        for text in (own, self._continuations, *answers):
            places = text.places(ending)
            if text is self._followed and 0 <= end - self._distance < len(text.tokens):
                places.insert(0, end - self._distance)
            for candidate in places:
                num = self._num_matched(text, candidate, num_matched)
                if num > num_matched:
                    source, place, num_matched = text, candidate, num
        if not num_matched:
            return NO_GUESS
        self._followed, self._distance = source, end - place
        if source is own and place < self._start:
            num_matched = max(num_matched, _PREDICTED_MATCH)
        return Guess(_what_follows(source, place, num_tokens, is_own=source is own), num_matched)

    def _num_matched(self, text: Text, place: int, least: int) -> int:
        """Tokens up to there that are those that the sequence ends with; 0 if they are not more than `least`."""
        own, theirs = self._text.tokens, text.tokens
        end = len(own) - 1
        most = min(MAX_MATCH, place + 1, end + 1)
        if most <= least or own[end - least] != theirs[place - least]:
            return 0
        for back in range(most):
            if theirs[place - back] != own[end - back]:
                return back
        return most


def _what_follows(text: Text, place: int, num_tokens: int, is_own: bool) -> list[int]:
    """The tokens behind a place, up to the end of what is said there. The own end is taken to be said once more."""
    found = text.tokens[place + 1 : place + 1 + num_tokens]
    if _NONE in found:
        return found[: found.index(_NONE)]
    return (found * -(-num_tokens // len(found)))[:num_tokens] if is_own and found else found
