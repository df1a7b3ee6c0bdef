"""An engine's process and two API workers, on real processes: to clients they are one server."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.api.workers.crew import Restarts
from tests.api.fault_support import HANGING, SERVE_WITH_WORKERS, SLOW
from tests.api.test_process import chunks
from tests.support.server_process import SERVE, Process, long_stream, running

ASKED = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT = {**ASKED, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}},
}
ONCE = {**ASKED, "prompt": "Once"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("chat/completions", {**CHAT, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**CHAT, "max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"}),
    ("completions", {**ASKED, "prompt": ["Once", "The end"], "logprobs": 1, "echo": True}),
    ("completions", {**ONCE, "stop": ["a"], "bad_words": ["the"], "min_tokens": 4}),
    *(("completions", {**ONCE, "structured_outputs": {"regex": regex}}) for regex in ("[a-c]{6}", "[a-c")),
    *(("completions", {**ONCE, **fields}) for fields in ({"max_tokens": 100_000}, {"n": 5000})),
]


def workers_of(process: Process) -> set[int]:
    nurseries = psutil.Process(process.popen.pid).children()
    return {worker.pid for nursery in nurseries for worker in nursery.children()}


def worker_of(response: httpx.Response, process: Process) -> int:
    """The process that has the other end of its connection."""
    stream = response.extensions["network_stream"]
    port, own_port = (stream.get_extra_info(name)[1] for name in ("server_addr", "client_addr"))
    worker = process_at(port, own_port, workers_of(process))
    assert worker is not None, "nobody has that connection"
    return worker


def process_at(port: int, of_client: int, processes: Iterable[int]) -> int | None:
    """The one of these that accepted the connection between these ports; None if none has it."""
    for pid in processes:
        with suppress(psutil.Error):
            open_ones = [each for each in psutil.Process(pid).net_connections("tcp4") if each.status == "ESTABLISHED"]
            if (port, of_client) in {(each.laddr.port, each.raddr.port) for each in open_ones}:
                return pid
    return None


@contextmanager
def client_of_each(process: Process, **headers: str) -> Iterator[list[httpx.Client]]:
    """A client of each of both workers, with one connection, which it keeps, however long it is not used."""
    limits = httpx.Limits(keepalive_expiry=None)
    with ExitStack() as stack:
        clients: dict[int, httpx.Client] = {}
        while len(clients) < 2:
            client = httpx.Client(base_url=process.url, timeout=60, headers=headers, limits=limits)
            stack.enter_context(client)
            clients.setdefault(worker_of(client.get("/health"), process), client)
        assert set(clients) == workers_of(process)
        yield list(clients.values())


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        time.sleep(0.01)


@contextmanager
def begun(client: httpx.Client, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a completion's stream after its first."""
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lines


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


FLAGS = ("--max-batch-size", "4", "--max-queue-size", "4", "--dtype", "float32", "--no-enable-prefix-caching")
TWO = ("--api-workers", "2")
SLOW_WORKERS = SLOW + SERVE_WITH_WORKERS
# Workers cannot start while there is a file at the address in the variable TROUBLE, but for the first two.
FAILING = """
import os
from chairlift.engine.async_llm import AsyncLLM

make = AsyncLLM.of

def fail(link, grammars, number):
    if number >= 2 and os.path.exists(os.environ["TROUBLE"]):
        raise RuntimeError("no luck")
    return make(link, grammars, number)

AsyncLLM.of = fail
"""
LONG, LONGEST = long_stream(200), long_stream(2000)  # one and ten seconds at least
KEYS = ("--api-key", "one", "--api-key", "two")


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with running(SLOW_WORKERS, *TWO, *FLAGS, *KEYS) as process:
        workers = workers_of(process)
        yield process
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers), "workers end with the engine's process")


@pytest.fixture
def clients(process: Process) -> Iterator[list[httpx.Client]]:
    with client_of_each(process, Authorization="Bearer one") as clients:
        yield clients


@pytest.fixture(scope="module")
def alone() -> Iterator[httpx.Client]:
    """A server without workers."""
    with running(SERVE, *FLAGS) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        assert psutil.Process(process.popen.pid).children() == []
        yield client


