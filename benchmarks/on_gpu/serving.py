"""The large shape over HTTP: as many requests as clients can send, and requests that arrive at random."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from peers.keeper import free_port, wait_until_healthy
from shapes import word_tokenizer

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.runner import make_test
from chairlift.loadtest.summary import Summary
from on_gpu.engine import Graphs
from on_gpu.scale import write_config
from on_gpu.setup import Measurement, Setup

_PATH = (Path(__file__).parents[1], Path(__file__).parents[2])  # benchmarks/ and the repository
_END_S = 10.0  # until a server that was told to end is killed


def serve_all(setup: Setup) -> list[Measurement]:
    """Both tests with both kinds of graphs. The rate of arrivals is a share of what the first server took."""
    traffic = setup.scale.traffic
    slot_len = traffic.longest_prompt + traffic.output_tokens
    model = write_config(setup.scale.large, slot_len, setup.dtype, setup.scratch / "served")
    word_tokenizer(setup.scale.large["vocab_size"]).save_pretrained(model)
    measurements: list[Measurement] = []
    rate: float | None = None
    for graphs in (Graphs.ALL, Graphs.DECODE):
        about = {"kind": "served", "shape": "large", "variant": str(graphs)}
        with _server(setup, model, slot_len, graphs) as url:
            full = _test(setup, url, concurrency=traffic.num_clients, seed=1)
            rate = rate or traffic.share * full.request_throughput
            poisson = _test(setup, url, request_rate=rate, seed=2)
        measurements += [
            about | {"load": f"{traffic.num_clients} clients", "summary": asdict(full)},
            about | {"load": f"Poisson, {rate:.1f} a second", "summary": asdict(poisson)},
        ]
    return measurements


def _test(setup: Setup, url: str, **arrivals: Any) -> Summary:
    """A load test's figures. RuntimeError if a request failed."""
    traffic = setup.scale.traffic
    config = BenchConfig(
        url=url,
        num_requests=traffic.num_requests,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        warmup=min(16, traffic.num_requests),
        **arrivals,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(make_test(config)).summary
    if summary.num_succeeded != summary.num_requests:
        raise RuntimeError(f"{summary.num_requests - summary.num_succeeded} requests failed: {summary.failures}")
    return summary


@contextmanager
def _server(setup: Setup, model: Path, slot_len: int, graphs: Graphs) -> Iterator[str]:
    """The URL of a server, which ends with the context. What it prints goes to standard error."""
    port = free_port()
    command = [sys.executable, "-m", "on_gpu.server", str(model), "--port", str(port), "--graphs", graphs]
    command += ["--device", setup.device, "--dtype", setup.dtype, "--attention", setup.attention]
    command += ["--max-batch-size", str(setup.scale.traffic.num_clients), "--max-seq-len", str(slot_len)]
    path = os.pathsep.join([*map(str, _PATH), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": path})
    try:
        wait_until_healthy(server, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
