"""The benchmark of the host path: a server with all but a model, and figures that hold on whatever machine."""

import json
import sys
from pathlib import Path

import host_path
import pytest


def test_a_small_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--cases", "3x4", "--seconds", "1", "--output-tokens", "9", "--json", str(tmp_path / "report.json")]
    monkeypatch.setattr(sys, "argv", ["host_path.py", *flags])
    assert host_path.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("3 streams, 4 ms")
    report = json.loads(lines[-1])
    assert report == json.loads((tmp_path / "report.json").read_text())
    (figures,) = report["cases"]
    assert figures["ideal"] == 750
    assert figures["tokens_per_s"] > 0
    assert figures["idle"] < 1.0
    assert figures["ttft_ms"]["p50"] > 4.0  # the step that makes it
    assert min(figures["cpu_us"].values()) > 0.0
