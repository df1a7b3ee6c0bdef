"""Grammars compiled by llguidance under limits, and the meaning of its errors."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

PARSER_LIMITS: dict[str, Any] = {
    # What useful grammars need: fuel for an enum of 10,000 values, or for a choice of as many words; items for 250
    # optional properties. Under llguidance's own, higher limits, ambiguous grammars take several times as long for a
    # mask, and "(a{1000}){1000}" several times the memory before it is refused.
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "max_items_in_row": 1_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}

TOO_LARGE = "too deeply nested or too large; simplify it"
_TOO_COMPLEX = "too many alternatives, optional parts or repetitions at once; simplify it"
_LIMITS_IN_WORDS = {  # llguidance's errors about its limits, which clients cannot change
    "recursion limit exceeded": TOO_LARGE,
    "too deeply nested": TOO_LARGE,
    "too big": _TOO_COMPLEX,
    "too many expressions": _TOO_COMPLEX,
    "too many states": _TOO_COMPLEX,
    "Too many items": _TOO_COMPLEX,
    "Current row has": _TOO_COMPLEX,
    "lexer precomputation failed": _TOO_COMPLEX,
    "fuel exhausted": _TOO_COMPLEX,
    "NoExtension": "no text fits it",
}
_IN_WORDS = (  # llguidance's errors that are about its own code or its settings
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"these keywords cannot be enforced: \1; leave them out"),
    (
        re.compile(r"Resource '(.*)' is not present in a registry.*"),
        r"the reference '\1' leads out of the schema; only those that begin with # are followed",
    ),
    (re.compile(r"Failed to generate regex for \w+ range.*"), "a range of numbers cannot be enforced; leave it out"),
    (re.compile(r"Unsatisfiable schema: Regex is empty.*"), "no text fits its pattern, format and lengths together"),
)
_LINE = re.compile(r"^(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n +\d+ \| .*|\n<non-verbose/>.*", re.DOTALL)  # from llguidance's own version of the grammar
_MAX_REASON = 300

_BYTES_PER_STATE = 600  # of a lexer
_BYTES_PER_S = 2e8  # by which a lexer grows if it does nothing else


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits what a grammar in use may take."""

    parser: Mapping[str, Any] = field(default_factory=lambda: PARSER_LIMITS)  # arguments of `LLParserLimits`
    slow_s: float = 0.01  # of processor time for a mask; most take 0.1 ms
    long_foresight_s: float = 0.001  # of processor time, during which no other thread runs; most take 0.03 ms


DEFAULT_LIMITS = GrammarLimits()


@dataclass(frozen=True, slots=True)
class Patience:
    """Says how long a launch waits for masks after the forward pass, and then for tokens to be taken."""

    share: float = 0.25  # of the launch's time so far, within these bounds
    min_s: float = 0.005
    max_s: float = 0.05

    def after(self, elapsed_s: float) -> float:
        """Returns seconds to wait in a launch that has taken `elapsed_s` so far."""
        return min(max(self.share * elapsed_s, self.min_s), self.max_s)


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class GrammarProblem:
    """Says why a grammar cannot be compiled."""

    reason: str
    line: int | None = None  # of what llguidance compiled
    is_limit: bool = False  # it exceeds the limits above


def explain(error: str) -> GrammarProblem:
    """Translates an error of llguidance."""
    place = _LINE.match(error)
    line = None if place is None else int(place[1])
    for limit, limit_words in _LIMITS_IN_WORDS.items():
        if limit in error:
            return GrammarProblem(limit_words, line, is_limit=True)
    message = " ".join(_EXCERPT.sub("", _LINE.sub("", error)).split())
    for said, words in _IN_WORDS:
        message = said.sub(words, message)
    return GrammarProblem(message[:_MAX_REASON] or "unknown reason", line)


class CompiledGrammar:
    """A compiled grammar that its sequences share: its matcher takes no tokens; each sequence's copy of it does.

    All copies share one lexer, which makes them cheap. The lexer grows with the input of each copy, and if it breaks,
    it breaks for all of them; a sequence that notices continues with a matcher that shares nothing.
    """

    def __init__(
        self, tokenizer: LLTokenizer, source: str, num_bytes: int, limits: GrammarLimits = DEFAULT_LIMITS
    ) -> None:
        """Compiles it and computes the first mask. `num_bytes`: the memory that this takes."""
        self._tokenizer = tokenizer
        self._source = source
        self._limits = limits
        self.matcher = self.new_matcher()
        self.num_bytes = num_bytes
        self._max_bytes = num_bytes + limits.parser["max_lexer_states"] * _BYTES_PER_STATE
        self.is_broken = False
        self.is_slow = False
        self.is_foreseeable = True  # computing what comes next costs little
        begin = time.thread_time()
        self.first_mask = self.compute_mask(self.matcher)
        self.note_cost(time.thread_time() - begin)

    def new_matcher(self) -> LLMatcher:
        """A matcher that shares nothing."""
        return LLMatcher(self._tokenizer, self._source, log_level=0, limits=LLParserLimits(**self._limits.parser))

    def compute_mask(self, matcher: LLMatcher) -> torch.Tensor:
        """Computes which tokens may come next: int32 `[words]`, a bit per token, all 0 after an error or the end."""
        mask = torch.zeros(-(-self._tokenizer.vocab_size // 32), dtype=torch.int32)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        return mask.zero_() if matcher.is_error() else mask

    def compute_masks(self, matcher: LLMatcher, guess: Sequence[int]) -> Sequence[torch.Tensor]:
        """The masks after each token of a guess, up to the first forbidden one. The matcher does not change.

        Empty after an error. After a token that completes the text, the mask allows the model's end token.
        """
        masks = torch.zeros(1 + len(guess), -(-self._tokenizer.vocab_size // 32), dtype=torch.int32)
        matcher.unsafe_compute_mask_ptr_with_draft_token(masks.data_ptr(), masks[0].nbytes, list(guess))  # type: ignore[attr-defined]  # its stubs forget it
        return () if matcher.is_error() else [mask for mask in masks[1:] if mask.any()]

    def note_foresight(self, seconds: float) -> None:
        """Records the processor time of computing what comes next."""
        self.is_foreseeable = seconds <= self._limits.long_foresight_s

    def note_cost(self, seconds: float) -> None:
        """Records the processor time of a mask, during which the lexer grows. (Taking a token costs less.)"""
        self.is_slow = seconds > self._limits.slow_s
        self.num_bytes = min(self.num_bytes + int(seconds * _BYTES_PER_S), self._max_bytes)
