"""Processes that are stopped (SIGSTOP) rather than killed: their sockets stay open, so only a watch notices them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import psutil
import pytest

from tests.api.fault_support import HANGING, SERVE_WITH_WORKERS, SLOW
from tests.api.test_api_workers import (
    FLAGS,
    LONGEST,
    TWO,
    begun,
    client_of_each,
    metrics_of,
    until,
    worker_of,
    workers_of,
)
from tests.support.server_process import SERVE, Process, running

pytestmark = pytest.mark.slow

SLOW_WORKERS = SLOW + SERVE_WITH_WORKERS
WATCHED = (*TWO, *FLAGS, "--worker-timeout", "5")  # longer than a busy machine keeps one that is well from answering
PATIENT = (*TWO, *FLAGS, "--worker-timeout", "600")  # the watch finds nothing
MOST_S = 120.0  # a wait without limit is longer than that on any machine


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It is stopped, and goes on at the end if it is still there."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_stopped_worker_is_killed_and_replaced_and_frees_its_slots() -> None:
    with running(SLOW_WORKERS, *WATCHED) as process, client_of_each(process) as (doomed, safe):
        pid = worker_of(doomed.get("/health"), process)
        with begun(doomed, {**LONGEST, "n": 4}), stopped(pid):
            until(lambda: is_gone(pid), "it is killed")
            reply = safe.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})  # in one of its slots
            assert reply.status_code == 200
            until(lambda: len(workers_of(process) - {pid}) == 2, "there is another one")
        assert metrics_of(safe)["chairlift_requests_running"] == 0
        process.until_logged("did not answer for 5 s; it is killed")
        process.popen.terminate()
        assert process.popen.wait(MOST_S) == 0


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_stopped_worker_does_not_keep_the_server_from_leaving(num_signals: int) -> None:
    flags = (*PATIENT, "--drain-timeout", "1" if num_signals == 1 else "600")
    with running(SLOW_WORKERS, *flags) as process:
        pid = min(workers_of(process))
        with stopped(pid):
            for _ in range(num_signals):
                process.popen.terminate()
                process.until_logged("shutting down")  # says the other worker
            assert process.popen.wait(MOST_S) == 3
            until(lambda: is_gone(pid), "it is killed")


def test_a_dead_engine_does_not_wait_for_a_stopped_worker() -> None:
    with (
        running(HANGING + SLOW_WORKERS, *PATIENT, "--step-timeout", "3") as process,
        client_of_each(process) as (one, other),
        stopped(worker_of(one.get("/health"), process)),
    ):
        answer = other.post("/v1/completions", json={"prompt": "hi", "seed": 13})
        assert answer.json()["error"]["code"] == "engine_dead"
        assert process.popen.wait(MOST_S) == 1


def test_a_killed_server_leaves_no_stopped_worker_behind() -> None:
    with running(SLOW_WORKERS, *PATIENT) as process:
        pids = workers_of(process)
        with stopped(min(pids)):
            process.popen.kill()
            process.popen.wait()
            until(lambda: all(map(is_gone, pids)), "all workers are gone")


def test_health_tells_that_the_engines_process_is_stopped_until_it_goes_on() -> None:
    with running(SLOW_WORKERS, *WATCHED) as process, client_of_each(process) as (here, there):
        with stopped(process.popen.pid):
            for client in (here, there):
                until(lambda: client.get("/health").status_code == 503, "it is said")  # noqa: B023
            assert here.get("/health").json()["error"]["message"] == "the engine does not respond"
            assert "chairlift_engine_up 0.0" in here.get("/metrics").text
        for client in (here, there):
            until(lambda: client.get("/health").status_code == 200, "it serves again")  # noqa: B023
        assert here.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200
        assert len(workers_of(process)) == 2  # none was killed for what the engine's process has slept


def test_a_stopped_rank_ends_the_server_and_is_ended_with_it() -> None:
    flags = ("--tensor-parallel-size", "2", "--step-timeout", "3")
    with running(SERVE, *flags) as process, httpx.Client(base_url=process.url, timeout=MOST_S) as client:
        assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200
        (rank,) = psutil.Process(process.popen.pid).children()
        with stopped(rank.pid):
            answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
            assert answer.json()["error"]["code"] == "engine_dead"
            assert process.popen.wait(MOST_S) == 1
            until(lambda: is_gone(rank.pid), "it is killed")


def test_a_stopped_nursery_is_replaced() -> None:
    with running(SLOW + SERVE, *WATCHED) as process, httpx.Client(base_url=process.url, timeout=MOST_S) as client:
        (nursery,) = psutil.Process(process.popen.pid).children()
        with stopped(nursery.pid):
            os.kill(min(workers_of(process)), signal.SIGKILL)
            until(lambda: is_gone(nursery.pid), "it is killed")
            process.until_logged("an API worker cannot be started: the process that starts them did not answer")
            until(lambda: len(workers_of(process)) == 1, "another nursery has started a worker")
        assert client.get("/health").status_code == 200
        process.popen.terminate()
        assert process.popen.wait(MOST_S) == 0


_READER = """
import json, socket, sys
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
connection.connect(("127.0.0.1", int(sys.argv[1])))
body = json.dumps({"prompt": [[5] * 1900] * 10, "echo": True, "logprobs": 20, "max_tokens": 1})  # 10 MB are the answer
head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
connection.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
print(connection.recv(12).decode(), flush=True)
while connection.recv(1):
    pass
"""


def test_a_stopped_client_is_cut_off() -> None:
    with running(SERVE, "--client-timeout", "5", "--idle-timeout", "600") as process, ExitStack() as stack:
        command = [sys.executable, "-c", _READER, str(process.port)]
        client = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(client.kill)
        assert client.stdout is not None
        assert client.stdout.readline() == b"HTTP/1.1 200\n"
        with stopped(client.pid):
            until(lambda: _num_connections(process) == 0, "the connection has been closed")


def _num_connections(process: Process) -> int:
    connections = psutil.Process(process.popen.pid).net_connections("tcp4")
    return sum(each.status == "ESTABLISHED" for each in connections if each.type == socket.SOCK_STREAM)
