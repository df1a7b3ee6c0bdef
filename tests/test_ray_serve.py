"""Replicas on Ray Serve: what clients see is the server's, and no request is lost when replicas come, go or die.

One small cluster on this machine, and its tests run in order: one replica, two under load, one after a death, two
again, and one; in the end an engine in Ray Data.
"""

import asyncio
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from chairlift.errors import ConfigurationError

ray = pytest.importorskip("ray", reason="Ray is not installed: it takes the extra [ray]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200), pytest.mark.filterwarnings("default")]  # Ray has its own

URL = "http://127.0.0.1:8129"
SCALING = {"max_replicas": 2, "target_requests": 2, "upscale_delay": 0.5}
MAX_BODY_BYTES = 2**17
SETTINGS: dict[str, Any] = {"num_threads": 1, "num_cpus": 0.25, "max_body_bytes": MAX_BODY_BYTES, **SCALING}
LONG = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "stream": True}
BATCH = Path(__file__).parent.parent / "examples" / "ray" / "batch.py"


def deploy(**settings: float) -> None:
    """One replica, a second one while there are more than two requests; returns once they are there."""
    from ray import serve

    from chairlift.ray_serve import build_app

    serve.run(build_app({**SETTINGS, **settings}))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    from ray import serve

    # Ray's workers would be nice to whatever else this machine does, and so start slowly beside other tests.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, logging_level="error")
    serve.start(http_options={"port": 8129})
    deploy(max_replicas=1, max_requests=8, max_queued_requests=8)
    yield
    serve.shutdown()
    ray.shutdown()


def replicas() -> dict[str, int]:
    """Returns how many there are in each state."""
    from ray import serve

    states: dict[str, int] = serve.status().applications["default"].deployments["Replica"].replica_states
    return states


def num_replicas() -> int:
    """Those that take requests."""
    return replicas().get("RUNNING", 0)


def pids_of(*deployments: str) -> list[int]:
    """Returns the process ids of their replicas."""
    pids, names = [], tuple(f"ray::ServeReplica:default:{each}" for each in deployments)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if " ".join(process.cmdline()).startswith(names):
                pids.append(process.pid)
    return pids


async def begin(client: httpx.AsyncClient, body: dict[str, Any], has_begun: asyncio.Event | None = None) -> None:
    """Asks, reads the first line, and leaves; with `has_begun` when it is cancelled."""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        lines = answer.aiter_lines()  # which ends the stream when it is dropped
        await anext(lines)
        if has_begun is not None:
            has_begun.set()
            await asyncio.Event().wait()


async def stream_whole(client: httpx.AsyncClient) -> int:
    """Returns how many chunks a stream brought, which must end properly; an error if it does not."""
    async with client.stream("POST", "/v1/completions", json=LONG) as answer:
        answer.raise_for_status()
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return len(lines) - 1


async def keep_asking_until(change: Awaitable[None], num_clients: int) -> None:
    """Each client streams one answer after another until the change has been made; each must end properly."""
    changing = asyncio.ensure_future(change)
    lengths = []

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while not changing.done():
            lengths.append(await stream_whole(client))

    async with httpx.AsyncClient(base_url=URL, timeout=60) as client:
        await asyncio.gather(changing, *(keep_asking(client) for _ in range(num_clients)))
    assert len(lengths) >= num_clients
    assert min(lengths) > 100  # chunks, which may hold several tokens


async def until(is_so: Callable[[], bool]) -> None:
    """Asks again and again; the test's time limit is the only one."""
    while not await asyncio.to_thread(is_so):
        await asyncio.sleep(0.1)


def test_settings_come_as_texts_from_the_command_line_and_unknown_ones_are_refused() -> None:
    from chairlift.ray_serve import build_app

    build_app({"max_replicas": "3", "num_gpus": "0.5", "max_batch_size": "8", "vllm_metrics": "true"})
    with pytest.raises(ConfigurationError, match="unknown setting 'replicas'"):
        build_app({"replicas": "2", "model": "bundled"})
    with pytest.raises(ValueError, match="num_replicas"):
        build_app({"num_replicas": "none"})


