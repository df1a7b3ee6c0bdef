"""Engines that take turns, and their workers seen from the driver, which trusts them with nothing."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from comparison.ceiling import Rates, Workload
from comparison.contest import Contest, Entrant, Limits, Trial
from peers.worker import Worker, WorkerDied, WorkerError

from .conftest import SETTINGS, FakeEngine, fake_engine

PAIR, TRIPLE = Workload(2, 4, 3), Workload(3, 4, 3)


def entrants(tmp_path: Path, *engines: FakeEngine, answer_limit: float = 20) -> list[Entrant]:
    limits = Limits(start_up=20, answer=answer_limit)
    return [Entrant(engine, SETTINGS, tmp_path / f"{engine.name}.log", limits) for engine in engines]


def compete(taking_part: list[Entrant], *workloads: Workload, rounds: int = 2) -> list[Trial]:
    with Contest(taking_part, None, 1000) as contest:
        contest.start([1])
        return [contest.run(workload, rounds) for workload in workloads]


def test_everyone_warms_up_and_then_the_order_rotates(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    taking_part = entrants(tmp_path, *(fake_engine(name, journal=str(journal)) for name in "abc"))
    (trial,) = compete(taking_part, PAIR, rounds=3)
    names = {entrant.standing.about["pid"]: entrant.name for entrant in taking_part}
    lines = [line.split() for line in journal.read_text(encoding="ascii").splitlines()]
    turns = [f"{names[int(pid)]} {what}" for pid, what in lines]
    assert turns[::2] == [f"{name} begins" for name in ["a", "b", "c"] * 2 + [*"abc", *"bca", *"cab"]]
    assert turns[1::2] == [turn.replace("begins", "ends") for turn in turns[::2]]  # never two at a time
    assert {name: len(score.seconds) for name, score in trial.scores.items()} == {"a": 3, "b": 3, "c": 3}

    standing = taking_part[0].standing  # whose start-up is timed from the start of the process
    assert 0 < standing.marks["imports_done"] < standing.marks["ready"] < standing.marks["first_token"] < 20
    assert standing.first_token_s == standing.marks["first_token"]
    assert standing.after_imports_s == standing.marks["first_token"] - standing.marks["imports_done"]
    assert standing.peak_bytes > 2**20


@pytest.mark.parametrize(
    ("misbehaviour", "failure"),
    [("fewer", "2 prompts were to get 3 tokens each, got [2, 2]"), ("dies", "it ended with exit code 3")],
)
def test_one_that_fails_at_a_workload_is_there_for_the_next_and_the_others_go_on(
    tmp_path: Path, misbehaviour: str, failure: str
) -> None:
    taking_part = entrants(tmp_path, fake_engine("a"), fake_engine("b", **{misbehaviour: "2"}))
    with Contest(taking_part, None, 1000) as contest:
        contest.start([1])
        marks = dict(taking_part[1].standing.marks)
        pair, triple = contest.run(PAIR, 2), contest.run(TRIPLE, 2)
    assert (pair.scores["b"].failure, pair.scores["b"].seconds) == (f"warm-up: {failure}", [])
    assert (triple.scores["b"].failure, len(triple.scores["b"].seconds), len(pair.scores["a"].seconds)) == (None, 2, 2)
    assert taking_part[1].standing.marks == marks  # of the first start


def test_one_that_hangs_or_does_not_start_has_failed(tmp_path: Path) -> None:
    hangs = entrants(tmp_path, fake_engine("a", hangs="2"), answer_limit=0.2)
    taking_part = [*hangs, *entrants(tmp_path, fake_engine("b", start="raises"), fake_engine("c"))]
    (trial,) = compete(taking_part, PAIR)
    assert trial.scores["a"].failure == "warm-up: no answer within 0.2 s"
    failures = [trial.scores["b"].failure, taking_part[1].standing.failure]
    assert failures == ["did not start: ValueError: no such model"] * 2
    assert len(trial.scores["c"].seconds) == 2


def test_the_machine_is_measured_before_every_round_and_after_the_last(tmp_path: Path) -> None:
    taking_part = entrants(tmp_path, fake_engine("a"))
    (gauge,) = entrants(tmp_path, fake_engine("rates", kind="rates"))
    with Contest(taking_part, gauge, 1000) as contest:
        contest.start([1])
        trial = contest.run(PAIR, 2)
    assert trial.rates == [Rates(bytes_per_second=3e10, flops_per_second=2e12)] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_happens_no_process_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    child = tmp_path / "child"
    taking_part = entrants(tmp_path, fake_engine("a", child=str(child)), fake_engine("b"))
    contest = Contest(taking_part, None, 1000)
    with pytest.raises(error), contest:  # noqa: PT012
        contest.start([1])
        raise error
    pids = [*(entrant.standing.about["pid"] for entrant in taking_part), int(child.read_text(encoding="ascii"))]
    for pid in pids:
        await_status(pid, GONE)


def test_an_interrupt_during_a_start_ends_what_was_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupt(worker: object, *_: object) -> None:
        started.append(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr("peers.worker.Worker.ask", interrupt)
    with pytest.raises(KeyboardInterrupt), Contest(entrants(tmp_path, fake_engine("a")), None, 1000) as contest:
        contest.start([1])
    assert [worker._process.poll() for worker in started] == [-9]  # type: ignore[attr-defined]


BATCH = {"prompts": [[1, 2]], "output_tokens": 3}
GONE = {"gone", psutil.STATUS_ZOMBIE}

Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers of these options and makes them ready, and ends them after the test."""
    with ExitStack() as workers:

        def start_one(**options: str) -> Worker:
            engine = fake_engine("fake", **options)
            worker = Worker(engine.command(), engine.environment(SETTINGS), tmp_path / "log")
            workers.callback(worker.kill)
            with worker.turn():
                worker.ask({"settings": asdict(SETTINGS) | {"options": options}, "prompt": [1]}, 20)
            return worker

        yield start_one


