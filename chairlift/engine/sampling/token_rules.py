"""A request's rules for its tokens, beside a grammar: allowed tokens, bad words and repetition detection.

`TokenRules` are prepared on the text side, once for all choices of a prompt; the sampler reads them in every step. Each
sequence has its own state: a `RuleFilter`, and a `PatternWatch`. An `Automaton` finds words, and also stop strings.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chairlift.device import send
from chairlift.errors import InvalidRequest
from chairlift.params import RepetitionDetection, SamplingParams

TokenIds = npt.NDArray[np.int64]

MAX_BAD_WORD_CHARACTERS = 2**16  # of all words of a request together; also their most tokens
START = 0
"""The state of an `Automaton` before the first element."""

_MAX_REMEMBERED = 256
_NONE = -1


class Automaton:
    """Finds which of many patterns a sequence ends with, one element at a time (Aho & Corasick 1975).

    It is built once and shared; each sequence keeps one integer, its state: the longest prefix of a pattern with which
    the sequence ends. An element costs constant work on average, however many patterns there are and however similar
    they are; a state takes sixteen bytes.

    The states that a pattern adds are numbered consecutively, so that a step along a pattern needs no table. Only
    where a pattern branches off from earlier ones, there is an entry in `_branches`. An unreachable state ends each
    run, so that no pattern continues into the next.
    """

    def __init__(self, patterns: Sequence[Sequence[int]]) -> None:
        """`patterns`: of non-negative integers, none of them empty; the first of equal ones counts."""
        self._labels = array("i", [_NONE, _NONE])  # the element that leads to each state
        self._depths = array("i", [0, 0])
        self._branches: dict[tuple[int, int], int] = {}
        self._patterns: dict[int, int] = {}  # state -> the pattern that is complete there
        for index, pattern in enumerate(patterns):
            self._patterns.setdefault(self._insert(pattern), index)
        # The longest shorter prefix with which a state ends; and the longest pattern with which it ends, or is itself.
        self._fallbacks = array("i", [_NONE]) * len(self._labels)
        self._matches = array("i", [_NONE]) * len(self._labels)
        self._link(patterns)

    def advance(self, state: int, element: int) -> int:
        """The state after one more element."""
        while (following := self._child(state, element)) is None:
            if state == START:
                return START
            state = self._fallbacks[state]
        return following

    def depth(self, state: int) -> int:
        """Counts the last elements that begin a pattern, or are one."""
        return self._depths[state]

    def longest_match(self, state: int) -> int | None:
        """The longest pattern with which the sequence ends."""
        return self._patterns.get(self._matches[state])

    def matches(self, state: int) -> list[int]:
        """All patterns with which the sequence ends, the longest first."""
        found = []
        state = self._matches[state]
        while state != _NONE:
            found.append(self._patterns[state])
            state = self._matches[self._fallbacks[state]]
        return found

    def _child(self, state: int, element: int) -> int | None:
        if self._labels[state + 1] == element:
            return state + 1
        return self._branches.get((state, element))

    def _insert(self, pattern: Sequence[int]) -> int:
        """Adds the pattern's missing states; returns its last one."""
        state = START
        for position, element in enumerate(pattern):
            child = self._child(state, element)
            if child is None:
                self._branches[state, element] = len(self._labels)
                self._labels.extend(pattern[position:])
                self._depths.extend(range(position + 1, len(pattern) + 1))
                self._labels.append(_NONE)
                self._depths.append(0)
                return len(self._labels) - 2
            state = child
        return state

    def _link(self, patterns: Sequence[Sequence[int]]) -> None:
        """Sets fallbacks and matches level by level, because those of a state depend on those of shorter ones."""
        self._fallbacks[START] = START
        reached = [(pattern, START) for pattern in patterns]
        depth = 0
        while reached:
            deeper = []
            for pattern, state in reached:
                child = self._child(state, pattern[depth])
                assert child is not None, "every pattern was inserted"
                if self._fallbacks[child] == _NONE:
                    fallback = START if state == START else self.advance(self._fallbacks[state], pattern[depth])
                    self._fallbacks[child] = fallback
                    self._matches[child] = child if child in self._patterns else self._matches[fallback]
                if depth + 1 < len(pattern):
                    deeper.append((pattern, child))
            reached = deeper
            depth += 1


class BadWords:
    """Forbidden words: the last token of each must not follow its other tokens."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: token ids of each, at least one; a word may occur in several tokenizations."""
        self.single = np.array(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64)
        endings: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            if len(word) > 1:
                endings.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self._endings = [np.array(sorted(tokens), dtype=np.int64) for tokens in endings.values()]
        self.automaton = Automaton(list(endings)) if endings else None
        self._remembered: dict[int, TokenIds] = {}  # by state of the automaton, for some states

    def forbidden_after(self, state: int) -> TokenIds:
        """Tokens that must not come in that state of the automaton."""
        if self.automaton is None:
            return self.single
        found = self._remembered.get(state)
        if found is None:
            endings = [self._endings[match] for match in self.automaton.matches(state)]
            found = np.unique(np.concatenate([self.single, *endings])) if endings else self.single
            if len(self._remembered) < _MAX_REMEMBERED:
                self._remembered[state] = found
        return found


