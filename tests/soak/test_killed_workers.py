"""API workers that are killed under load: each takes its own clients with it, and nobody and nothing else."""

import asyncio
import json
import os
import re
import signal
from dataclasses import dataclass, field
from random import Random

import aiohttp
import pytest

from tests.api.test_api_workers import process_at, workers_of
from tests.engine.async_support import DEADLINE_S
from tests.support.server_process import Process, running

NUM_WORKERS, NUM_KILLS = 3, 5
NUM_SLOTS, NUM_CLIENTS = 6, 9  # of which three wait for a slot
NUM_BETWEEN = 6  # whole replies between two kills
BROKEN = aiohttp.ClientConnectionError, aiohttp.ClientPayloadError
PROMPTS = ("Once upon a time", "The end of", "What is 17 + 25?", "A red cat")
SERVE_AND_REPLACE_AT_ONCE = """
import sys
from chairlift.__main__ import main
from chairlift.api import workers

workers._STARTS_WITHIN_S = 0.0  # else the fourth in a minute has to wait
sys.exit(main())
"""
FLAGS = ("--api-workers", str(NUM_WORKERS), "--max-batch-size", str(NUM_SLOTS), "--batch-invariant")


@dataclass
class Load:
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
        """One after the other, each when the last one has been replaced and all have begun streams."""
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
            self.killed.add(victim)
            self.workers.discard(victim)
            os.kill(victim, signal.SIGKILL)
        self.is_over = True


async def metrics_of(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as reply:
        lines = [line for line in (await reply.text()).splitlines() if line.startswith("chairlift_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.slow
async def test_workers_that_are_killed_under_load_lose_their_own_clients_and_leave_nothing_behind() -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with running(SERVE_AND_REPLACE_AT_ONCE, *FLAGS) as process:
        async with aiohttp.ClientSession(process.url, connector=connector) as http:
            load = Load(http)
            clients = (load.keep_streaming(number) for number in range(NUM_CLIENTS))
            await asyncio.gather(load.kill_workers(process), load.keep_asking(), *clients)
            assert load.health == {200}
            assert len(load.killed) == NUM_KILLS
            assert load.killed & set(load.cut)
            assert set(load.cut) <= load.killed | {None}
            expected = {prompt: await load.stream(0, prompt) for prompt in PROMPTS}
            assert [answer for _, answer in load.whole] == [expected[prompt] for prompt, _ in load.whole]
            async with asyncio.timeout(DEADLINE_S):
                while (books := await metrics_of(http))["chairlift_requests_running"]:
                    await asyncio.sleep(0.01)
            slots = [f'chairlift_slots{{state="{name}"}}' for name in ("prefilling", "decoding")]
            assert [books[name] for name in ("chairlift_requests_waiting", *slots)] == [0, 0, 0]
            assert len(workers_of(process) - load.killed) == NUM_WORKERS
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    errors = [re.sub(".* ERROR +", "", line) for line in process.log if " ERROR " in line]
    told = "an API worker has ended, and with it the requests that it served; another one is started\n"
    assert errors == [told] * NUM_KILLS
