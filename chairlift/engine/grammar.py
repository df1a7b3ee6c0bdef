"""Structured output: grammars compiled once, and per row and step a mask of the tokens that may come next.

llguidance does the work: on the text side `GrammarCompiler` turns a `StructuredOutputs` into a matcher, and refuses
what cannot be compiled; on the engine's side `GrammarMasks` computes a launch's masks in a thread of its own while the
model's forward pass runs.
"""

import json
import logging
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from chairlift.engine.transfers import send, to_device
from chairlift.engine.vocabulary import Vocabulary
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs
from chairlift.scheduler import Grammar

logger = logging.getLogger(__name__)

_FIELD = "structured_outputs"
_NUM_CACHED = 64
# As Python's json.dumps writes it. Free whitespace would let a weak model write blanks until its tokens run out.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark's rules have a single colon
_SPECIAL_IN_REGEX = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_MAX_REASON = 300
_SILENT = 0


class TokenGrammar:
    """One sequence's way through a grammar."""

    def __init__(self, matcher: LLMatcher, num_mask_words: int) -> None:
        """`num_mask_words`: 32-bit words that a mask over the vocabulary takes."""
        self.matcher = matcher
        self.num_mask_words = num_mask_words

    def advance(self, token_id: int) -> bool:
        """See `scheduler.Grammar`."""
        if not self.matcher.consume_token(token_id):
            raise ValueError(_in_one_line(self.matcher.get_error()))
        return self.matcher.is_stopped()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Its methods may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled = lru_cache(maxsize=_NUM_CACHED)(self._compile)

    def new_grammar(self, outputs: StructuredOutputs) -> TokenGrammar:
        """A grammar at its start. `InvalidRequest` with the reason if it cannot be compiled."""
        matcher = self._compiled(json.dumps(asdict(outputs)))
        return TokenGrammar(matcher.deep_copy(), -(-self._vocabulary.load().vocab_size // 32))

    def _compile(self, key: str) -> LLMatcher:
        try:
            source = _source(json.loads(key))
        except Exception as error:  # the converters raise whatever they run into
            raise _refusal(str(error)) from error
        try:
            tokenizer = self._vocabulary.load()
        except ValueError as error:
            raise InvalidRequest(f"this model's tokenizer is of a kind without it: {error}", _FIELD) from error
        matcher = LLMatcher(tokenizer, source, log_level=_SILENT)
        matcher.compute_bitmask()  # some mistakes show only now, such as a rule that is nothing but itself
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher


def _source(outputs: dict[str, Any]) -> str:
    """What llguidance compiles."""
    if outputs["regex"] is not None:
        return LLMatcher.grammar_from_regex(outputs["regex"])
    if outputs["choice"] is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literally, outputs["choice"])))
    if outputs["grammar"] is not None:
        grammar = outputs["grammar"]
        return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar) if _GBNF_RULE.search(grammar) else grammar)
    schema = {"type": "object"} if outputs["json"] is None else outputs["json"]
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)  # type: ignore[arg-type]


def _literally(text: str) -> str:
    """A regular expression that only this text matches. (Not `re.escape`: the dialect is Rust's.)"""
    return _SPECIAL_IN_REGEX.sub(lambda match: "\\" + match[0], text)


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar or schema cannot be compiled: {_in_one_line(reason)}", _FIELD)


def _in_one_line(message: str) -> str:
    return " ".join(message.split())[:_MAX_REASON] or "unknown reason"


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks that are being computed, and the rows that they are for."""

    rows: list[int]
    masks: "Future[torch.Tensor]"  # int32 [len(rows), words], a bit per allowed token

    def apply(self, logits: torch.Tensor) -> None:
        """Forbids in those rows of `[N, vocab]`, in place, what their grammars do not allow. Waits if it must."""
        rows = to_device(self.rows, torch.int64, logits.device)
        try:
            masks = send(self.masks.result(), logits.device)
        except BaseException as error:  # then nothing can be sampled for these rows, which ends them alone
            logger.error("computing grammar masks failed", exc_info=error)
            logits[rows] = -torch.inf
            return
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = (masks.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)


class GrammarMasks:
    """Computes masks beside the forward pass."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def start(self, grammars: Sequence[Grammar | None]) -> PendingMasks | None:
        """Begins with the masks of those rows that have a grammar; None if there is none."""
        constrained = {row: each for row, each in enumerate(grammars) if isinstance(each, TokenGrammar)}
        if not constrained:
            return None
        masks: Future[torch.Tensor] = Future()
        # A thread per launch costs little beside masks, and leaves nothing behind that would have to be closed.
        threading.Thread(
            target=self._fill_in, args=(masks, list(constrained.values())), name="chairlift-grammar", daemon=True
        ).start()
        return PendingMasks(list(constrained), masks)

    def _fill_in(self, masks: "Future[torch.Tensor]", grammars: list[TokenGrammar]) -> None:
        try:
            masks.set_result(self._fill(grammars))
        except BaseException as error:  # whoever waits for the masks is told
            masks.set_exception(error)

    def _fill(self, grammars: list[TokenGrammar]) -> torch.Tensor:
        if self._executor is None:
            self._executor = LLExecutor()
        num_words = grammars[0].num_mask_words  # all of one vocabulary
        masks = torch.zeros(len(grammars), num_words, dtype=torch.int32)
        numbered = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        self._executor.unsafe_compute_mask_ptr(numbered, masks.data_ptr(), 4 * num_words, len(grammars))
        for matcher, row in numbered:
            if matcher.is_error():
                masks[row] = 0
        return masks
