"""The benchmark of what HTTP costs: a server and a call side by side, with a tiny model."""

import json
from pathlib import Path

import http_cost

from tests.engine.support import make_tiny_checkpoint

from .fakes import RunScript


def test_a_server_and_a_call_take_turns(tmp_path: Path, run_script: RunScript) -> None:
    flags = ["--requests", "2", "--rounds", "1", "--prompt-tokens", "5", "--output-tokens", "4"]
    ran = run_script(http_cost, "--model", make_tiny_checkpoint(tmp_path), *flags)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("2 requests: streams over HTTP take ")
    (case,) = json.loads(lines[-1])["cases"]
    ((served, offline),) = ((each["served_s"], each["offline_s"]) for each in case["rounds"])
    assert case["requests"] == 2
    assert case["cost"] == case["cost_of_fastest"] == round(served / offline - 1, 4)