WITHOUT_EFFECT = ("allowed_host", "api_workers", "client_timeout", "drain_delay", "host", "idle_timeout")


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, "log_format", "log_interval", "port", "worker_timeout"])
def test_settings_that_have_no_effect_under_ray_are_refused(name: str) -> None:
    from chairlift.api import ServerConfig
    from chairlift.ray_serve import build_app

    default = ServerConfig().model_dump()[name]
    with pytest.raises(ConfigurationError, match=f"^{name} has no effect on Ray Serve; leave it out: "):
        build_app({name: default})


async def test_the_openai_client_gets_a_stream_a_body_an_error_and_one_request_id() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    question: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    stream = await client.chat.completions.create(model="bundled", messages=question, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert len(pieces) > 3
    assert "".join(pieces) == "17 + 25 = 42."
    create, headers = client.chat.completions.with_raw_response.create, {"X-Request-Id": "mine"}
    raw = await create(model="bundled", messages=question, extra_headers=headers)
    assert raw.parse().choices[0].message.content == "17 + 25 = 42."
    assert raw.headers["X-Request-Id"] == "mine"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="bundled", messages=question, temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another/model")
    await client.close()


@pytest.mark.parametrize(
    ("head", "piece"), [("Content-Length: 131073", b""), ("Transfer-Encoding: chunked", b" " * 1024)]
)
async def test_a_body_that_is_too_large_is_refused_before_it_is_there(head: str, piece: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", 8129)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", head]
    writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    for _ in range(129 if piece else 0):  # the chunk that would be the last one never comes
        writer.write(b"400\r\n" + piece + b"\r\n")
    head_of_answer = await reader.readuntil(b"\r\n\r\n")
    assert head_of_answer.startswith(b"HTTP/1.1 413 ")
    complaint = json.loads(await reader.readuntil(b"}}"))["error"]
    assert complaint.pop("message").startswith("the body is too large: Maximum request body size 131072 exceeded")
    assert complaint == {"type": "invalid_request_error", "param": None, "code": None}
    writer.close()


async def value_of(client: httpx.AsyncClient, metric: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{metric} ")))


@pytest.mark.parametrize("is_streamed", [True, False], ids=["in a stream", "before any reply"])
async def test_a_client_that_leaves_frees_its_slot(is_streamed: bool) -> None:
    aborted = 'chairlift_requests_total{outcome="abort"}'
    async with httpx.AsyncClient(base_url=URL, timeout=60) as client:
        num_aborted = await value_of(client, aborted)
        body = {**LONG, "max_tokens": 1900, "stream": is_streamed}
        has_begun = asyncio.Event()
        asking = asyncio.create_task(begin(client, body, has_begun))
        while await value_of(client, "chairlift_requests_running") != 1:
            pass
        if is_streamed:
            await has_begun.wait()
        asking.cancel()
        while await value_of(client, "chairlift_requests_running"):
            pass
        assert await value_of(client, aborted) == num_aborted + 1


async def test_clients_that_come_and_leave_cost_no_file_descriptors() -> None:
    def num_open() -> int:
        return sum(psutil.Process(pid).num_fds() for pid in pids_of("Replica", "Ingress"))

    async with httpx.AsyncClient(base_url=URL, timeout=60) as client:

        async def ask(number: int) -> None:
            if number % 2:
                answer = await client.post("/v1/completions", json={"prompt": "1, 2,", "max_tokens": 1})
                assert answer.status_code == 200
            else:
                await begin(client, LONG)

        await asyncio.gather(*map(ask, range(4)))
        num_before = num_open()
        for _ in range(10):
            await asyncio.gather(*map(ask, range(4)))
        assert num_open() <= num_before + 8  # two ends of as many connections as there were at once


async def test_what_finds_no_room_is_refused_as_a_server_does() -> None:
    async with httpx.AsyncClient(base_url=URL, timeout=60) as client:

        async def ask() -> httpx.Response:
            return await client.post("/v1/completions", json={**LONG, "max_tokens": 100, "stream": False})

        answers = await asyncio.gather(*(ask() for _ in range(48)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < 48
    for answer in refused:
        error = answer.json()["error"]
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        message = "too many requests wait for a replica; try again later"
        assert error == {"message": message, "type": "rate_limit_error", "param": None, "code": "queue_full"}


async def test_under_load_a_replica_is_added_and_no_request_is_lost() -> None:
    assert num_replicas() == 1
    await asyncio.to_thread(deploy)
    await keep_asking_until(until(lambda: sum(replicas().values()) == 2), num_clients=3)
    await keep_asking_until(until(lambda: num_replicas() == 2), num_clients=1)  # so that it has time to start


async def test_conversations_stay_where_their_beginning_is_warm() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

    async def converse(number: int) -> tuple[int, int]:
        """Prompt tokens that an earlier turn had computed, and those of them that were reused."""
        system = " ".join(f"Rule {number}.{rule}: be kind." for rule in range(12))
        messages: Any = [{"role": "system", "content": system}]
        known = known_sum = cached_sum = 0
        for turn in range(5):
            messages.append({"role": "user", "content": f"Tell me more about number {turn}."})
            answer = await client.chat.completions.create(model="bundled", messages=messages, max_tokens=12)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            known_sum += known
            cached_sum += min(known, answer.usage.prompt_tokens_details.cached_tokens or 0)
            known = answer.usage.prompt_tokens
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return known_sum, cached_sum

    sums = await asyncio.gather(*(converse(number) for number in range(10)))
    await client.close()
    known, cached = (sum(column) for column in zip(*sums, strict=True))
    assert known > 5000
    assert cached / known >= 0.85


async def test_when_a_replica_is_killed_every_request_is_answered_or_fails_with_an_error() -> None:
    async with httpx.AsyncClient(base_url=URL, timeout=60) as client:
        asking = [asyncio.create_task(stream_whole(client)) for _ in range(8)]
        whole = [asyncio.create_task(client.post("/v1/completions", json={**LONG, "stream": False})) for _ in range(8)]
        victim, _ = pids_of("Replica")
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            await anext(lines)  # so the others have come, too
            os.kill(victim, signal.SIGKILL)
            ends = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 60)
            answers = await asyncio.wait_for(asyncio.gather(*whole), 60)
        cut = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(end, httpx.RemoteProtocolError | httpx.HTTPStatusError) for end in cut), cut
        assert len(cut) < len(ends)
        assert [answer.status_code for answer in answers] == [200] * 8  # sent to the other replica
        assert await stream_whole(client) > 100


async def test_the_dead_replica_comes_back_and_with_less_load_one_goes_and_no_request_is_lost() -> None:
    async def change() -> None:
        await until(lambda: num_replicas() == len(pids_of("Replica")) == 2)
        await asyncio.to_thread(deploy, downscale_delay=0.5)
        await until(lambda: num_replicas() == len(pids_of("Replica")) == 1)

    await keep_asking_until(change(), num_clients=1)


async def test_ray_has_the_metrics_of_a_replica_with_its_name() -> None:
    port = ray.nodes()[0]["MetricsExportPort"]
    counts: list[str] = []
    async with httpx.AsyncClient() as client:
        while not any(float(count) > 100 for count in counts):
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            counts = re.findall(r'ray_chairlift_generated_tokens_total\{[^}]*replica="\w+"[^}]*\} (\S+)', text)


def test_a_batch_is_answered_whole_and_once_though_an_engine_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    serve.shutdown()  # replicas and engines together would take too much memory
    main, death = runpy.run_path(str(BATCH))["main"], tmp_path / "death"

    answerer: Any = main.__globals__["Answerer"]

    class Mortal(answerer):  # type: ignore[misc]  # known when the example is read
        """Its first batch is answered, but nobody gets the answers."""

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            answered: dict[str, Any] = super().__call__(batch)
            with suppress(FileExistsError):
                death.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            return answered

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": f"{n}, {n + 1},"}) + "\n" for n in range(100)))
    monkeypatch.setitem(main.__globals__, "Answerer", Mortal)
    flags = ["--engines", "1", "--cpus", "0.25", "--batch-size", "8", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["batch.py", str(prompts), str(tmp_path / "answers"), *flags])
    main()
    assert death.exists()
    answers = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    assert sorted(answer["id"] for answer in answers) == list(range(100))
    assert all(answer["answer"] for answer in answers)
