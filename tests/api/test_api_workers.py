"""An engine's process and two API workers, on real processes: to clients they are one server."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.test_process import chunks
from tests.support.server_process import SERVE, Process, long_stream, running

ASKED = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
CHAT = {**ASKED, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("chat/completions", {**CHAT, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**CHAT, "max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"}),
    ("completions", {**ASKED, "prompt": ["Once", "The end"], "logprobs": 1, "echo": True}),
    ("completions", {**ASKED, "prompt": "Once", "stop": ["a"], "bad_words": ["the"], "min_tokens": 4}),
    ("completions", {**ASKED, "prompt": "Once", "structured_outputs": {"regex": "[a-c]{6}"}}),
    ("completions", {**ASKED, "prompt": "Once", "structured_outputs": {"regex": "[a-c"}}),
    ("completions", {**ASKED, "prompt": "Once", "max_tokens": 100_000}),
    ("completions", {**ASKED, "prompt": "Once", "n": 5000}),
]


def children_of(pid: int) -> list[int]:
    """Processes that it has started."""
    words = f"PPid:\t{pid}\n"
    found = [path.parent for path in Path("/proc").glob("[0-9]*/status") if words in read(path)]
    return [int(path.name) for path in found]


def read(path: Path) -> str:
    """Nothing of a process that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def workers_of(process: Process) -> set[int]:
    children = children_of(process.popen.pid)
    (nursery,) = [pid for pid in children if "nurse(" in read(Path(f"/proc/{pid}/cmdline"))]
    return set(children_of(nursery))


ESTABLISHED = "01"


def worker_of(response: httpx.Response) -> int:
    """The process that has the other end of its connection."""
    stream = response.extensions["network_stream"]
    worker = process_at(*(stream.get_extra_info(name)[1] for name in ("server_addr", "client_addr")))
    assert worker is not None, "nobody has that connection"
    return worker


def process_at(port: int, of_client: int, processes: Iterable[int | str] = ("[0-9]*",)) -> int | None:
    """The one of these that accepted the connection between these ports; None if none has it."""
    ends = [f"{port:04X}", f"{of_client:04X}", ESTABLISHED]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if [line[1][-4:], line[2][-4:], line[3]] == ends}
    for path in chain.from_iterable(Path("/proc").glob(f"{each}/fd/*") for each in processes):
        with suppress(OSError):
            if path.readlink().name in sockets:
                return int(path.parts[2])
    return None


@contextmanager
def client_of_each(process: Process, **headers: str) -> Iterator[list[httpx.Client]]:
    """A client of each of both workers, with one connection, which it keeps."""
    with ExitStack() as stack:
        clients: dict[int, httpx.Client] = {}
        while len(clients) < 2:
            client = stack.enter_context(httpx.Client(base_url=process.url, timeout=60, headers=headers))
            clients.setdefault(worker_of(client.get("/health")), client)
        assert set(clients) == workers_of(process)
        yield list(clients.values())


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        time.sleep(0.01)


