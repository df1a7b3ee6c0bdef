"""The load test behind `chairlift bench`: a client for any OpenAI-compatible server.

It needs nothing of the engine, so its figures compare servers of any make.
Metrics are those of `vllm bench serve`.
"""

import asyncio
from collections.abc import Callable

from chairlift.loadtest.config import BenchConfig

__all__ = ["BenchConfig", "run_bench"]


def run_bench(config: BenchConfig, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> int:
    """Make the test that `config` describes and report it; returns the process's exit code."""
    from chairlift.loadtest.command import run  # imported here so that `--help` needs no HTTP client

    return run(config, loop_factory)
