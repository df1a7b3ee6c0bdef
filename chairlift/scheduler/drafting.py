"""Guesses at a sequence's next tokens: those that followed its last tokens at another place.

The longest match of its last tokens is looked up in the sequence itself, which a prediction of the whole answer may
precede, in what slots hold after the same prompt, and in the client's recent answers:

    | prediction | NONE | prompt | answer |        | end of a prompt | answer | NONE | end of a prompt | answer | NONE |

A lookup takes the same time however long a text is: runs of four tokens (in some texts of two as well) are indexed by
where they end, and only the newest few places with the same run are compared (as LZ77 compressors do).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_MATCH = 32
"""Tokens before a guess that are compared; a longer match would be no more reliable."""

FORCED_MATCH = MAX_MATCH + 1
"""`Guess.num_matched` of tokens that a grammar forces."""

MAX_CONTINUATIONS, MAX_CONTINUATION = 2, 2**10
"""Slots that begin with the prompt, and tokens after it in each, that are searched for its answer."""

_NONE = -1  # no token but a separator: no guess goes beyond it
_SHORT, _LONG = 2, 4  # tokens of indexed runs
_MAX_PLACES = 6  # compared in a text: the newest that end as the sequence does
_PREDICTED_MATCH = 16  # least `num_matched` of a place in the prediction, as the client expects that text
_MATCHES = (3, 6, 16, FORCED_MATCH)  # from each of these numbers of matched tokens on, a guess counts as likelier
_FIRST_RATES = (0.2, 0.4, 0.7, 0.9, 0.95)  # with fewer than the first, and so on, until the row has its own rates
_MAX_INDEXED = 1024  # tokens per step, in all texts: long prompts delay a step by about two milliseconds at most
_NEWEST_TOKEN = 0.1  # weight of the newest token in a rate
_NEWEST_ANSWER = 0.3  # weight of the newest answer's rates in those that the client's next answer starts with
_HOPE = 0.05  # share by which these return to the first rates, so that what is no longer tried is tried again
_MAX_REMEMBERED = 2**14  # tokens of one client's answers in the newer text, and in the older one
_MAX_REMEMBERED_IN_ALL = 2**17  # tokens of all clients' answers: 20 MB
_MAX_ANSWER = 2**12  # first tokens of an answer that are remembered


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next, and how many tokens before them matched at the place that they come from."""

    tokens: Sequence[int]
    num_matched: int

    def cut(self, num_tokens: int) -> "Guess":
        """The guess's first `num_tokens` tokens."""
        return self if len(self.tokens) <= num_tokens else Guess(self.tokens[: max(num_tokens, 0)], self.num_matched)


NO_GUESS = Guess((), 0)


class Rates:
    """Tells how often a row's guessed tokens are right, by how many tokens before the guess matched."""

    def __init__(self, like: "Rates | None" = None) -> None:
        """`like`: the rates of earlier rows, to start from."""
        self._shares: list[float] = list(_FIRST_RATES if like is None else like._shares)

    def follow(self, ended: "Rates") -> None:
        """Records the rates of a row that has ended, as an estimate for the next one."""
        towards = zip(self._shares, ended._shares, _FIRST_RATES, strict=True)
        mixed = ((share + _NEWEST_ANSWER * (newest - share), first) for share, newest, first in towards)
        self._shares = [share + _HOPE * (first - share) for share, first in mixed]

    def of(self, guess: Guess) -> float:
        """The share of a guess's tokens that are right if those before them are."""
        return self._shares[bisect_right(_MATCHES, guess.num_matched)]

    def note(self, guess: Guess, num_accepted: int) -> None:
        """Records that `num_accepted` of its tokens were right; those after the first wrong one are not counted."""
        kind = bisect_right(_MATCHES, guess.num_matched)
        num_tried = min(num_accepted + 1, len(guess.tokens))
        weight = 1 - (1 - _NEWEST_TOKEN) ** num_tried
        self._shares[kind] += weight * (num_accepted / num_tried - self._shares[kind])


@dataclass(slots=True)
class IndexBudget:
    """Counts the tokens that a step may still index; the rest is indexed in later steps."""

    num_left: int = _MAX_INDEXED


class Text:
    """A growing list of tokens, with an index of where runs of tokens end."""

    def __init__(self, finds_short: bool) -> None:
        """`finds_short`: find runs of two tokens if none of four matches; in long texts nearly all of two occur."""
        self.tokens: list[int] = []
        self._finds_short = finds_short
        self._num_indexed = 0
        self._newest_short: dict[tuple[int, ...], int] = {}  # run -> where it ended last
        self._newest_long: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # by place: the previous place where the same run of four ended

    def places(self, ending: tuple[int, ...], budget: IndexBudget) -> list[int]:
        """Places at which this run of `_LONG` tokens ends, newest first; if none, the newest of its last `_SHORT`."""
        self._index(budget)
        places: list[int] = []
        place = self._newest_long.get(ending, _NONE)
        if place == _NONE:
            place = self._newest_short.get(ending[-_SHORT:], _NONE)
            return places if place == _NONE else [place]
        while place != _NONE and len(places) < _MAX_PLACES:
            places.append(place)
            place = self._earlier[place]
        return places

    def _index(self, budget: IndexBudget) -> None:
        """Indexes new places, except the last, which nothing follows."""
        tokens, newest, earlier = self.tokens, self._newest_long, self._earlier
        places = range(len(tokens) - 1)[self._num_indexed :][: budget.num_left]
        budget.num_left -= len(places)
        for place in places:
            run = tuple(tokens[max(place - _LONG + 1, 0) : place + 1])
            earlier.append(newest.get(run, _NONE))
            newest[run] = place
            if place and self._finds_short:
                self._newest_short[run[-_SHORT:]] = place
        self._num_indexed += len(places)


