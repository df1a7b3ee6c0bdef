"""The load test behind `chairlift bench`: a client for any OpenAI-compatible server.

It does not depend on the engine, so it can compare any servers. Metrics are those of `vllm bench serve`.
"""

from chairlift.loadtest.config import DEFAULT_CONCURRENCY, BenchConfig
from chairlift.loadtest.values import LENGTH_FORMS, SWEPT_FIELDS, Lengths, SweepValues, parse_limits

__all__ = [
    "DEFAULT_CONCURRENCY",
    "LENGTH_FORMS",
    "SWEPT_FIELDS",
    "BenchConfig",
    "Lengths",
    "SweepValues",
    "parse_limits",
]
