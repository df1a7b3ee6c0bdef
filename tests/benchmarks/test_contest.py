"""Engines that take turns, and their workers seen from the driver, which trusts them with nothing."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from comparison.ceiling import Rates, Workload
from comparison.contest import Contest, Entrant, Limits, Trial
from peers.worker import Worker, WorkerDied, WorkerError

from tests.benchmarks.fakes import SETTINGS, FakeEngine, fake_engine

# --- taking turns


PAIR, TRIPLE = Workload(2, 4, 3), Workload(3, 4, 3)


def entrants(tmp_path: Path, *engines: FakeEngine, answer_limit: float = 20) -> list[Entrant]:
    limits = Limits(start_up=20, answer=answer_limit)
    return [Entrant(engine, SETTINGS, tmp_path / f"{engine.name}.log", limits) for engine in engines]


def compete(taking_part: list[Entrant], *workloads: Workload, rounds: int = 2) -> list[Trial]:
    with Contest(taking_part, None, 1000) as contest:
        contest.start([1])
        return [contest.run(workload, rounds) for workload in workloads]


def compete_until(error: type[BaseException], taking_part: list[Entrant]) -> None:
    with Contest(taking_part, None, 1000) as contest:
        contest.start([1])
        raise error


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


def test_start_up_is_timed_from_the_start_of_the_process(tmp_path: Path) -> None:
    taking_part = entrants(tmp_path, fake_engine("a"))
    compete(taking_part, PAIR)
    standing = taking_part[0].standing
    assert 0 < standing.marks["imports_done"] < standing.marks["ready"] < standing.marks["first_token"] < 20
    assert standing.first_token_s == standing.marks["first_token"]
    assert standing.after_imports_s == standing.marks["first_token"] - standing.marks["imports_done"]
    assert standing.peak_bytes > 2**20


def test_too_few_tokens_are_a_failure_and_the_others_go_on(tmp_path: Path) -> None:
    taking_part = entrants(tmp_path, fake_engine("a"), fake_engine("b", fewer="2"))
    pair, triple = compete(taking_part, PAIR, TRIPLE)
    assert pair.scores["b"].failure == "warm-up: 2 prompts were to get 3 tokens each, got [2, 2]"
    assert pair.scores["b"].seconds == []
    assert len(pair.scores["a"].seconds) == 2
    assert triple.scores["b"].failure is None
    assert len(triple.scores["b"].seconds) == 2


def test_one_that_dies_at_a_workload_is_started_again_for_the_next(tmp_path: Path) -> None:
    taking_part = entrants(tmp_path, fake_engine("a"), fake_engine("b", dies="2"))
    marks = []
    with Contest(taking_part, None, 1000) as contest:
        contest.start([1])
        marks.append(dict(taking_part[1].standing.marks))
        pair, triple = contest.run(PAIR, 1), contest.run(TRIPLE, 1)
        marks.append(dict(taking_part[1].standing.marks))
    assert pair.scores["b"].failure == "warm-up: it ended with exit code 3"
    assert triple.scores["b"].failure is None
    assert marks[0] == marks[1]  # of the first start


def test_one_that_hangs_has_failed(tmp_path: Path) -> None:
    (trial,) = compete(entrants(tmp_path, fake_engine("a", hangs="2"), answer_limit=0.2), PAIR)
    assert trial.scores["a"].failure == "warm-up: no answer within 0.2 s"


def test_one_that_does_not_start_stays_out(tmp_path: Path) -> None:
    taking_part = entrants(tmp_path, fake_engine("a", start="raises"), fake_engine("b"))
    (trial,) = compete(taking_part, PAIR)
    assert taking_part[0].standing.failure == "did not start: ValueError: no such model"
    assert trial.scores["a"].failure == "did not start: ValueError: no such model"
    assert len(trial.scores["b"].seconds) == 2


def test_the_machine_is_measured_before_every_round_and_after_the_last(tmp_path: Path) -> None:
    taking_part = entrants(tmp_path, fake_engine("a"))
    (gauge,) = entrants(tmp_path, fake_engine("rates", kind="rates"))
    with Contest(taking_part, gauge, 1000) as contest:
        contest.start([1])
        trial = contest.run(PAIR, 2)
    assert trial.rates == [Rates(bytes_per_second=3e10, flops_per_second=2e12)] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_whatever_happens_no_process_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    child = tmp_path / "child"
    taking_part = entrants(tmp_path, fake_engine("a", child=str(child)), fake_engine("b"))
    with pytest.raises(error):
        compete_until(error, taking_part)
    pids = [*(entrant.standing.about["pid"] for entrant in taking_part), int(child.read_text(encoding="ascii"))]
    deadline = time.monotonic() + 10  # a killed process takes a moment to vanish
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"one of {pids} is still there"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_interrupt_during_a_start_ends_what_was_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupt(worker: object, *_: object) -> None:
        started.append(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr("peers.worker.Worker.ask", interrupt)
    with pytest.raises(KeyboardInterrupt), Contest(entrants(tmp_path, fake_engine("a")), None, 1000) as contest:
        contest.start([1])
    assert [worker._process.poll() for worker in started] == [-9]  # type: ignore[attr-defined]


# --- workers


BATCH = {"prompts": [[1, 2]], "output_tokens": 3}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers, and ends them after the test."""
    workers: list[Worker] = []

    def start_one(engine: FakeEngine) -> Worker:
        workers.append(Worker(engine.command(), engine.environment(SETTINGS), tmp_path / "log"))
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.kill()


