"""Says what a search explores: the requests of a scope, what may happen to them, and what each must be answered.

The model that is served here has no weights. It keeps one number for each token of a slot, which stands for the keys
and values of all layers: a hash of the cache salt and of all tokens up to this one. The next token is a function of
that number. So everything that a request should read and be answered follows from the request alone, and is computed
here before the search begins.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from zlib import crc32

from chairlift.params import FinishReason, RequestOptions, SamplingParams
from chairlift.prompt_work import Pooling, PoolTask, PromptTask, ScoreTask
from chairlift.scheduler import Drafter, Guess, Policy, Request
from chairlift.scheduler.drafting import FORCED_MATCH, NO_GUESS, IndexBudget, Text

NAN = 1
"""The number of a token whose keys and values are NaN."""

ZERO, JUNK = 0, -1
"""Numbers of what was scrubbed, and of what the books call invalid. Keys and values have none of these three."""

INVALID = -2
"""Sampled where the logits are no numbers."""

_PRIME, _MODULUS = 1_000_003, 2**61 - 1
_FIRST_WORD, _NUM_WORDS = 1000, 997


def next_number(before: int, token: int) -> int:
    """The number of a token after one whose number is `before`."""
    return 2 + (before * _PRIME + token + 1) % _MODULUS


def first_number(salt: str) -> int:
    """The number before the first token."""
    return 2 + crc32(salt.encode())


def next_token(number: int) -> int:
    """The token that is sampled after one with this number."""
    return INVALID if number == NAN else _FIRST_WORD + number % _NUM_WORDS


class Oracle(Drafter):
    """Guesses what it is told for each number of tokens that the sequence has. Keeps no state of its own."""

    def __init__(self, guesses: dict[int, tuple[int, ...]]) -> None:
        super().__init__(0)
        self._guesses = guesses

    def add_continuations(self, prompt_token_ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """Needs none."""

    def guess(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        answers: Sequence[Text] = (),
        budget: IndexBudget | None = None,
    ) -> Guess:
        del answers, budget  # it knows better
        tokens = self._guesses.get(len(token_ids))
        return NO_GUESS if tokens is None else Guess(tokens, FORCED_MATCH).cut(num_tokens)


class CountingGrammar:
    """Allows any text of a number of tokens. Its masks are late when the search says so.

    It may say that it allows nothing but certain tokens next, which it finds out once it was asked for the first time.
    """

    keeps_pace = True

    def __init__(self, num_tokens: int, forced: dict[int, tuple[int, ...]]) -> None:
        """`forced`: by numbers of tokens of the text, those that come next."""
        self.num_left = num_tokens
        self.num_taken = 0
        self.is_ready = True
        self._forced = forced
        self._foresees = False

    def foresee(self) -> Sequence[int] | None:
        if not self._foresees:
            self._foresees = True
            return None
        return self._forced.get(self.num_taken, ())

    def advance(self, token_id: int) -> bool:
        assert token_id >= _FIRST_WORD, f"the grammar is shown {token_id}, which nobody sampled"
        self.num_left -= 1
        self.num_taken += 1
        return self.num_left == 0


@dataclass(frozen=True)
class Ask:
    """A request as a scope writes it."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    ends_after: int | None = None  # answer tokens, of which the last is an end token
    # Tokens after its prompt whose keys and values are NaN if they follow its prompt; an empty one: the prompt's last.
    spoiled: tuple[tuple[int, ...], ...] = ()
    guesses_right: tuple[int, ...] = ()  # numbers of answer tokens after which the next two are guessed
    guesses_half: tuple[int, ...] = ()  # likewise, and the second is wrong
    guesses_wrong: tuple[int, ...] = ()  # likewise, and both are wrong
    has_grammar: bool = False
    forced: tuple[int, ...] = ()  # numbers of answer tokens after which its grammar says the next two
    forced_half: tuple[int, ...] = ()  # likewise, and the second is wrong
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None  # of its prompt; then nothing is generated
    priority: int = 0
    salt: str = ""
    tenant: str = ""
    timeout: float | None = None


@dataclass(frozen=True)
class Case:
    """A request of a scope, with what its slot must hold and what it must be answered."""

    request: Request
    tokens: tuple[int, ...]  # its prompt, its answer, and what would come after that
    numbers: tuple[int, ...]  # of each of these; NAN where keys and values are
    answer: tuple[int, ...]
    reason: FinishReason

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def end(self) -> int:
        """The place of the token that ends it, which a recurrent state does not take; without one, a large number."""
        ends, first = self.request.eos_token_ids, len(self.request.prompt_token_ids)
        return next((place for place in range(first, len(self.tokens)) if self.tokens[place] in ends), sys.maxsize)


