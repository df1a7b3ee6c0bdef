"""The benchmarks of the host's own costs, in the small: every figure is there, whatever it is."""

import importlib
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import host_path
import http_cost
import loading
import pytest
import scheduler_cost
from harness import StepTimes, make_request, medians, timed_step
from peers.sleeping_device import FILE_VARIABLE, STEP_VARIABLE, Work

from chairlift.cache.ledger import SlotLedger
from chairlift.params import RequestOptions
from chairlift.scheduler import Scheduler
from tests.engine.support import make_tiny_checkpoint

from .conftest import RunScript

VERBS = ["schedule", "advance", "update", "total"]


def test_all_parts_are_measured_and_the_last_line_is_json(run_script: RunScript, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    small = ["--rows", "1", "4", "--waiting", "0", "10", "--prefix-slots", "3", "--prefix-tokens", "200"]
    ran = run_script(scheduler_cost, *small, "--steps", "60", "--rounds", "1", "--json", str(path))
    lines, costs = ran.out.splitlines(), ran.report["microseconds"]
    assert ran.code == 0
    assert json.loads(path.read_text(encoding="utf-8")) == ran.report
    rows = ["1 decode rows", "4 decode rows", "4 rows, half of them new", "4 rows, all of them new"]
    queue = ["add", "abort", "expire none", "expire each of many", "refuse", "displace"]
    assert (list(costs["rows"]), list(costs["queue"])) == (rows, ["10 waiting"])
    assert list(costs["queue"]["10 waiting"]) == queue
    assert (len(costs["waiting"]), len(costs["prefixes"])) == (5 * 2, 5)
    assert all(list(figures) == VERBS for part in ("rows", "waiting") for figures in costs[part].values())
    assert all(value > 0 for figures in costs["rows"].values() for value in figures.values())
    assert lines[0].startswith("1 decode rows ")
    assert list(costs["journal"]["4 rows"]) == ["note a step", "read", *VERBS]
    assert len(lines) == 4 + 10 + 1 + 1 + 5 + 1


def test_medians_are_of_each_verb_and_of_their_sums() -> None:
    times = [StepTimes(1e-6, 3e-6, 4e-6), StepTimes(3e-6, 1e-6, 0.0), StepTimes(2e-6, 9e-6, 2e-6)]
    assert medians(times) == dict(zip(VERBS, [2.0, 3.0, 2.0, 8.0], strict=True))


def test_a_timed_step_is_a_whole_step() -> None:
    slots = SlotLedger(2, 20)
    scheduler = Scheduler(slots, 8, 1, max_queue_size=0)
    requests = [make_request(3, 2, RequestOptions(tenant="a")), make_request(3, 1, opening=[7, 8])]
    assert requests[1].prompt_token_ids[:2] == [7, 8]
    scheduler.add(*requests)
    states = list(scheduler.waiting)
    timed_step(scheduler, slots)
    assert [state.num_output_tokens for state in states] == [1, 1]
    timed_step(scheduler, slots)
    assert not scheduler.has_work
    assert [state.num_output_tokens for state in states] == [2, 1]


@pytest.mark.slow
def test_a_small_case_of_whole_prompts(run_script: RunScript, tmp_path: Path) -> None:
    flags = ["--cases", "3x4", "--seconds", "0.5", "--prompt-tokens", "300", "--output-tokens", "3"]
    ran = run_script(host_path, *flags, "--json", str(tmp_path / "report.json"))
    assert ran.code == 0
    assert ran.out.splitlines()[1].startswith("3 streams, 4 ms")
    report = ran.report
    assert report == json.loads((tmp_path / "report.json").read_text())
    (figures,) = report["cases"]
    assert figures["ideal"] == 750
    assert figures["tokens_per_s"] > 0
    assert figures["computed_per_s"] > 80 * figures["tokens_per_s"]  # 100, but that requests are cut off by both ends
    assert figures["idle"] < 1.0
    assert figures["ttft_ms"]["p50"] > 4.0  # the step that makes it
    assert figures["cpu_us"].pop("workers") == 0.0
    assert min(figures["cpu_us"].values()) > 0.0


def test_no_two_prompts_begin_alike() -> None:
    requests = host_path.make_requests(Namespace(prompt_tokens=12, output_tokens=3, whole=False))
    bodies = [json.loads(next(requests).partition(b"\r\n\r\n")[2]) for _ in range(12)]
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert prompts[:2] + prompts[10:] == ["00000000aaaa", "10000000aaaa", "01000000aaaa", "11000000aaaa"]


@pytest.mark.slow
def test_a_server_and_a_call_take_turns(tmp_path: Path, run_script: RunScript) -> None:
    flags = ["--requests", "2", "--rounds", "1", "--prompt-tokens", "5", "--output-tokens", "4"]
    ran = run_script(http_cost, "--model", make_tiny_checkpoint(tmp_path), *flags)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("2 requests: streams over HTTP take ")
    (case,) = ran.report["cases"]
    (each,) = case["rounds"]
    assert case["requests"] == 2
    assert case["cost"] == case["cost_of_fastest"] == round(each["served_s"] / each["offline_s"] - 1, 4)
    assert case["unread_cost"] == case["unread_cost_of_fastest"] == round(each["unread_s"] / each["offline_s"] - 1, 4)


def test_loads_take_turns_and_the_first_round_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(3_000_000))
    turns: list[str] = []

    def load(tree: Path, model: Path) -> dict[str, float]:
        assert model.name == "model.gguf"
        turns.append(tree.name)
        return {"load_s": float(len(turns))}

    case = loading.measure({"before": Path("a"), "this": Path("b")}, tmp_path / "model.gguf", 3, load)
    assert turns == ["a", "b"] * 4
    assert (case["model"], case["megabytes"], len(case["rounds"])) == ("model.gguf", 3, 3)
    assert case["medians"] == {"before": {"load_s": 5.0}, "this": {"load_s": 6.0}}


