"""Grammars that would end the process, or take it for themselves, are refused; honest ones of any size are compiled."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from chairlift.engine.text import grammar as grammar_module
from chairlift.engine.text.grammar import _NUM_THREADS, CompilerLimits, GrammarCompiler
from chairlift.engine.text.grammar_trials import IS_POSSIBLE, GrammarTrials
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.engine.text.trial_process import Verdict
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.errors import GrammarsBusy, InvalidGrammar
from chairlift.params import StructuredOutputs
from tests.engine.async_support import DEADLINE_S
from tests.engine.support import END_TOKEN, VOCAB_SIZE, new_grammar
from tests.support.server_process import start_python

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="this system has no fork")

TOO_LARGE = "too deeply nested or too large; simplify it"
TOO_COMPLEX = "too many alternatives, optional parts or repetitions at once; simplify it"
WORDS = [f"{number:05d}-word" for number in range(10_000)]


def chained_references(length: int) -> dict[str, Any]:
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{length}": {"type": "string"}}}


def nested(depth: int) -> str:
    return '{"type": "object", "properties": {"a": ' * depth + '{"type": "string"}' + "}}" * depth


def rules(names: str, length: int) -> str:
    chain = "".join(f"{names}{index}: {names}{index + 1}\n" for index in range(length))
    return f'start: {names}0\n{chain}{names}{length}: "a"\n'


def an_object(num_properties: int, **more: Any) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "array", "null"]
    fields = {f"field_{index}": {"type": kinds[index % 6], "description": "what"} for index in range(num_properties)}
    return {"type": "object", "properties": fields, "additionalProperties": False, **more}


def a_call(number: int) -> dict[str, Any]:
    fields = {"name": {"const": f"function_{number}"}, "arguments": an_object(10)}
    return {"type": "object", "properties": fields, "required": ["name", "arguments"]}


def grammar(text: str) -> StructuredOutputs:
    return StructuredOutputs(grammar=text)


def pattern(regex: str) -> StructuredOutputs:
    return StructuredOutputs(regex=regex)


UNCLOSED = "line 2: Expected token ')', found '\\n' (at \"\\n\\n\" ('\\n'))"
REFUSED: dict[str, tuple[StructuredOutputs, str]] = {
    "2,500 chained references": (StructuredOutputs(json=chained_references(2500)), TOO_LARGE),
    "1,200 objects": (StructuredOutputs(json=nested(1200)), TOO_LARGE),
    "100,000 brackets": (StructuredOutputs(json="[" * 100_000), TOO_LARGE),
    "3,000 rules": (grammar(rules("r", 3000)), TOO_LARGE),
    "10,000 terminals": (grammar(rules("T", 10_000)), TOO_LARGE),
    "parentheses": (grammar(f'start: {"(" * 50_000}"a"{")" * 50_000}\n'), f"line 1: {TOO_LARGE}"),
    "130,000 optional letters": (pattern("a?" * 130_000), TOO_COMPLEX),
    "20,000 optional letters": (pattern("a?" * 20_000), TOO_LARGE),
    "a million letters": (pattern("(a{1000}){1000}"), TOO_COMPLEX),
    "as many in Lark": (grammar('start: a{1000}\na: b{1000}\nb: "x"{1000}\n'), TOO_COMPLEX),
    "a choice of one long text": (StructuredOutputs(choice=["a b c " * 40_000]), TOO_COMPLEX),
    "GBNF parentheses": (grammar(f'root ::= {"(" * 5000}"a"{")" * 5000}\n'), TOO_LARGE),
    # The line of an error is told where the client wrote lines.
    "an unknown name": (grammar('start: "a" x\nx: y\n'), 'line 2: unknown name: "y"'),
    "an unknown name in GBNF": (grammar("root ::= x\nx ::= y\n"), "Rule 'y' not found"),
    "a group": (pattern("(a"), 'invalid regex "(a" (in regex): regex parse error: (a ^ error: unclosed group'),
    "parentheses in line 2": (grammar('start: "a"\n  | "b" (\n'), UNCLOSED),
}

HONEST: dict[str, StructuredOutputs] = {
    "1,000 fields": StructuredOutputs(json=an_object(1000, required=[f"field_{index}" for index in range(1000)])),
    "200 optional fields": StructuredOutputs(json=an_object(200)),
    "40 levels": StructuredOutputs(json=nested(40)),
    "100 chained references": StructuredOutputs(json=chained_references(100)),
    "10,000 values": StructuredOutputs(json={"enum": WORDS}),
    "10,000 choices": StructuredOutputs(choice=WORDS),
    "128 tools": StructuredOutputs(json={"anyOf": [a_call(index) for index in range(128)]}),
    "long strings": StructuredOutputs(json=an_object(1) | {"maxLength": 20_000}),
    "an e-mail": StructuredOutputs(regex=r"[a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9.-]{1,255}\.[a-zA-Z]{2,24}"),
    "an essay": StructuredOutputs(regex=r"([A-Z][^.!?\n]{10,300}[.!?] ?){1,30}"),
}


@pytest.fixture(scope="module")
def shared_compiler(byte_tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with closing(new_compiler(byte_tokenizer)) as compiler:
        yield compiler


def new_compiler(tokenizer: Tokenizer, **parts: Any) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(tokenizer, VOCAB_SIZE, [END_TOKEN]), **{"tries_apart": True, **parts})


def helper_of(compiler: GrammarCompiler) -> psutil.Process:
    helper = compiler._trials._helper
    assert helper is not None
    return psutil.Process(helper.process.pid)


@pytest.mark.parametrize(("outputs", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_would_overflow_a_stack_or_never_end_is_refused_with_the_reason(
    shared_compiler: GrammarCompiler, outputs: StructuredOutputs, reason: str
) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidGrammar) as caught:
        new_grammar(shared_compiler, outputs)
    assert str(caught.value) == f"the grammar or schema cannot be compiled: {reason}"
    assert psutil.Process().memory_info().rss - before < 100e6
    assert not shared_compiler._cache.keys() & {grammar_module._as_json(outputs)}


@pytest.mark.parametrize("outputs", HONEST.values(), ids=HONEST.keys())
def test_what_is_only_large_is_compiled(shared_compiler: GrammarCompiler, outputs: StructuredOutputs) -> None:
    assert new_grammar(shared_compiler, outputs).is_ready


def deep(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(num_levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json": deep(100_000)}, "nested more than 120 levels deep"),
        ({"json": {"enum": ["x" * 100] * 2700}}, "the schema has more than 262144 characters; simplify it"),
        ({"json": {"x" * 300_000: 1}}, "the schema has more than 262144 characters; simplify it"),
        ({"choice": ["x" * 1000] * 300}, "the list of choices has more than 262144 characters; simplify it"),
    ],
    ids=["depth", "values", "key", "choices"],
)
def test_a_schema_may_be_only_so_deep_and_so_long(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        StructuredOutputs(**fields)
    assert StructuredOutputs(json={"enum": ["x" * 100] * 2000})


def test_without_forks_llguidances_own_limits_have_to_do(
    byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(new_compiler(byte_tokenizer, tries_apart=False)) as compiler:
        assert "grammars are compiled without a process of their own" in caplog.text
        assert new_grammar(compiler, pattern("[a-z]+")).is_ready
        with pytest.raises(InvalidGrammar, match=TOO_COMPLEX):
            new_grammar(compiler, pattern("(a{1000}){1000}"))
        assert compiler._trials._helper is None


def test_the_helper_is_started_again_when_it_dies_and_serves_who_waited(compiler: GrammarCompiler) -> None:
    new_grammar(compiler, pattern("a"))
    first = helper_of(compiler)
    first.kill()
    psutil.wait_procs([first], DEADLINE_S)
    new_grammar(compiler, pattern("b"))
    second = helper_of(compiler)
    assert second.pid != first.pid
    second.suspend()
    future = compiler.compile(pattern("c"))
    second.kill()
    assert compiler.starter(future.result(DEADLINE_S))().is_ready


def test_the_helper_knows_nothing_of_torch_and_ends_like_the_threads_with_its_compiler(
    byte_tokenizer: Tokenizer,
) -> None:
    before = set(threading.enumerate())
    compiler = new_compiler(byte_tokenizer)
    new_grammar(compiler, pattern("a"))
    helper, threads = helper_of(compiler), set(threading.enumerate()) - before
    mapped = [each.path for each in helper.memory_maps()]
    assert any("llguidance" in path for path in mapped)
    assert not any("torch" in os.path.basename(path) for path in mapped)
    assert len(threads) > 4
    compiler.close()
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    with pytest.raises(GrammarsBusy):
        new_grammar(compiler, pattern("b"))


STARTS_ONE = """
import json, sys, time
from chairlift.engine.text.grammar_trials import GrammarTrials

