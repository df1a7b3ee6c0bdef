"""The command, with fake workers in every engine's place."""

import json
import sys
from pathlib import Path

import compare
import pytest
from peers.engines import Engine

from .fakes import FAKE_WORKER, FIELDS, RunScript


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(FIELDS), encoding="utf-8")
    return directory


@pytest.fixture(autouse=True)
def _fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "command", lambda engine: [sys.executable, FAKE_WORKER, engine.kind])


def test_a_comparison_ends_in_a_line_of_json(model: Path, tmp_path: Path, run_script: RunScript) -> None:
    flags = ["--model", str(model), "--workloads", "2x4+3", "1x8+1", "--rounds", "2", "--json", str(tmp_path / "out")]
    ran = run_script(compare, *flags, "--peer", "transformers", "--peer", f"vllm={sys.executable},raises=1")
    report = ran.report
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8")) == report
    assert "2x4+3, round 2, transformers: " in ran.err
    assert ran.out.startswith("workload")

    # A batch of one prompt is a start-up's too.
    assert (ran.code, report["failed"]) == (1, True)
    assert report["engines"]["vllm"]["failure"] == "did not start: RuntimeError: out of blocks"
    assert [result["workload"] for result in report["results"]] == ["2x4+3", "1x8+1"]
    assert len(report["results"][0]["engines"]["chairlift"]["seconds"]) == 2
    assert len(report["results"][0]["machine_rates"]) == 3
    assert report["results"][1]["unit"] == "prompt tokens/s"
    assert report["settings"]["max_requests"] == 2
    assert report["settings"]["max_prompt_tokens"] == 8
    assert report["settings"]["cache_gigabytes"] == 1
    assert report["machine"]["cores"] >= 1
    assert report["engines"]["transformers"]["about"]["fake"] == "1.0"


def test_all_well_is_exit_code_0(model: Path, run_script: RunScript) -> None:
    assert run_script(compare, "--model", str(model), "--workloads", "2x4+3", "--rounds", "1").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "vllm=/no/python"], "compare.py: --peer vllm: no executable file at /no/python\n"),
        (
            ["--peer", "transformers"] * 2,
            "compare.py: --peer transformers: named twice; tell them apart with as=NAME\n",
        ),
    ],
)
def test_a_peer_that_is_not_there_is_one_line(flags: list[str], message: str, run_script: RunScript) -> None:
    assert run_script(compare, *flags) == (2, "", message)


def test_a_workload_that_is_none_is_refused(run_script: RunScript) -> None:
    ran = run_script(compare, "--workloads", "8x128")
    assert ran.code == 2
    assert "'8x128' is no workload: write REQUESTSxPROMPT+OUTPUT" in ran.err
