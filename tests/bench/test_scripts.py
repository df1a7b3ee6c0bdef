"""The scripts in benchmarks/ that belong to the load test, run as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, f"benchmarks/{script}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_the_script_is_the_command(dead_url: str) -> None:
    finished = run("load_test.py", "--url", dead_url)
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"error: cannot reach {dead_url}: ")


def test_the_capacity_is_measured_with_a_server_that_costs_nothing() -> None:
    finished = run("load_test_capacity.py", "--rates", "400", "--streams", "8", "--tokens", "10")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert (report["streams"], report["tokens"]) == (8, 10)
    [figures] = report["rounds"]
    assert figures["asked"] == 400
    assert figures["arrived"] > 0
