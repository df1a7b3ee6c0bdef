"""benchmarks/gpu.py from end to end on a CPU, at tiny shapes; and its parts, in this process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from on_gpu.parts import PARTS, Measurement, Setup

from tests.benchmarks.fakes import RunScript

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"
TINY = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)


def report_of(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    done = run(*TINY, "--parts", "rates", "small", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()[1:-1]] == ["memory", "decode small"]
    report = report_of(done)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == report
    assert [each["kind"] for each in report["measurements"]] == ["rates", "decode"]
    assert report["failures"] == {}
    assert report["versions"]["torch"] == torch.__version__
    assert 0 < report["table"][1]["share"] < 1.5


@pytest.mark.slow
def test_a_part_that_fails_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    done = run(*TINY, "--parts", "checks", "small", "--limit", "0.01", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 1
    report = report_of(done)
    assert report["failures"] == {"checks": "took longer than 0.01 s", "small": "took longer than 0.01 s"}
    assert "FAILED checks: took longer than 0.01 s" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_one_line_says_what_can_be_done(run_script: RunScript) -> None:
    message = "gpu.py: there is no CUDA device here; --device cpu --shape tiny tries the way through\n"
    assert run_script(gpu) == (2, "", message)


def measured(name: str, tmp_path: Path) -> list[Measurement]:
    return PARTS[name](Setup("tiny", "cpu", "float32", tmp_path))


def test_the_large_part_decodes_prefills_contests_and_profiles(tmp_path: Path) -> None:
    measurements = measured("large", tmp_path)
    assert [(each["kind"], each.get("rows")) for each in measurements] == [
        ("decode", 1),
        ("decode", 4),
        ("prefill", None),
        ("contest", None),
        ("idle", 1),
        ("idle", 4),
    ]
    assert all(each["seconds"] > 0 for each in measurements[:4])
    assert all(0 <= each["between_steps"] <= each["total"] < 1 for each in measurements[4:])


@pytest.mark.parametrize("name", ["large_single_steps", "large_without_graphs"])
def test_single_steps_are_measured_apart(name: str, tmp_path: Path) -> None:
    (measurement,) = measured(name, tmp_path)
    assert measurement["variant"].endswith("no graphs, 1 a launch")  # a CPU has none


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("transformers_static", "transformers generate"),
        ("transformers_continuous", "transformers generate_batch"),
    ],
)
def test_transformers_takes_part(name: str, who: str, tmp_path: Path) -> None:
    (measurement,) = measured(name, tmp_path)
    assert (measurement["kind"], measurement["who"], measurement["workload"]) == ("contest", who, "2x8+8")
    assert measurement["seconds"] > 0
