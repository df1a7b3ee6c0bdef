"""Says what every worker does: read JSON lines on standard input, answer them on standard output.

The driver first sends the fields of `Settings`, with a prompt for the first token; the worker loads its engine,
generates that token and answers with the monotonic times of its start-up (on Linux, a clock that processes share). Then
each line is a batch of prompts, answered by the seconds it took and by how many tokens each prompt got; or by an error,
after which the worker still listens. It goes when standard input ends. What libraries print goes to standard error.

Standard library only: peers' interpreters run this. Python >= 3.10.
"""

import dataclasses
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Generate = Callable[[list[list[int]], int], list[int]]
"""Gives each prompt that many tokens, greedily, past any end-of-sequence token; returns how many each one got."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Holds what an engine is to be ready for. `options` are the engine's own, from the command line."""

    model: str  # checkpoint directory
    dtype: str
    quantization: str | None
    num_threads: int
    max_requests: int
    max_prompt_tokens: int
    max_tokens: int  # of one request, prompt and output together
    cache_gigabytes: int  # enough for the keys and values of all requests at the same time
    options: dict[str, str] = dataclasses.field(default_factory=dict)


class Session:
    """A worker's start-up: its settings, and what it reports of itself."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.marks: dict[str, float] = {}
        self.about: dict[str, Any] = {"python": platform.python_version()}

    def imported(self, **about: Any) -> None:
        """To be called once everything is imported; `about`: versions, and settings worth keeping."""
        self.mark("imports_done")
        self.about |= about

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic()


def serve(load: Callable[[Session], Generate]) -> None:
    """Runs a worker: `load` imports and opens its engine. Returns when standard input ends."""
    answers = _take_over_stdout()
    first = json.loads(sys.stdin.readline())
    session = Session(Settings(**first["settings"]))
    try:
        generate = load(session)
        session.mark("ready")
        counts = generate([first["prompt"]], 1)
        session.mark("first_token")
    except Exception as error:
        traceback.print_exc()
        _answer(answers, {"error": _one_line(error)})
        return
    _answer(answers, {"marks": session.marks, "about": session.about, "counts": counts})
    for line in sys.stdin:
        _answer(answers, _timed(generate, json.loads(line)))


def _timed(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        counts = generate(request["prompts"], request["output_tokens"])
    except Exception as error:
        traceback.print_exc()
        return {"error": _one_line(error)}
    return {"seconds": time.perf_counter() - start, "counts": counts}


def _take_over_stdout() -> TextIO:
    """The way to the driver. Everything else that is written to standard output goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")  # dup: not inherited by the engine's own processes
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