@pytest.mark.parametrize(("path", "body"), CASES)
def test_every_worker_answers_as_a_server_without_workers_does(
    clients: list[httpx.Client], alone: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    first, second = (answer_of(client, path, body) for client in clients)
    assert first == second == answer_of(alone, path, body)


def test_slots_queue_shares_turns_counts_and_picture_are_of_all_workers_together(
    process: Process, clients: list[httpx.Client]
) -> None:
    waiting = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "n": 2}
    short = {"prompt": "hi", "max_tokens": 1}
    with (
        client_of_each(process, Authorization="Bearer one") as (here, there),
        httpx.Client(base_url=process.url, timeout=60, headers=here.headers) as patient,
        httpx.Client(base_url=process.url, timeout=60, headers={"Authorization": "Bearer two"}) as second,
        ThreadPoolExecutor() as pool,
    ):
        before = metrics_of(here)
        with begun(clients[0], {**LONGEST, "n": 3}):
            with begun(clients[1], LONGEST):
                assert metrics_of(here)["chairlift_requests_running"] == 4
                with here.stream("GET", "/watch") as watch:
                    picture = json.loads(next(watch.iter_lines()).removeprefix("data: "))
                assert [slot["state"] for slot in picture["slots"]] == ["decoding"] * 4
                first = pool.submit(patient.post, "/v1/completions", json=waiting)
                until(lambda: metrics_of(there)["chairlift_requests_waiting"] == 2, "both choices wait")
                refused = [client.post("/v1/completions", json=short) for client in (here, there)]
                assert [each.status_code for each in refused] == [429, 429]
                errors = [each.json()["error"] for each in refused]
                message = "your share of the waiting queue is full (2 of 4 requests); try again later"
                assert [(error["code"], error["message"]) for error in errors] == [("queue_full", message)] * 2
                later = pool.submit(second.post, "/v1/completions", json=short)
                until(lambda: metrics_of(there)["chairlift_requests_waiting"] == 3, "the second key's waits")
            assert later.result().status_code == 200  # in the slot of the client that has left
            assert not first.done()  # of its two choices one is behind the second key's
            assert first.result().status_code == 200
        until(lambda: metrics_of(there)["chairlift_requests_running"] == 0, "a client that leaves frees its slots")
        after = metrics_of(there)
    for status, num_responses in (("200", 4), ("429", 2)):
        name = f"chairlift_http_responses_total /v1/completions {status}"
        assert after[name] - before.get(name, 0) == num_responses
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


def test_a_worker_that_dies_loses_its_clients_only_and_is_replaced(
    process: Process, clients: list[httpx.Client]
) -> None:
    doomed, safe = clients
    pid = worker_of(doomed.get("/health"), process)
    with begun(doomed, LONGEST) as lost, begun(safe, LONG) as kept:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lost)
        assert chunks(kept)[-1]["choices"][0]["finish_reason"] == "length"
    assert metrics_of(safe)["chairlift_requests_running"] == 0
    until(lambda: len(workers_of(process) - {pid}) == 2, "there is another one")
    errors = [line for line in process.log if " ERROR " in line]
    assert [re.sub(".* ERROR +", "", line) for line in errors] == [
        "an API worker has ended, and with it the requests that it served; another one is started\n"
    ]


def test_workers_that_do_not_last_are_replaced_later_and_later() -> None:
    restarts = Restarts()
    assert [restarts.delay_after(lasted=False) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert [restarts.delay_after(lasted) for lasted in (True, False, False)] == [0, 0, 1]


@pytest.mark.slow
def test_replacements_that_fail_do_not_hold_up_the_next_good_one(tmp_path: Path) -> None:
    trouble = tmp_path / "trouble"
    trouble.touch()
    with running(FAILING + SLOW_WORKERS, *TWO, *FLAGS, TROUBLE=str(trouble)) as process:
        os.kill(min(workers_of(process)), signal.SIGKILL)
        process.until_logged("an API worker ended before it was ready; this is tried again", 3)
        trouble.unlink()
        until(lambda: len(workers_of(process)) == 2, "there is another one")
        with client_of_each(process) as (here, there):
            assert [client.get("/health").status_code for client in (here, there)] == [200, 200]


@pytest.mark.slow
def test_a_signal_lets_the_streams_of_all_workers_end() -> None:
    with running(SLOW_WORKERS, *TWO, *FLAGS) as process:
        with client_of_each(process) as (here, there), begun(here, LONG) as one, begun(there, LONG) as other:
            process.popen.send_signal(signal.SIGTERM)
            assert [chunks(each)[-1]["choices"][0]["finish_reason"] for each in (one, other)] == ["length", "length"]
        assert process.exit_code() == 0


@pytest.mark.slow
def test_an_engine_that_hangs_ends_what_all_workers_serve_and_the_process_with_1() -> None:
    with (
        running(HANGING + SLOW_WORKERS, *TWO, *FLAGS, "--step-timeout", "3") as process,
        client_of_each(process) as (one, other),
        begun(one, LONGEST) as lines,
    ):
        answer = other.post("/v1/completions", json={"prompt": "hi", "seed": 13})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
        assert "longer than 3" in answer.json()["error"]["message"]
        last = [line for line in lines if line][-1]
        assert "longer than 3" in last
        assert '"engine_dead"' in last
        assert process.exit_code() == 1