def metrics_of(client: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def answer_of(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, str, list[str]]:
    """Status, text and events, but for what differs from reply to reply; how many tokens share a chunk does as well."""
    response = client.post(f"/v1/{path}", json=body)
    events = re.sub(r'"(id|created|system_fingerprint)":("[^"]*"|\d+)', "", response.text).split("\n\n")
    matches = [re.search(r'"delta":{"content":"(.+?)"}', event) for event in events]
    text = "".join(match[1] for match in matches if match is not None)
    return response.status_code, text, [event for event, match in zip(events, matches, strict=True) if match is None]


FLAGS = ("--max-batch-size", "4", "--max-queue-size", "0", "--dtype", "float32", "--no-enable-prefix-caching")
TWO = ("--api-workers", "2")
SLOW = """
import sys, time
from chairlift.__main__ import main
from chairlift.engine.core import EngineCore

real_step = EngineCore.step

def step(self):
    time.sleep(0.005)
    return real_step(self)

EngineCore.step = step
sys.exit(main())
"""
DIES_WITH_TWO = """
import sys, time
from chairlift.__main__ import main
from chairlift.engine.core import EngineCore

real_step, num_steps = EngineCore.step, 0

def step(self):
    global num_steps
    time.sleep(0.005)
    num_steps += self._scheduler.num_running == 2
    if num_steps > 5:
        raise RuntimeError("injected fault")
    return real_step(self)

EngineCore.step = step
sys.exit(main())
"""
HANGS = """
import sys, threading
from chairlift.__main__ import main
from chairlift.engine.execution.runner import ModelRunner

launch = ModelRunner.launch

def hang(*_):
    threading.Event().wait()

ModelRunner.launch = lambda self, plan: (hang if plan.rows[-1].request.params.seed == 13 else launch)(self, plan)
sys.exit(main())
"""
LONG, LONGEST = long_stream(600), long_stream(2000)  # three and ten seconds at least
KEYS = ("--api-key", "one", "--api-key", "two")


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with running(SLOW, *TWO, *FLAGS, *KEYS) as process:
        workers = workers_of(process)
        yield process
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "workers end with the engine's process")


@pytest.fixture
def clients(process: Process) -> Iterator[list[httpx.Client]]:
    with client_of_each(process, Authorization="Bearer one") as clients:
        yield clients


@pytest.fixture(scope="module")
def alone() -> Iterator[httpx.Client]:
    """A server without workers."""
    with running(SERVE, *FLAGS) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        assert children_of(process.popen.pid) == []
        yield client


