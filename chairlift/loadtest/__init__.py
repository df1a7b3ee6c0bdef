"""The load test behind `chairlift bench`: a client for any OpenAI-compatible server.

It needs nothing of the engine, so its figures compare servers of any make. Metrics are those of `vllm bench serve`.
"""

from chairlift.loadtest.config import BenchConfig

__all__ = ["BenchConfig"]
