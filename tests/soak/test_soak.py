"""Mixed load on a server of its own, and API workers that are killed: all is right and nothing is left."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from tests.api.test_api_workers import process_at, workers_of
from tests.engine.async_support import DEADLINE_S
from tests.soak import __main__ as soak_command
from tests.soak.__main__ import Load
from tests.soak.client import ClientLog, Ending, Entry
from tests.soak.server import State
from tests.support.server_process import SERVE, Process, running

ROOT = Path(__file__).parents[2]
SECONDS = 40
ANSWERED = {"JSON schema", "choice", "full slot", "known chat", "known completion", "long prompt", "only the prompt"}
ANSWERED |= {"regex", "response", "scored chat", "story", "tool call"}
REFUSED = {"huge body", "more than ever fits", "no HTTP", "no JSON", "nowhere", "other model", "withheld body"}
REFUSED |= {f"wrong {what}" for what in ("encoding", "field", "messages", "prompt", "response", "tools")}
MANNERS = {"patient", "leaves before the reply", "leaves within the reply", "reads slowly", "stops reading", "raw"}


def outcomes_of(report: dict[str, Any], kinds: set[str], ending: str) -> set[str]:
    """The kinds of request that ended so at least once."""
    return {kind for kind in kinds if report["endings"][kind].get(ending)}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
def test_after_mixed_load_nothing_is_left_and_everything_was_right() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(SECONDS / 60)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["complaints"] == []
    assert set(report["manners"]) == MANNERS
    # No buffer takes all that "full slot" sends, and its clients do not read on.
    assert outcomes_of(report, ANSWERED, "finished") | {"full slot"} == ANSWERED
    assert outcomes_of(report, REFUSED, "refused") == REFUSED
    assert outcomes_of(report, {"full slot", "withheld headers"}, "cut off") == {"full slot", "withheld headers"}
    assert outcomes_of(report, {"leaves within its body"}, "left") == {"leaves within its body"}
    totals = sum((Counter(counts) for counts in report["endings"].values()), Counter())
    assert min(totals["finished"], totals["queue full"], totals["left"]) > 50  # waves of all strengths


SIZES = {"tasks": 5, "open files": 20, "threads": 9, "objects": 1000, "MB of memory": 300.0}
STATE = State({"slots taken": 0, "sequences": 0}, SIZES, [], {})


def test_a_soak_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"

    async def soak(url: str, seconds: float, seed: int) -> dict[str, Any]:
        assert (url, seconds, seed) == ("http://here", 120.0, 1)
        return {"complaints": ["a slot is lost"]}

    @contextmanager
    def soaked() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(url="http://here", log=["12:00 INFO a\n", "12:00 ERROR b\n"])

    assert soak_command.main(["--seed", "1", "--json", str(path)], soaked, soak) == 1
    complaints = ["a slot is lost", "the server: 12:00 ERROR b"]
    assert capsys.readouterr().out.splitlines()[:2] == [f"WRONG (seed 1): {complaint}" for complaint in complaints]
    assert json.loads(path.read_text(encoding="utf-8"))["complaints"] == complaints


def test_what_is_left_or_has_grown_beyond_what_is_allowed_is_told() -> None:
    allowed = State(STATE.held, {**SIZES, "threads": 17, "objects": 6000, "MB of memory": 315.0}, [], {})
    assert Load("", 0).report(STATE, allowed)["complaints"] == []
    sizes = {**SIZES, "tasks": 6, "open files": 21, "threads": 18, "MB of memory": 316.0}
    assert Load("", 0, health_seconds=[0.1, 2.5]).report(STATE, State({"slots taken": 1}, sizes, [], {}))[
        "complaints"
    ] == [
        "there were 5 tasks, and now there are 6",
        "there were 20 open files, and now there are 21",
        "there were 9 threads, and now there are 18",
        "there were 300 MB of memory, and now there are 316",
        "at the end there are 1 slots taken",
        "/health took 2.5 s",
    ]


@pytest.mark.parametrize(
    ("ending", "told", "complaints"),
    [
        (Ending.FINISHED, {"0": ["200"]}, []),
        (Ending.FINISHED, {}, ["{}: the client saw 200, the server tells []"]),
        (Ending.FINISHED, {"0": ["left"]}, ["{}: the client saw 200, the server tells ['left']"]),
        (Ending.FINISHED, {"0": ["200"] * 2}, ["{} arrived 2 times: ['200', '200']"]),
        (Ending.FINISHED, {"0": ["200"], "7": [""]}, ["the server tells of requests that nobody sent: ['7']"]),
        (None, {}, ["{} did not end as it should: None"]),
        (Ending.FAILED, {"0": ["200"]}, ["{} did not end as it should: None"]),
        (Ending.LEFT, {}, []),  # it may have arrived or not, but not twice
        (Ending.LEFT, {"0": ["left"]}, []),
        (Ending.LEFT, {"0": ["200"]}, []),
        (Ending.LEFT, {"0": ["left", "200"]}, ["{} arrived 2 times: ['left', '200']"]),
    ],
)
def test_the_server_must_tell_the_same_of_a_request(
    ending: Ending | None, told: dict[str, list[str]], complaints: list[str]
) -> None:
    log = ClientLog([Entry(0, "story", "patient", ending, 200)])
    assert log.complaints(told) == [complaint.format("request 0 (story, patient)") for complaint in complaints]


NUM_WORKERS, NUM_KILLS = 2, 3  # the more kills in one place, the later a worker is replaced
NUM_SLOTS, NUM_CLIENTS = 4, 6  # of which two wait for a slot
NUM_BETWEEN = 6  # whole replies between two kills
BROKEN = aiohttp.ClientConnectionError, aiohttp.ClientPayloadError
PROMPTS = ("Once upon a time", "The end of", "What is 17 + 25?", "A red cat")
FLAGS = ("--api-workers", str(NUM_WORKERS), "--max-batch-size", str(NUM_SLOTS), "--batch-invariant")


@dataclass
class WorkerLoad:
    """Streams that follow each other without a pause, each over a connection of its own, and questions after health."""

    http: aiohttp.ClientSession
    workers: set[int] = field(default_factory=set)  # that live
    killed: set[int] = field(default_factory=set)
    num_settled: int = 0  # of those killed: others have taken their place, so that nobody finds their sockets any more
    serving: dict[int, int] = field(default_factory=dict)  # streams that have begun and not ended -> their workers
    whole: list[tuple[str, str]] = field(default_factory=list)  # prompts and answers
    cut: list[int | None] = field(default_factory=list)  # workers of broken streams; None: nothing of it had come
    health: set[int] = field(default_factory=set)
    is_over: bool = False

    @property
    def busy(self) -> set[int]:
        """Workers that serve streams."""
        return set(self.serving.values())

    async def keep_streaming(self, client: int) -> None:
        while not self.is_over:
            prompt, num_settled = PROMPTS[(client + len(self.whole)) % len(PROMPTS)], self.num_settled
            try:
                self.whole.append((prompt, await self.stream(client, prompt)))
            except BROKEN:
                assert len(self.killed) > num_settled, "a stream broke though nobody was killed"
                self.cut.append(self.serving.get(client))
            self.serving.pop(client, None)

    async def stream(self, client: int, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        async with self.http.post("/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            if reply.connection is not None and reply.connection.transport is not None:  # it has not all come at once
                transport = reply.connection.transport
                port, own_port = (transport.get_extra_info(name)[1] for name in ("peername", "sockname"))
                if (worker := process_at(port, own_port, self.workers)) is not None:
                    self.serving[client] = worker
            lines = [line.decode().strip().removeprefix("data: ") async for line in reply.content if line.strip()]
        assert lines[-1] == "[DONE]"
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    async def keep_asking(self) -> None:
        while not self.is_over:
            num_settled = self.num_settled
            try:
                async with self.http.get("/health") as reply:
                    self.health.add(reply.status)
            except BROKEN:
                assert len(self.killed) > num_settled, "a question was lost though nobody was killed"
            await asyncio.sleep(0.05)

    async def kill_workers(self, process: Process) -> None:
        """One after the other, each when the last one has been replaced and all have begun streams.

        A victim is stopped before it is killed, so that none of its streams ends while it is made sure that it has one.
        """
        rng = Random(1)
        for _ in range(NUM_KILLS):
            num_whole = len(self.whole)
            while len(self.whole) < num_whole + NUM_BETWEEN or self.killed & self.busy:
                await asyncio.sleep(0.02)
            while len(self.workers) < NUM_WORKERS or not self.workers <= self.busy:
                await asyncio.sleep(0.05)
                self.workers = workers_of(process) - self.killed
            self.num_settled = len(self.killed)
            victim = rng.choice(sorted(self.workers))
            while not await self.is_stopped_with_a_stream(victim):
                os.kill(victim, signal.SIGCONT)
                await asyncio.sleep(0.05)
            self.killed.add(victim)
            self.workers.discard(victim)
            os.kill(victim, signal.SIGKILL)
        self.is_over = True

    async def is_stopped_with_a_stream(self, worker: int) -> bool:
        os.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(0.5)  # whose end has been sent ends here
        return worker in self.busy


async def metrics_of(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as reply:
        lines = [line for line in (await reply.text()).splitlines() if line.startswith("chairlift_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.slow
async def test_workers_that_are_killed_under_load_lose_their_own_clients_and_leave_nothing_behind() -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with running(SERVE, *FLAGS) as process:
        times = [psutil.Process(pid).cpu_times() for pid in workers_of(process)]
        assert len(times) == NUM_WORKERS
        assert all(each.user + each.system < 1.0 for each in times), "the nursery has not imported what workers need"
        async with aiohttp.ClientSession(process.url, connector=connector) as http:
            load = WorkerLoad(http)
            clients = (load.keep_streaming(number) for number in range(NUM_CLIENTS))
            await asyncio.gather(load.kill_workers(process), load.keep_asking(), *clients)
            assert load.health == {200}
            assert len(load.killed) == NUM_KILLS
            assert load.killed & set(load.cut)
            assert set(load.cut) <= load.killed | {None}
            async with asyncio.timeout(DEADLINE_S):  # from then on nobody finds the last one's socket any more
                while len(workers_of(process) - load.killed) < NUM_WORKERS:
                    await asyncio.sleep(0.01)
            expected = {prompt: await load.stream(0, prompt) for prompt in PROMPTS}
            assert [answer for _, answer in load.whole] == [expected[prompt] for prompt, _ in load.whole]
            async with asyncio.timeout(DEADLINE_S):
                while (books := await metrics_of(http))["chairlift_requests_running"]:
                    await asyncio.sleep(0.01)
            slots = [f'chairlift_slots{{state="{name}"}}' for name in ("prefilling", "decoding")]
            assert [books[name] for name in ("chairlift_requests_waiting", *slots)] == [0, 0, 0]
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    errors = [re.sub(".* ERROR +", "", line) for line in process.log if " ERROR " in line]
    told = "an API worker has ended, and with it the requests that it served; another one is started\n"
    assert errors == [told] * NUM_KILLS