@dataclass(frozen=True)
class Scope:
    """The sizes of an engine, the requests that it may meet, and how often what may go wrong does."""

    name: str
    asks: tuple[Ask, ...]
    num_slots: int = 3
    max_seq_len: int = 192
    cache_tokens: int | None = None
    max_num_batched_tokens: int = 40
    max_steps: int = 1
    num_snapshots: int | None = None  # kept beside the recurrent states of slots; None: there are no such states
    num_ahead: int = 0  # launches begun before the results of an earlier one are taken
    num_guessed: int = 0  # tokens of a guess; 0: no speculation
    max_num_running: int | None = None
    max_queue_size: int = 8
    policy: Policy = field(default=Policy())
    is_in_order: bool = False  # requests come in the order in which they are listed
    num_aborts: int = 0
    num_holds: int = 0
    num_resets: int = 0
    num_trims: int = 0
    num_out_of_memory: int = 0
    num_late: int = 0
    num_crashes: int = 0
    num_ticks: int = 0  # of the clock, a second each
    saved: tuple[tuple[tuple[int, ...], str], ...] | None = None  # on disk: tokens, and their salt; None: no disk
    num_lost: int = 0  # readings that fail
    num_stale: int = 0  # parts that come when nobody waits for them any more

    @cached_property
    def cases(self) -> dict[str, Case]:
        """By name of the request."""
        return {ask.name: _case_of(ask, self.spoiled, self.max_seq_len, self.num_guessed > 0) for ask in self.asks}

    @cached_property
    def spoiled(self) -> frozenset[int]:
        """The numbers that would be those of tokens whose keys and values are NaN."""
        return frozenset(_number_of((*ask.prompt, *tokens), ask.salt) for ask in self.asks for tokens in ask.spoiled)

    @cached_property
    def owner_of_number(self) -> dict[int, str]:
        """Returns where a number belongs, in words, to explain one that is read elsewhere."""
        names = {ZERO: "zeros", JUNK: "invalid contents", NAN: "NaN"}
        for case in self.cases.values():
            for position, number in enumerate(case.numbers):
                names.setdefault(number, f"token {position} of {case.name}")
        return names


def _number_of(tokens: Sequence[int], salt: str) -> int:
    number = first_number(salt)
    for token in tokens:
        number = next_number(number, token)
    return number


def numbers_of(tokens: Sequence[int], salt: str) -> list[int]:
    """The number of each of these tokens, from the first on."""
    numbers = [first_number(salt)]
    for token in tokens:
        numbers.append(next_number(numbers[-1], token))
    return numbers[1:]


def alone(
    prompt: Sequence[int], salt: str, num_tokens: int, spoiled: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Computes a request without any engine: tokens up to `num_tokens` of them, and the number of each."""
    tokens, numbers, number = list(prompt), list[int](), first_number(salt)
    for position in range(num_tokens):
        if position == len(tokens):
            tokens.append(next_token(numbers[-1]))
        number = NAN if number == NAN else next_number(number, tokens[position])
        number = NAN if number in spoiled else number
        numbers.append(number)
    return tuple(tokens), tuple(numbers)


def _case_of(ask: Ask, spoiled: frozenset[int], num_tokens: int, has_guesses: bool) -> Case:
    start = len(ask.prompt)
    tokens, numbers = alone(ask.prompt, ask.salt, num_tokens, spoiled)
    most = min(ask.max_tokens, ask.ends_after or ask.max_tokens)
    answer = tokens[start : start + most]
    reason = FinishReason.STOP if ask.ends_after or ask.has_grammar else FinishReason.LENGTH
    if INVALID in answer or numbers[start - 1] == NAN:
        answer, reason = answer[: answer.index(INVALID)] if answer else (), FinishReason.ABORT
    end_tokens = frozenset(answer[-1:]) if ask.ends_after else frozenset()
    assert len(set(answer)) == len(answer), f"{ask.name}: a token occurs twice, so its end would not be clear"
    request = Request(
        ask.name,
        ask.prompt,
        SamplingParams(max_tokens=None),
        ask.max_tokens,
        0,
        end_tokens,
        partial(CountingGrammar, most, _guesses(tokens[start:], ask.forced, ask.forced_half))
        if ask.has_grammar
        else None,
        _task_of(ask),
        RequestOptions(priority=ask.priority, cache_salt=ask.salt, tenant=ask.tenant, timeout=ask.timeout),
    )
    if ask.has_grammar:
        forced = _guesses(tokens[start:], ask.forced, ask.forced_half)
        request = replace(request, new_grammar=partial(CountingGrammar, most, forced))
    if has_guesses:
        guesses = _guesses(tokens[start:], ask.guesses_right, ask.guesses_half, ask.guesses_wrong)
        by_length = {start + at: guess for at, guess in guesses.items()}
        request = replace(request, new_drafter=partial(Oracle, by_length))
    return Case(request, tokens, numbers, answer, reason)


def _task_of(ask: Ask) -> PromptTask | None:
    if ask.pooling is not None:
        return PoolTask(ask.pooling)
    return None if ask.prompt_logprobs is None else ScoreTask(ask.prompt_logprobs)


def _guesses(
    answer: Sequence[int], right: Sequence[int], half: Sequence[int], wrong: Sequence[int] = ()
) -> dict[int, tuple[int, ...]]:
    """Guesses at two tokens, by numbers of tokens of the answer: those that come, one that comes, none."""
    guesses = {at: tuple(answer[at : at + 2]) for at in right}
    guesses |= {at: (answer[at], WRONG) for at in half}
    return guesses | dict.fromkeys(wrong, (WRONG, WRONG))


WRONG = 7
"""A guessed token that never comes."""
