"""Compiles grammars, each once, however many sequences and requests share it.

llguidance does the work. A grammar is first tried out in a process that may crash (`grammar_trials`), then compiled in
a few dedicated threads here, so that a slow one delays no other request.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from chairlift.engine.forks import finalize
from chairlift.engine.sampling.compiled_grammar import (
    DEFAULT_LIMITS,
    DEFAULT_PATIENCE,
    PARSER_LIMITS,
    TOO_LARGE,
    CompiledGrammar,
    GrammarLimits,
    Patience,
    explain,
)
from chairlift.engine.sampling.masks import MaskThreads, TokenGrammar
from chairlift.engine.text.grammar_trials import IS_POSSIBLE, GrammarTrials
from chairlift.engine.text.trial_process import try_out
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.errors import GrammarsBusy, InvalidGrammar
from chairlift.params import StructuredOutputs
from chairlift.schemas import make_enforceable

logger = logging.getLogger(__name__)

_NUM_THREADS = 3  # each may run a child process that takes up to `trial_process._MAX_BYTES`


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tokens that enclose a choice's reasoning."""

    begin_ids: tuple[int, ...]
    end_id: int
    has_begun: bool  # in the prompt; if not, there are thoughts only if the choice begins with `begin_ids`
    is_repeated: bool = False  # later tokens may begin thoughts as well
    lead: str | None = (
        None  # rules, in Lark, whose `lead` is all that comes before the answer; None: one run of thoughts
    )


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Limits what a compiler of grammars may take."""

    max_unfinished: int = 64  # grammars that are being compiled or wait for that
    max_cache_bytes: int = 2**27
    in_use: GrammarLimits = DEFAULT_LIMITS  # of each grammar, once it was tried out
    patience: Patience = DEFAULT_PATIENCE  # of launches; holds from the first grammar on


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Its methods may be called from any thread."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        tries_apart: bool = IS_POSSIBLE,
        make_trials: Callable[[Callable[[], bytes]], GrammarTrials] = GrammarTrials,
    ) -> None:
        """`tries_apart`: grammars are tried out in a process of their own, by what `make_trials` makes."""
        self.limits = CompilerLimits()
        self._vocabulary, self._tries_apart = vocabulary, tries_apart
        self._trials = make_trials(self._settings)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chairlift-compiler")
        self._lock = threading.Lock()
        self._mask_threads: list[MaskThreads] = []  # one, from the first grammar on
        self._unfinished: dict[str, Future[CompiledGrammar]] = {}
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()  # the least recently used comes first
        self._end = finalize(self, _end, self._threads, self._trials, self._mask_threads)
        if not tries_apart:
            logger.warning("grammars are compiled without a process of their own, because this system has no fork")

    def compile(self, outputs: StructuredOutputs, thinking: Thinking | None = None) -> "Future[CompiledGrammar]":
        """Compiles a grammar, unless that is done. The future's exception may be `InvalidGrammar` or `GrammarsBusy`.

        `thinking`: the grammar begins after the thoughts, in which every token but an end token is allowed.

        The future is shared: do not cancel it. Raises `GrammarsBusy` if too many grammars are being compiled or no
        thread can be started.
        """
        key = _as_json(outputs, thinking)
        with self._lock:
            known = self._cache.pop(key, None)
            if known is not None and not known.is_broken:
                self._keep(key, known)
                done: Future[CompiledGrammar] = Future()
                done.set_result(known)
                return done
            if key not in self._unfinished:
                if len(self._unfinished) >= self.limits.max_unfinished:
                    raise GrammarsBusy(f"{self.limits.max_unfinished} other grammars are being compiled")
                try:
                    self._unfinished[key] = self._threads.submit(self._compile_and_keep, key)
                except RuntimeError as error:  # no thread; a submitted job may still run later, and its result is kept
                    raise GrammarsBusy(str(error)) from error
            return self._unfinished[key]

    def starter(self, compiled: CompiledGrammar) -> Callable[[], TokenGrammar]:
        """See `inputs.Grammars`."""
        return partial(TokenGrammar, compiled, self._mask_threads[0])

    def close(self) -> None:
        """Ends threads and process. Pending grammars fail with `GrammarsBusy`; running sequences get no more masks."""
        self._end()
        self._threads.shutdown()

    def _compile_and_keep(self, key: str) -> CompiledGrammar:
        try:
            compiled = self._compile(key)
            with self._lock:
                self._keep(key, compiled)
            return compiled
        finally:
            with self._lock:
                self._unfinished.pop(key, None)

    def _keep(self, key: str, compiled: CompiledGrammar) -> None:
        """Caches a grammar, and evicts others: their sizes grow while they are used. The newest one is always kept."""
        self._cache[key] = compiled
        num_bytes = sum(each.num_bytes for each in self._cache.values())
        while num_bytes > self.limits.max_cache_bytes and len(self._cache) > 1:
            _, evicted = self._cache.popitem(last=False)
            num_bytes -= evicted.num_bytes

    def _compile(self, key: str) -> CompiledGrammar:
        tokenizer = self._vocabulary.load()
        if tokenizer is None:
            raise InvalidGrammar(f"llguidance cannot read this model's kind of tokenizer: {self._vocabulary.problem}")
        try:
            with self._lock:
                if not self._mask_threads:
                    self._mask_threads.append(MaskThreads(tokenizer, self.limits.patience))
            fields = _prepared(json.loads(key))
            verdict = (
                self._trials.perform(json.dumps(fields))
                if self._tries_apart
                else try_out(tokenizer, fields, PARSER_LIMITS)
            )
        except (OSError, RuntimeError) as error:  # no process or no thread
            raise GrammarsBusy(str(error)) from error
        if verdict.error is not None:
            problem = explain(verdict.error)
            raise InvalidGrammar(problem.reason, problem.line if verdict.has_own_lines else None)
        source, thinking = verdict.source, fields["thinking"]
        if thinking is not None:
            source = _after_thoughts(source, Thinking(**thinking), self._vocabulary.eos_token_ids)
        num_bytes = verdict.num_bytes + 2 * len(source) + len(key)
        compiled = CompiledGrammar(tokenizer, source, num_bytes, self.limits.in_use)
        if compiled.matcher.is_error():
            raise InvalidGrammar(explain(compiled.matcher.get_error()).reason)
        return compiled

    def _settings(self) -> bytes:
        """The settings of the helper process."""
        return b'{"limits": %b, "tokenizer": %b}' % (json.dumps(PARSER_LIMITS).encode(), self._vocabulary.description)


def _after_thoughts(source: str, thinking: Thinking, eos_token_ids: Collection[int]) -> str:
    """llguidance's source of the grammar after thoughts, which their tokens delimit, and up to two line breaks."""
    answer = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    if thinking.lead is not None:
        lead, rules = "lead", thinking.lead
    else:
        others = ",".join(map(str, sorted({thinking.end_id, *eos_token_ids})))
        begin = " ".join(f"<[{token}]>" for token in thinking.begin_ids)
        lead = "thoughts" if thinking.has_begun else f"({begin} thoughts)?"
        rules = f"thoughts: <[^{others}]>* <[{thinking.end_id}]> /\\n{{0,2}}/"
    grammars = [{"lark_grammar": f"start: {lead} @answer\n{rules}\n"}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": grammars})


def _as_json(outputs: StructuredOutputs, thinking: Thinking | None = None) -> str:
    """The grammar's cache key, which is also all that is needed to compile it."""
    names = ("json", "regex", "choice", "grammar", "disable_additional_properties")
    fields = {name: getattr(outputs, name) for name in names}
    fields["thinking"] = None if thinking is None else asdict(thinking)
    try:
        return json.dumps(fields)
    except RecursionError as error:
        raise InvalidGrammar(TOO_LARGE) from error


def _prepared(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with a schema that llguidance can read; the log says what of it is not enforced."""
    closes_objects = fields.pop("disable_additional_properties") is not False
    given = fields["json"]
    if given is None:
        return fields
    try:
        prepared = make_enforceable(_as_schema(given), closes_objects)
    except RecursionError as error:
        raise InvalidGrammar(TOO_LARGE) from error
    for each in prepared.left_out:
        logger.warning("a schema is not enforced as it is written: %s", each)
    return {**fields, "json": prepared.schema}


def _as_schema(given: dict[str, Any] | str) -> dict[str, Any]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InvalidGrammar(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidGrammar("the schema is not an object")
    return schema


def _end(threads: ThreadPoolExecutor, trials: GrammarTrials, mask_threads: list[MaskThreads]) -> None:
    """Not a method, because a finalizer calls it, which must not keep the compiler alive."""
    threads.shutdown(wait=False)
    trials.close()
    for each in mask_threads:
        each.close()