@pytest.mark.parametrize(("path", "body"), CASES)
def test_every_worker_answers_as_a_server_without_workers_does(
    clients: list[httpx.Client], alone: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    first, second = (answer_of(client, path, body) for client in clients)
    assert first == second == answer_of(alone, path, body)


def test_slots_queue_counts_and_picture_are_of_all_workers_together(clients: list[httpx.Client]) -> None:
    busy, other = clients
    before = metrics_of(other)
    with busy.stream("POST", "/v1/completions", json={**LONGEST, "n": 4}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert metrics_of(other)["chairlift_requests_running"] == 4
        refused = other.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        with other.stream("GET", "/watch") as watch:
            events = watch.iter_lines()
            picture = json.loads(next(events).removeprefix("data: "))
        assert [slot["state"] for slot in picture["slots"]] == ["decoding"] * 4
    with httpx.Client(base_url=other.base_url, headers=other.headers) as reader:  # the stream's client has left
        until(lambda: metrics_of(reader)["chairlift_requests_running"] == 0, "a client that leaves frees its slots")
        after = metrics_of(reader)
    for status in ("200", "429"):
        name = f"chairlift_http_responses_total /v1/completions {status}"
        assert after[name] - before.get(name, 0) == 1
    assert after["chairlift_requests_total abort"] - before["chairlift_requests_total abort"] == 4


def test_every_worker_asks_for_a_key(process: Process) -> None:
    with client_of_each(process) as strangers:
        assert [client.get("/v1/models").status_code for client in strangers] == [401, 401]


def test_a_stored_response_can_be_continued_and_deleted_on_another_worker(clients: list[httpx.Client]) -> None:
    here, there = clients
    first = here.post("/v1/responses", json={"input": "What is 17 + 25?", "store": True}).json()
    body = {"input": "And twice that?", "previous_response_id": first["id"]}
    second = there.post("/v1/responses", json=body)
    assert second.status_code == 200, second.text
    assert there.get(f"/v1/responses/{first['id']}").json() == first
    assert there.delete(f"/v1/responses/{first['id']}").status_code == 200
    assert here.get(f"/v1/responses/{first['id']}").status_code == 404


def test_a_worker_that_dies_loses_its_clients_only_and_is_replaced_and_a_signal_lets_all_streams_end() -> None:
    with running(SLOW, *TWO, *FLAGS) as process:
        with client_of_each(process) as (doomed, safe):
            pid = worker_of(doomed.get("/health"))
            with (
                doomed.stream("POST", "/v1/completions", json=LONGEST) as lost,
                safe.stream("POST", "/v1/completions", json=LONG) as kept,
            ):
                lost_lines = lost.iter_lines()
                next(lost_lines)
                lines = kept.iter_lines()
                next(lines)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    list(lost_lines)
                assert chunks(lines)[-1]["choices"][0]["finish_reason"] == "length"
            assert metrics_of(safe)["chairlift_requests_running"] == 0
            until(lambda: len(workers_of(process) - {pid}) == 2, "there is another one")
        with client_of_each(process) as clients, ExitStack() as streams:
            requests = [client.stream("POST", "/v1/completions", json=LONG) for client in clients]
            running_lines = [streams.enter_context(request).iter_lines() for request in requests]
            for each in running_lines:
                next(each)
            process.popen.send_signal(signal.SIGTERM)
            ends = [chunks(each)[-1]["choices"][0]["finish_reason"] for each in running_lines]
            assert ends == ["length", "length"]
        assert process.exit_code() == 0
    errors = [line for line in process.log if " ERROR " in line]
    assert [re.sub(".* ERROR +", "", line) for line in errors] == [
        "an API worker has ended, and with it the requests that it served; another one is started\n"
    ]


def test_the_engines_death_ends_what_all_workers_serve_and_the_process_with_1() -> None:
    with running(DIES_WITH_TWO, *TWO, *FLAGS) as process, client_of_each(process) as clients, ExitStack() as stack:
        requests = [client.stream("POST", "/v1/completions", json=LONGEST) for client in clients]
        streams = [stack.enter_context(request) for request in requests]
        for stream in streams:
            assert '"a step failed: RuntimeError: injected fault"' in [line for line in stream.iter_lines() if line][-1]
        assert process.exit_code() == 1


def test_a_step_that_hangs_ends_what_all_workers_serve_and_the_process_with_1() -> None:
    with running(HANGS, *TWO, *FLAGS, "--step-timeout", "1.5") as process, client_of_each(process) as clients:
        one, other = clients
        with one.stream("POST", "/v1/completions", json=LONGEST) as stream:
            lines = stream.iter_lines()
            next(lines)
            answer = other.post("/v1/completions", json={"prompt": "hi", "seed": 13})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
            assert '"engine_dead"' in [line for line in lines if line][-1]
        assert process.exit_code() == 1


def test_a_keys_share_of_the_queue_and_its_turns_count_over_all_workers() -> None:
    flags = ("--max-batch-size", "1", "--max-queue-size", "4", "--dtype", "float32")
    waiting = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "n": 2}
    short = {"prompt": "hi", "max_tokens": 1}
    with (
        running(SLOW, *TWO, *flags, *KEYS) as process,
        client_of_each(process, Authorization="Bearer one") as (busy, there),
        client_of_each(process, Authorization="Bearer one") as here,
        httpx.Client(base_url=process.url, timeout=60, headers={"Authorization": "Bearer two"}) as second,
        ThreadPoolExecutor() as pool,
    ):
        with busy.stream("POST", "/v1/completions", json=LONGEST) as stream:
            lines = stream.iter_lines()
            next(lines)
            first = pool.submit(there.post, "/v1/completions", json=waiting)
            until(lambda: metrics_of(here[0])["chairlift_requests_waiting"] == 2, "both choices wait")
            refused = [client.post("/v1/completions", json=short) for client in here]
            assert [each.status_code for each in refused] == [429, 429]
            message = "your share of the waiting queue is full (2 of 4 requests); try again later"
            assert [each.json()["error"]["message"] for each in refused] == [message] * 2
            later = pool.submit(second.post, "/v1/completions", json=short)
            until(lambda: metrics_of(here[0])["chairlift_requests_waiting"] == 3, "the second key's waits")
        assert later.result().status_code == 200
        assert not first.done()  # of its two choices one is behind the second key's
        assert first.result().status_code == 200
