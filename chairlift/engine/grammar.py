"""Structured output: grammars compiled once, and per row and step a mask of the tokens that may come next.

llguidance does the work: on the text side `GrammarCompiler` turns a `StructuredOutputs` into a matcher, and refuses
what cannot be compiled; on the engine's side `GrammarMasks` computes a launch's masks in a thread of its own while the
model's forward pass runs.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from chairlift.engine.vocabulary import Vocabulary
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs
from chairlift.scheduler import Grammar

_FIELD = "structured_outputs"
_NUM_CACHED = 64
# As Python's json.dumps writes it. Free whitespace would let a weak model write blanks until its tokens run out.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SILENT = 0


class TokenGrammar:
    """One sequence's way through a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def advance(self, token_id: int) -> bool:
        """See `scheduler.Grammar`."""
        if not self.matcher.consume_token(token_id):
            raise ValueError(f"the grammar failed: {_first_line(self.matcher.get_error())}")
        return self.matcher.is_stopped()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Its methods may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled = lru_cache(maxsize=_NUM_CACHED)(self._compile)

    def new_grammar(self, outputs: StructuredOutputs) -> TokenGrammar:
        """A grammar at its start. `InvalidRequest` with the reason if it cannot be compiled."""
        return TokenGrammar(self._compiled(json.dumps(asdict(outputs))).deep_copy())

    def _compile(self, key: str) -> LLMatcher:
        source = _source(json.loads(key))
        try:
            tokenizer = self._vocabulary.load()
        except ValueError as error:
            raise InvalidRequest(f"this model's tokenizer is of a kind without it: {error}", _FIELD) from error
        matcher = LLMatcher(tokenizer, source, log_level=_SILENT)
        if matcher.is_error():
            raise InvalidRequest(
                f"the grammar or schema cannot be compiled: {_first_line(matcher.get_error())}", _FIELD
            )
        return matcher


def _source(outputs: dict[str, Any]) -> str:
    """What llguidance compiles."""
    if outputs["regex"] is not None:
        return LLMatcher.grammar_from_regex(outputs["regex"])
    if outputs["choice"] is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in outputs["choice"])
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    try:
        if outputs["grammar"] is not None:
            return LLMatcher.grammar_from_lark(_as_lark(outputs["grammar"]))
        schema = {"type": "object"} if outputs["json"] is None else outputs["json"]
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)  # type: ignore[arg-type]
    except (ValueError, GbnfToLarkError) as error:
        raise InvalidRequest(f"the grammar or schema cannot be compiled: {error}", _FIELD) from error


def _as_lark(grammar: str) -> str:
    """Only GBNF defines its rules with `::=`."""
    return gbnf_to_lark(grammar) if "::=" in grammar else grammar


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0] if message else "unknown reason"


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks that are being computed, and the rows that they are for."""

    rows: list[int]
    masks: "Future[torch.Tensor]"  # int32 [len(rows), ceil(vocab / 32)], a bit per allowed token

    def apply(self, logits: torch.Tensor) -> None:
        """Forbids in those rows of `[N, vocab]`, in place, what their grammars do not allow. Waits if it must."""
        masks = self.masks.result().to(logits.device, non_blocking=True)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = (masks.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        rows = torch.tensor(self.rows, device=logits.device)
        logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)


class GrammarMasks:
    """Computes masks beside the forward pass."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chairlift-grammar")
        self._executor: LLExecutor | None = None

    def start(self, grammars: Sequence[Grammar | None]) -> PendingMasks | None:
        """Begins with the masks of those rows that have a grammar; None if there is none."""
        matchers = {row: each.matcher for row, each in enumerate(grammars) if isinstance(each, TokenGrammar)}
        if not matchers:
            return None
        return PendingMasks(list(matchers), self._worker.submit(self._fill, list(matchers.values())))

    def _fill(self, matchers: list[LLMatcher]) -> torch.Tensor:
        if self._executor is None:
            self._executor = LLExecutor()
        masks = torch.zeros(len(matchers), self._num_words, dtype=torch.int32)
        numbered = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(numbered, masks.data_ptr(), 4 * self._num_words, len(matchers))
        for row, matcher in enumerate(matchers):
            if matcher.is_error():
                masks[row] = 0  # nothing can be sampled, which ends this row alone
        return masks