trials = GrammarTrials(lambda: json.dumps({"tokenizer": {"tokenizer": sys.argv[1]}, "limits": {}}).encode())
assert trials.perform('{"json": null, "regex": "a", "choice": null, "grammar": null}').error is None
print(trials._helper.process.pid, file=sys.stderr, flush=True)
time.sleep(1000)
"""


def test_the_helper_ends_when_the_process_that_started_it_is_killed(byte_tokenizer: Tokenizer) -> None:
    reading_end, writing_end = os.pipe()
    with open(writing_end), open(reading_end) as written:
        starter = start_python(STARTS_ONE, [byte_tokenizer.backend.to_str()], os.environ, writing_end)
        helper = psutil.Process(int(written.readline()))
        starter.kill()
        starter.wait()
        _, alive = psutil.wait_procs([helper], DEADLINE_S)
    assert not alive


def test_slow_grammars_hold_up_nobody_while_a_thread_is_left(compiler: GrammarCompiler) -> None:
    new_grammar(compiler, pattern("a"))
    slow = [compiler.compile(pattern("a?" * 20_000 + "b" * index)) for index in range(_NUM_THREADS - 1)]
    compiler.compile(pattern("[a-z]+")).result(DEADLINE_S)
    assert not all(future.done() for future in slow)
    for future in slow:
        assert isinstance(future.exception(DEADLINE_S), InvalidGrammar)


def test_beyond_a_number_nobody_else_may_wait(byte_tokenizer: Tokenizer) -> None:
    gate = threading.Event()

    class HeldTrials(GrammarTrials):
        def perform(self, outputs: str) -> Verdict:  # noqa: ARG002
            assert gate.wait(DEADLINE_S)
            return Verdict(error="no")

    with closing(new_compiler(byte_tokenizer, make_trials=HeldTrials)) as compiler:
        compiler.limits = CompilerLimits(max_unfinished=2)
        waiting = [compiler.compile(pattern(letter)) for letter in "ab"]
        with pytest.raises(GrammarsBusy, match="2 other grammars are being compiled; try again later"):
            compiler.compile(pattern("c"))
        assert compiler.compile(pattern("a")) is waiting[0]
        gate.set()
        for future in waiting:
            assert isinstance(future.exception(DEADLINE_S), InvalidGrammar)


@pytest.mark.parametrize("what", ["threading.Thread.start", "chairlift.engine.text.grammar_trials.subprocess.Popen"])
def test_without_a_thread_or_a_process_to_be_had_a_grammar_can_be_had_later(
    compiler: GrammarCompiler, what: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("none is left") if "Thread" in what else BlockingIOError("none is left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what, refuse)
        with pytest.raises(GrammarsBusy, match="none is left; try again later"):
            new_grammar(compiler, pattern("a"))
    assert new_grammar(compiler, pattern("a")).is_ready


def test_the_cache_is_bounded_by_what_is_in_it(compiler: GrammarCompiler) -> None:
    large = [StructuredOutputs(choice=[f"{index}{word}" for word in WORDS[:2000]]) for index in range(4)]
    compiled: list[Future[Any]] = [compiler.compile(outputs) for outputs in large[:2]]
    sizes = [future.result(DEADLINE_S).num_bytes for future in compiled]
    assert all(100_000 < size < 10_000_000 for size in sizes)
    compiler.limits = CompilerLimits(max_cache_bytes=sum(sizes) * 5 // 4)
    assert len(compiler._cache) == 2
    compiler.compile(large[0]).result(DEADLINE_S)  # used last
    compiler.compile(large[2]).result(DEADLINE_S)
    assert list(compiler._cache) == [grammar_module._as_json(large[index]) for index in (0, 2)]


def test_what_a_grammar_grows_by_in_use_counts_and_pushes_out_others(compiler: GrammarCompiler) -> None:
    first, second = pattern("[a-z]+"), pattern("[0-9]+")
    compiled = compiler.compile(first).result(DEADLINE_S)
    size = compiled.num_bytes
    compiled.note_cost(0.01)
    assert compiled.num_bytes == size + 2_000_000
    compiled.note_cost(100.0)
    assert compiled.num_bytes < size + 20_000_000  # a lexer has so many states at most
    compiler.compile(second).result(DEADLINE_S)
    compiler.limits = CompilerLimits(max_cache_bytes=10_000_000)
    compiler.compile(second).result(DEADLINE_S)
    assert list(compiler._cache) == [grammar_module._as_json(second)]


def test_a_grammar_is_compiled_once_and_anew_when_its_lexer_broke(compiler: GrammarCompiler) -> None:
    outputs = pattern("[a-z]+")
    futures = [compiler.compile(outputs) for _ in range(20)]
    (compiled,) = {future.result(DEADLINE_S) for future in futures}
    assert compiler.compile(outputs).result() is compiled
    compiled.is_broken = True
    assert compiler.compile(outputs).result(DEADLINE_S) is not compiled
