"""Puts benchmarks/ on the path, whose scripts are not installed, and runs these in this process.

Also engines that are fake workers, what they are asked for, and a tiny model's shape.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from comparison.ceiling import ModelShape
from peers.engines import Engine
from peers.workers.protocol import Settings

FAKE_WORKER = str(Path(__file__).parent / "fake_worker.py")
SIZES: Any = {"max_requests": 8, "max_prompt_tokens": 16, "max_tokens": 32, "cache_gigabytes": 1}
SETTINGS = Settings("nowhere", "bfloat16", quantization=None, num_threads=1, **SIZES)
FIELDS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
FIELDS |= {"intermediate_size": 16, "vocab_size": 10}
"""A config.json: 1152 weights in layers, 80 in the head."""

SHAPE = ModelShape.of(FIELDS, weight_bytes=2, cache_bytes=2)
"""A pass reads 2464 bytes, and 32 of each cached token."""


class Ran(NamedTuple):
    """Holds what came of a script."""

    code: int | str  # what is not a number is a message
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The JSON in its last line."""
        report: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return report


RunScript = Callable[..., Ran]
"""Takes a benchmark's module and its flags; see the fixture."""


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunScript:
    """Runs a benchmark's `main` with these flags."""

    def run(script: ModuleType, *flags: str) -> Ran:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
        try:
            code = script.main()
        except SystemExit as leaving:  # argparse's
            code = leaving.code
        return Ran(code, *capsys.readouterr())

    return run


class FakeEngine(Engine):
    """An engine of any kind and name, with a fake worker's options."""

    def command(self) -> list[str]:
        return [sys.executable, FAKE_WORKER, self.kind]


def fake_engine(name: str, kind: str = "openvino", **options: str) -> FakeEngine:
    return FakeEngine(name, kind, sys.executable, options)