@pytest.mark.slow
def test_the_capacity_is_measured_with_a_server_that_costs_nothing() -> None:
    flags = ["--rates", "400", "--streams", "8", "--tokens", "10"]
    command = [sys.executable, "benchmarks/load_test_capacity.py", *flags]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert (report["settings"]["streams"], report["settings"]["tokens"]) == (8, 10)
    [figures] = report["rounds"]
    assert figures["asked"] == 400
    assert figures["arrived"] > 0


class FakeExecutor:
    """Holds what the sleeping executor asks of vLLM's."""

    def __init__(self) -> None:
        self._init_executor()

    def _init_executor(self) -> None:
        pass


@dataclass(frozen=True)
class FakeOutput:
    names: list[str]
    places: dict[str, int]
    said: list[list[int]]


def scheduled(counts: dict[str, int], new: dict[str, int], running: dict[str, int], ended: set[str]) -> SimpleNamespace:
    """`counts`: tokens of each row; `new`: lengths of prompts; `running`: tokens that were computed before."""
    requests = [SimpleNamespace(req_id=name, prompt_len=length, num_computed_tokens=0) for name, length in new.items()]
    cached = SimpleNamespace(req_ids=list(running), num_computed_tokens=list(running.values()))
    parts = {"scheduled_new_reqs": requests, "scheduled_cached_reqs": cached, "finished_req_ids": ended}
    return SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), **parts)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The executor, on a device whose steps take no time."""
    modules: dict[str, dict[str, Any]] = {
        "vllm.v1.executor.uniproc_executor": {"UniProcExecutor": FakeExecutor},
        "vllm.v1.outputs": {"ModelRunnerOutput": FakeOutput, "EMPTY_MODEL_RUNNER_OUTPUT": "nothing"},
    }
    for name in ("vllm", "vllm.v1", "vllm.v1.executor", *modules):
        made = ModuleType(name)
        vars(made).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "device"))
    monkeypatch.setenv(STEP_VARIABLE, "0")
    return importlib.import_module("peers.workers.vllm_sleeper").SleepingExecutor()


def test_a_row_says_a_letter_in_every_step_that_ends_its_prompt_or_follows_it(sleeper: Any, tmp_path: Path) -> None:
    prompts = scheduled({"a": 3, "b": 4}, {"a": 3, "b": 6}, {}, set())
    assert sleeper.execute_model(prompts, non_block=True).result() is None
    assert sleeper.sample_tokens(None, non_block=True).result() == FakeOutput(["a", "b"], {"a": 0, "b": 1}, [[90], []])
    assert sleeper.execute_model(scheduled({"b": 2, "a": 1}, {}, {"a": 3, "b": 4}, set())) is None
    assert sleeper.sample_tokens(None) == FakeOutput(["b", "a"], {"b": 0, "a": 1}, [[90], [90]])
    assert sleeper.execute_model(scheduled({}, {}, {}, {"a", "b"})) == "nothing"
    work = Work.read(tmp_path / "device")
    assert work == Work(0.0, work.end, 10, os.getpid(), threading.get_native_id())


def test_what_is_still_to_come_of_a_device_s_work_is_not_done() -> None:
    work = Work(busy_s=5.0, end=12.0, num_tokens=0, pid=1, thread=1)
    assert [work.done_by(now) for now in (10.0, 12.0, 13.0)] == [3.0, 5.0, 5.0]