def first_message(engine: FakeEngine) -> dict[str, Any]:
    settings = {name: getattr(SETTINGS, name) for name in SETTINGS.__dataclass_fields__}
    return {"settings": settings | {"options": engine.options}, "prompt": [1]}


def ready(worker: Worker, engine: FakeEngine) -> dict[str, Any]:
    with worker.turn():
        return worker.ask(first_message(engine), 20)


def status(pid: int) -> str:
    return psutil.Process(pid).status() if psutil.pid_exists(pid) else "gone"


def await_status(pid: int, wanted: set[str]) -> None:
    """Signals take a moment to arrive."""
    deadline = time.monotonic() + 5
    while status(pid) not in wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    assert status(pid) in wanted


def test_what_its_libraries_print_goes_to_the_log(start: Callable[..., Worker]) -> None:
    engine = fake_engine("fake")
    worker = start(engine)
    ready(worker, engine)
    worker.kill()
    assert Worker.tail_of(worker.log).splitlines() == ["chatter of a library", "more chatter"]


def test_it_is_stopped_while_it_is_not_its_turn(start: Callable[..., Worker], tmp_path: Path) -> None:
    engine = fake_engine("fake", child=str(tmp_path / "child"))
    worker = start(engine)
    pid = ready(worker, engine)["about"]["pid"]
    child = int((tmp_path / "child").read_text(encoding="ascii"))
    await_status(pid, {psutil.STATUS_STOPPED})
    await_status(child, {psutil.STATUS_STOPPED})
    with worker.turn():
        await_status(child, {psutil.STATUS_SLEEPING})
        assert worker.ask(BATCH, 20)["counts"] == [3]
    await_status(pid, {psutil.STATUS_STOPPED})


def test_memory_is_counted_over_its_processes(start: Callable[..., Worker], tmp_path: Path) -> None:
    alone, parent = fake_engine("fake"), fake_engine("fake", child=str(tmp_path / "child"))
    peaks = []
    for engine in (alone, parent):
        worker = start(engine)
        ready(worker, engine)
        with worker.turn():  # the child comes up
            worker.ask(BATCH, 20)
        peaks.append(worker.peak_bytes())
    assert 2**20 < peaks[0] < peaks[1]


def test_an_error_is_told_in_one_line_and_leaves_it_alive(start: Callable[..., Worker]) -> None:
    engine = fake_engine("fake", raises="2")
    worker = start(engine)
    ready(worker, engine)
    with worker.turn():
        with pytest.raises(WorkerError, match=r"^RuntimeError: out of blocks$") as caught:
            worker.ask({"prompts": [[1], [2]], "output_tokens": 5}, 20)
        assert not isinstance(caught.value, WorkerDied)
        assert worker.ask(BATCH, 20)["counts"] == [3]
    assert "RuntimeError: out of blocks" in Worker.tail_of(worker.log)


def test_a_signal_that_ended_it_is_named(start: Callable[..., Worker]) -> None:
    engine = fake_engine("fake")
    worker = start(engine)
    os.kill(ready(worker, engine)["about"]["pid"], signal.SIGKILL)
    with worker.turn(), pytest.raises(WorkerDied, match=r"^it was ended by SIGKILL$"):
        worker.ask(BATCH, 20)


def test_one_that_does_not_even_read_is_ended(tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "log")
    with worker.turn(), pytest.raises(WorkerDied, match=r"^no answer within 0\.2 s$"):
        worker.ask({"prompts": [[1] * 10**6]}, 0.2)


def test_prompts_larger_than_a_pipe_arrive(start: Callable[..., Worker]) -> None:
    engine = fake_engine("fake")
    worker = start(engine)
    ready(worker, engine)
    with worker.turn():
        assert worker.ask({"prompts": [[100] * 2000] * 32, "output_tokens": 1}, 20)["counts"] == [1] * 32


@pytest.mark.parametrize("answer", ["hello", "[1]"])
def test_an_answer_that_is_none_is_refused(answer: str, tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", f"print('{answer}'); input()"], os.environ, tmp_path / "log")
    with worker.turn(), pytest.raises(WorkerDied, match="which is no JSON"):
        worker.ask(BATCH, 20)