def status_of(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def await_status(pid: int, wanted: set[str]) -> None:
    """Signals take a moment to arrive."""
    deadline = time.monotonic() + 10
    while (status := status_of(pid)) not in wanted:
        assert time.monotonic() < deadline, status
        time.sleep(0.005)


def test_what_its_libraries_print_goes_to_the_log(start: Start) -> None:
    worker = start()
    worker.kill()
    assert Worker.tail_of(worker.log).splitlines() == ["chatter of a library", "more chatter"]


def test_it_and_its_child_are_stopped_while_it_is_not_its_turn_and_memory_is_counted_over_both(
    start: Start, tmp_path: Path
) -> None:
    alone, worker = start(), start(child=str(tmp_path / "child"))
    child = int((tmp_path / "child").read_text(encoding="ascii"))
    for pid in (worker._process.pid, child):
        await_status(pid, {psutil.STATUS_STOPPED})
    with worker.turn():
        await_status(child, {psutil.STATUS_SLEEPING})
        assert worker.ask(BATCH, 20)["counts"] == [3]
    await_status(worker._process.pid, {psutil.STATUS_STOPPED})
    assert 2**20 < alone.peak_bytes() < worker.peak_bytes()


def test_an_error_is_told_in_one_line_and_leaves_it_alive(start: Start) -> None:
    worker = start(raises="2")
    with worker.turn():
        with pytest.raises(WorkerError, match=r"^RuntimeError: out of blocks$") as caught:
            worker.ask({"prompts": [[1], [2]], "output_tokens": 5}, 20)
        assert not isinstance(caught.value, WorkerDied)
        # Prompts larger than a pipe arrive.
        assert worker.ask({"prompts": [[100] * 2000] * 32, "output_tokens": 1}, 20)["counts"] == [1] * 32
    assert "RuntimeError: out of blocks" in Worker.tail_of(worker.log)


def test_a_signal_that_ended_it_is_named(start: Start) -> None:
    worker = start()
    os.kill(worker._process.pid, signal.SIGKILL)
    with worker.turn(), pytest.raises(WorkerDied, match=r"^it was ended by SIGKILL$"):
        worker.ask(BATCH, 20)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(600)", r"^no answer within 0\.2 s$"),  # it does not even read
        ("print('hello'); input()", "which is no JSON"),
        ("print('[1]'); input()", "which is no JSON"),
    ],
)
def test_one_that_does_not_answer_properly_is_ended(code: str, said: str, tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", code], os.environ, tmp_path / "log")
    with worker.turn(), pytest.raises(WorkerDied, match=said):
        worker.ask({"prompts": [[1] * 10**6]}, 0.2 if "time" in code else 20)
