"""Puts benchmarks/ on the path, whose scripts are not installed, and runs these in this process."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from .fakes import Ran, RunScript


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