@dataclass(slots=True)
class TokenRules:
    """The rules of one request, which its choices share."""

    bad_words: BadWords | None
    refused: torch.Tensor | None  # bool [vocab], on the host: not among the allowed tokens; None: all are allowed
    _sent: torch.Tensor | None = None  # the same on a device
    _allowed: torch.Tensor | None = None  # the others, on a device

    def refused_on(self, device: torch.device) -> torch.Tensor | None:
        """Returns `refused` on that device, where it then stays."""
        if self.refused is None or self.refused.device == device:
            return self.refused
        if self._sent is None or self._sent.device != device:
            self._sent = send(self.refused, device)
        return self._sent

    def allowed_on(self, device: torch.device) -> torch.Tensor | None:
        """Returns the allowed tokens as int32 `[words]`, a bit per token, on that device, where they then stay."""
        if self.refused is None:
            return None
        if self._allowed is None or self._allowed.device != device:
            bits = np.packbits(~self.refused.cpu().numpy(), bitorder="little")
            padded = np.pad(bits, (0, -len(bits) % 4))
            self._allowed = send(torch.from_numpy(padded.view("<i4")), device)
        return self._allowed


class RuleFilter:
    """One sequence's state in its rules; see `plan.TokenFilter`."""

    def __init__(self, rules: TokenRules) -> None:
        self.rules = rules
        self._state = START
        self._num_seen = 0

    def __reduce__(self) -> tuple[type["RuleFilter"], tuple[TokenRules]]:
        """Other processes need the allowed tokens only: what follows from bad words comes with each plan."""
        return RuleFilter, (TokenRules(None, self.rules.refused),)

    @property
    def follows_text(self) -> bool:
        """Returns true if what may come next depends on the tokens before it."""
        return self.rules.bad_words is not None and self.rules.bad_words.automaton is not None

    def forbidden_after(self, token_ids: Sequence[int], start: int) -> TokenIds:
        """The last tokens of bad words that must not follow these tokens, which are generated from `start` on.

        The tokens may have grown since the last call.
        """
        words = self.rules.bad_words
        if words is None:
            return np.empty(0, dtype=np.int64)
        if words.automaton is not None:
            for token in token_ids[start + self._num_seen :]:
                self._state = words.automaton.advance(self._state, token)
            self._num_seen = len(token_ids) - start
        return words.forbidden_after(self._state)


def compile_rules(params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int) -> TokenRules | None:
    """None if the parameters have no such rules. `encode` adds no special tokens; ids have been checked already."""
    words = _bad_word_ids(params.bad_words, encode, vocab_size)
    refused = None
    if params.allowed_token_ids is not None:
        refused = torch.ones(vocab_size, dtype=torch.bool)
        refused[torch.tensor(params.allowed_token_ids)] = False
    return TokenRules(BadWords(words) if words else None, refused) if words or refused is not None else None


def _bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]], vocab_size: int) -> list[list[int]]:
    """Each word at the beginning of a text, and after a space; without those that have tokens unknown to the model."""
    if sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise InvalidRequest(f"bad_words may have {MAX_BAD_WORD_CHARACTERS} characters together", "bad_words")
    found: list[list[int]] = []
    num_tokens = 0
    for word in words:
        bare = word.lstrip() or word
        plain, spaced = encode(bare), encode(" " + bare)
        if not plain:
            raise InvalidRequest(f"bad_words: {word[:100]!r} has no tokens", "bad_words")
        ways = [plain] if spaced[-len(plain) :] == plain else [plain, spaced]
        num_tokens += sum(map(len, ways))
        if num_tokens > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(f"bad_words may have {MAX_BAD_WORD_CHARACTERS} tokens together", "bad_words")
        found += [way for way in ways if max(way) < vocab_size]
    return found


class PatternWatch:
    """Detects when a sequence ends with one pattern several times in a row; see `RepetitionDetection`.

    For each size of pattern, it counts how many of the last tokens in a row equal the token that many places before:
    a few vector operations per token, whatever the tokens are.
    """

    def __init__(self, wanted: RepetitionDetection) -> None:
        sizes = np.arange(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1, dtype=np.int32)
        self._shortest = int(sizes[0])
        self._needed = sizes * (wanted.min_count - 1)
        self._num_same = np.zeros(len(sizes), dtype=np.int32)
        # The newest tokens, the last first, from `_start` on, which moves to the front; then all move back to the end.
        self._size = wanted.max_pattern_size
        self._tokens = np.full(4 * self._size, -1, dtype=np.int32)
        self._start = len(self._tokens) - self._size

    def __call__(self, token_id: int) -> bool:
        """Takes the next token. True if the sequence now ends in a repetition."""
        begin = self._start + self._shortest - 1
        is_same = self._tokens[begin : self._start + self._size] == token_id
        self._num_same += 1
        self._num_same *= is_same
        if self._start == 0:
            self._start = len(self._tokens) - self._size
            self._tokens[self._start :] = self._tokens[: self._size]
        self._start -= 1
        self._tokens[self._start] = token_id
        return bool((self._num_same >= self._needed).any())
