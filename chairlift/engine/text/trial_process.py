"""Compiles grammars where a crash does no harm: in a child of this program for each grammar, under limits.

`grammar_trials` starts this file by its path. It imports llguidance and no other module of the server, and forks a
child for every grammar, with limits of processor time, memory and stack.

The program's standard input is a socket over which it receives further sockets: the first for its settings (the
arguments of `open_tokenizer` and the parser's limits), then one per grammar. A child reads the fields of a
`StructuredOutputs` from its socket and answers with `BEGUN` and, if it survives, a `Verdict`, in JSON. The program ends
when its standard input closes, also if the server is killed.
"""

import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_USUAL_CPU_S = 0.05  # of a child; after that it runs at low priority
_MAX_CPU_S = 0.5  # the largest well-meant grammars take 0.1
_NICENESS = 10
_MAX_BYTES = 2**27  # that a child may allocate in addition to what it started with
_MAX_STACK_BYTES = 2**21  # or half of the server's threads' if that is less; using a compiled grammar takes a quarter
_MAX_S = 20  # of a child, by the clock; the machine may be busy
_NUM_TOKENS = 2  # taken on trial: some limits are exceeded only after the first mask
BEGUN = b" "

OVERFLOW = "recursion limit exceeded"  # llguidance's message, also used for a child that did not survive
# As in Python's json.dumps. With flexible whitespace, a weak model could write blanks until its tokens run out.
_JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,  # see `schemas`
}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark's rules have a single colon
_SPECIAL_IN_REGEX = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial: the source for llguidance to compile, or its error."""

    source: str = ""
    num_bytes: int = 0  # memory that it took
    error: str | None = None
    has_own_lines: bool = False  # line numbers in the error refer to the client's text


def read_all(connection: socket.socket) -> bytes:
    """Reads until the other side has shut down its half."""
    with connection.makefile("rb") as stream:
        return stream.read()


@dataclass(frozen=True, slots=True)
class _Told:
    """A tokenizer in the form that llguidance asks for."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    tokenize: Callable[[str], list[int]]
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        return self.tokenize(text)


def open_tokenizer(described: dict[str, Any], tokenize: Callable[[str], list[int]] | None = None) -> "LLTokenizer":
    """Makes llguidance's tokenizer of what `Vocabulary` tells. ValueError if it cannot read it.

    `tokenize`: used if the bytes of tokens alone are described; None: tokens are the longest that fit, which does for
    a trial.
    """
    from llguidance import LLTokenizer

    if "tokenizer" in described:
        return LLTokenizer(**described)
    made: list[LLTokenizer] = []
    eos = described["eos_token"]
    tokens = [each.encode("latin-1") for each in described["tokens"]]
    told: Any = _Told(
        tokens, described["special_ids"], eos[0], tokenize or (lambda text: made[0].greedy_tokenize(text))
    )
    made.append(LLTokenizer(told, eos_token=eos))
    tokens.clear()  # of which llguidance has a copy, while it keeps `told` for `tokenize`
    return made[0]


def main() -> None:
    """Reads the settings, then forks a child for each further socket."""
    sys.path.append(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    control = socket.socket(fileno=0)
    tokenizer, limits = None, {}
    while (connection := _next_connection(control)) is not None:
        with connection:
            if tokenizer is None:
                settings = json.loads(read_all(connection))
                tokenizer, limits = open_tokenizer(settings["tokenizer"]), settings["limits"]
                continue
            try:
                pid = os.fork()
            except OSError as error:
                _answer(connection, {"failure": f"there is no process to compile a grammar: {error}"})
                continue
            if pid == 0:
                _perform(tokenizer, limits, connection)


def _next_connection(control: socket.socket) -> socket.socket | None:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if message else None


def _answer(connection: socket.socket, reply: dict[str, Any]) -> None:
    connection.sendall(json.dumps(reply).encode())


def _perform(tokenizer: "LLTokenizer", limits: dict[str, Any], connection: socket.socket) -> None:
    """Runs a child; does not return."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)

    def compile_it() -> None:
        try:
            verdict = try_out(tokenizer, json.loads(message), limits)
        except MemoryError:
            verdict = Verdict(error=OVERFLOW)
        _answer(connection, asdict(verdict))
        os._exit(0)

    try:
        connection.sendall(BEGUN)
        message = read_all(connection)
        _limit()
        thread = threading.Thread(target=compile_it)
        thread.start()
        _limit_time(thread)
        thread.join()
    finally:
        with suppress(OSError):
            _answer(connection, {"failure": "there is no thread to compile a grammar"})
        os._exit(1)


def _limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():  # elsewhere (macOS), memory limits are not enforced
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + _MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    usual, _ = resource.getrlimit(resource.RLIMIT_STACK)
    of_threads = 2**21 if usual == resource.RLIM_INFINITY else usual  # the C library's default in that case
    threading.stack_size(min(_MAX_STACK_BYTES, max(of_threads // 2, 2**16)))
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))  # in case nothing else works


def _limit_time(thread: threading.Thread) -> None:
    def go_on_slowly(*_: object) -> None:
        if sys.platform == "linux":  # where priorities belong to threads
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, _NICENESS)
        else:
            os.nice(_NICENESS)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S - _USUAL_CPU_S)

    signal.signal(signal.SIGPROF, go_on_slowly)
    signal.setitimer(signal.ITIMER_PROF, _USUAL_CPU_S)
    signal.alarm(_MAX_S)  # which ends the process


def try_out(tokenizer: "LLTokenizer", outputs: dict[str, Any], limits: dict[str, Any]) -> Verdict:
    """Compiles the fields of a `StructuredOutputs`, computes a mask and takes a token or two, in this process."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = _to_source(outputs)
    except RecursionError:
        return Verdict(error=OVERFLOW)
    except Exception as error:  # converters may raise any exception
        return Verdict(error=str(error))
    num_bytes = _num_allocated_bytes()
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**limits))
    for _ in range(_NUM_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped() or not allowed or not matcher.consume_token((allowed & -allowed).bit_length() - 1):
            break
    if matcher.is_error():
        return Verdict(error=matcher.get_error(), has_own_lines=_is_lark(outputs["grammar"]))
    return Verdict(source, max(0, _num_allocated_bytes() - num_bytes))


def _to_source(outputs: dict[str, Any]) -> str:
    """Converts it to llguidance's source."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if outputs["regex"] is not None:
        return LLMatcher.grammar_from_regex(outputs["regex"])
    if outputs["choice"] is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_escape, outputs["choice"])))
    if outputs["grammar"] is not None:
        grammar = outputs["grammar"]
        return LLMatcher.grammar_from_lark(grammar if _is_lark(grammar) else gbnf_to_lark(grammar))
    schema = {"type": "object"} if outputs["json"] is None else outputs["json"]
    # As text, because llguidance refuses integers of more than 64 bits in objects.
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE)


def _is_lark(grammar: str | None) -> bool:
    return grammar is not None and not _GBNF_RULE.search(grammar)


def _escape(text: str) -> str:
    """A regular expression that only this text matches. (Not `re.escape`: the dialect is Rust's.)"""
    return _SPECIAL_IN_REGEX.sub(lambda match: "\\" + match[0], text)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: ten numbers."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]


def _num_allocated_bytes() -> int:
    """Memory in use, in new or reused blocks; 0 if the C library does not report it (it is not glibc)."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _MallocInfo
    numbers = mallinfo2().numbers
    return int(numbers[4]) + int(numbers[7])  # hblkhd: in mapped blocks; uordblks: in others


if __name__ == "__main__":
    main()
