"""A worker seen from the driver, which trusts it with nothing."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from peers.worker import Worker, WorkerDied, WorkerError

from .fakes import SETTINGS, FakeEngine, fake_engine

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


def test_a_worker_tells_the_times_of_its_start_and_answers_batches(start: Callable[..., Worker]) -> None:
    engine = fake_engine("fake")
    worker = start(engine)
    answer = ready(worker, engine)
    marks = answer["marks"]
    assert worker.started_at < marks["imports_done"] < marks["ready"] < marks["first_token"] < time.monotonic()
    assert answer["counts"] == [1]
    assert answer["about"]["fake"] == "1.0"
    with worker.turn():
        answer = worker.ask({"prompts": [[1], [2]], "output_tokens": 5}, 20)
    assert answer["counts"] == [5, 5]
    assert 0 < answer["seconds"] < 20


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


def test_killing_ends_its_children_too_though_all_are_stopped(start: Callable[..., Worker], tmp_path: Path) -> None:
    engine = fake_engine("fake", child=str(tmp_path / "child"))
    worker = start(engine)
    pid = ready(worker, engine)["about"]["pid"]
    worker.kill()
    worker.kill()
    await_status(pid, {"gone"})
    await_status(int((tmp_path / "child").read_text(encoding="ascii")), {"gone", psutil.STATUS_ZOMBIE})


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