@dataclass(slots=True)
class _Client:
    """Holds what is remembered of a client."""

    texts: list[Text]  # one or two, the newer one last
    rates: Rates


class Answers:
    """Recent answers, by client: similar questions often have similar answers.

    Guesses for a client never use another client's answers, so timing and counts reveal nothing of those.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, _Client] = OrderedDict()  # the least recently active comes first
        self._num_tokens = 0

    def of(self, client: Hashable) -> Sequence[Text]:
        """The client's earlier answers, to be searched for its next one."""
        known = self._clients.get(client)
        return () if known is None else known.texts

    def rates_of(self, client: Hashable) -> Rates:
        """The rates that a new row of the client starts with."""
        known = self._clients.get(client)
        return Rates() if known is None else Rates(like=known.rates)

    def remember(self, client: Hashable, token_ids: Sequence[int], num_prompt_tokens: int, rates: Rates) -> None:
        """Remembers a prompt's end, the first tokens of its answer, and its rates. The oldest answers are evicted."""
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
        """Forgets all answers."""
        self._clients.clear()
        self._num_tokens = 0


class Drafter:
    """Guesses for one sequence. Keeps a copy of its tokens."""

    def __init__(self, num_prompt_tokens: int, prediction: Sequence[int] = ()) -> None:
        self.rates: Rates | None = None  # of its guesses; set before the first one
        self._text = Text(finds_short=True)
        if prediction:
            self._text.tokens += [*prediction, _NONE]
        self._start = len(self._text.tokens)  # where the prompt begins
        self._continuations = Text(finds_short=False)
        # The text that the last guess came from, and how far before the sequence's end its place was: the next guess
        # tries the place after it.
        self._followed: Text | None = self._text if prediction else None
        self._distance = self._start + num_prompt_tokens

    def add_continuations(self, prompt_token_ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """Adds what followed the same prompt before, the newest first. Must be called before the first guess."""
        text, tail = self._continuations, prompt_token_ids[-MAX_MATCH:]
        for continuation in continuations:
            text.tokens += [*tail, *continuation, _NONE]
        if text.tokens and self._followed is None:
            self._followed, self._distance = text, self._start + len(prompt_token_ids) - len(tail)

    def guess(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        answers: Sequence[Text] = (),
        budget: IndexBudget | None = None,
    ) -> Guess:
        """Guesses at most `num_tokens` tokens after `token_ids`, which may have grown since the last call.

        `answers`: further texts to search. `budget`: of the step; None: a new one.
        """
        budget = budget or IndexBudget()
        own = self._text
        own.tokens += token_ids[len(own.tokens) - self._start :]
        end, source, place, num_matched = len(own.tokens) - 1, own, 0, 0
        ending = tuple(own.tokens[-_LONG:])
        for text in (own, self._continuations, *answers):
            places = text.places(ending, budget)
            if text is self._followed and 0 <= end - self._distance < len(text.tokens):
                places.insert(0, end - self._distance)
            for candidate in places:
                num = self._num_matched(text, candidate, num_matched)
                if num > num_matched:
                    source, place, num_matched = text, candidate, num
        if not num_matched:
            return NO_GUESS
        self._followed, self._distance = source, end - place
        return Guess(_what_follows(source, place, num_tokens, is_own=source is own), num_matched)

    def _num_matched(self, text: Text, place: int, least: int) -> int:
        """Tokens up to the place that equal the sequence's last tokens; 0 if they are not more than `least`.

        Where all of the prediction up to the place is equal, that counts as most: no other text is a better guess.
        """
        own, theirs = self._text.tokens, text.tokens
        end = len(own) - 1
        most = min(MAX_MATCH, place + 1, end + 1)
        if most <= least or own[end - least] != theirs[place - least]:
            return 0
        num = next((back for back in range(most) if theirs[place - back] != own[end - back]), most)
        if text is self._text and place < self._start and num:
            return MAX_MATCH if num == place + 1 else max(num, _PREDICTED_MATCH)
        return num


def _what_follows(text: Text, place: int, num_tokens: int, is_own: bool) -> list[int]:
    """The tokens after a place, up to a separator. At a sequence's own end, they are assumed to repeat."""
    found = text.tokens[place + 1 : place + 1 + num_tokens]
    if _NONE in found:
        return found[: found.index(_NONE)]
    return (found * -(-num_tokens // len(found)))[:num_tokens] if is_own and found else found
