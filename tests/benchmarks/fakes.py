"""Engines that are fake workers, and what they are asked for."""

import sys
from pathlib import Path

from comparison.engines import Engine
from comparison.workers.protocol import Settings

FAKE_WORKER = str(Path(__file__).parent / "fake_worker.py")

SETTINGS = Settings(
    model="nowhere",
    dtype="bfloat16",
    quantization=None,
    num_threads=1,
    max_requests=8,
    max_prompt_tokens=16,
    max_tokens=32,
    cache_gigabytes=1,
)


class FakeEngine(Engine):
    """Of any kind and name, with a fake worker's options."""

    def command(self) -> list[str]:
        return [sys.executable, FAKE_WORKER, self.kind]


def fake_engine(name: str, kind: str = "openvino", **options: str) -> FakeEngine:
    return FakeEngine(name, kind, sys.executable, options)
