"""The real process: start, drain, death, exit codes."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import pytest

ROOT = Path(__file__).parents[2]

SERVE = "import sys; from chairlift.__main__ import main; sys.exit(main())"

DIES_IN_A_STEP = """
import sys
from chairlift.__main__ import main
from chairlift.engine.core import EngineCore

real_step, num_steps = EngineCore.step, 0

def step(self):
    global num_steps
    num_steps += 1
    if num_steps > 5:
        raise RuntimeError("injected fault")
    return real_step(self)

EngineCore.step = step
sys.exit(main())
"""


@dataclass
class Process:
    url: str
    popen: "subprocess.Popen[str]"


@contextmanager
def running(script: str, *flags: str) -> Iterator[Process]:
    """A server process on a free port; killed at the end if it still runs."""
    command = [sys.executable, "-c", textwrap.dedent(script), "serve", "--port", "0", "--num-threads", "1", *flags]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert popen.stderr is not None
    try:
        yield Process(_address(popen.stderr), popen)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait()
        popen.stderr.close()


def _address(log: IO[str]) -> str:
    """Reads the log up to the line that says where the server listens, and keeps emptying it after that."""
    seen = []
    for line in log:
        seen.append(line)
        if found := re.search(r"serving on (http://\S+)", line):
            threading.Thread(target=lambda: [None for _ in log], daemon=True).start()
            return found.group(1)
    raise AssertionError(f"the server did not start: {''.join(seen)}")


def body(num_tokens: int) -> dict[str, object]:
    return {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


def test_the_example_streams_an_answer() -> None:
    with running(SERVE) as process:
        command = [sys.executable, "examples/stream_chat.py", "What is 17 + 25?", "--url", f"{process.url}/v1"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert result.stdout == "17 + 25 = 42.\n"


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_ones() -> None:
    with running(SERVE) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body(1500)) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            status = 200
            while status != 503:
                status = client.post("/v1/completions", json={"prompt": "late", "max_tokens": 1}).status_code
            assert client.get("/health").status_code == 503
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
        assert process.popen.wait(20) == 0


def test_what_outlives_the_drain_timeout_ends_with_a_proper_last_chunk() -> None:
    with running(SERVE, "--drain-timeout", "0.1") as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body(2000)) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"abort"' in rest[-4]
        assert process.popen.wait(20) == 0


def test_a_second_signal_stops_at_once() -> None:
    with running(SERVE) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body(2000)) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            while client.get("/health").status_code != 503:  # two signals at the same instant would be one
                pass
            start = time.monotonic()
            process.popen.send_signal(signal.SIGINT)
            rest = list(lines)
        assert '"finish_reason":"abort"' in rest[-4]
        assert process.popen.wait(20) == 0
        assert time.monotonic() - start < 10


def test_a_fault_in_a_step_ends_every_request_with_an_error_and_the_process_with_1() -> None:
    with running(DIES_IN_A_STEP) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body(2000)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "injected fault" in lines[-1]
        assert '"error"' in lines[-1]
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "late"}).status_code == 500
        assert process.popen.wait(20) == 1


def test_a_port_that_is_taken_is_one_clear_line_and_exit_code_2() -> None:
    with running(SERVE) as process:
        port = process.url.rpartition(":")[2]
        command = [sys.executable, "-m", "chairlift", "serve", "--port", port]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1].startswith(f"chairlift: error: cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere"], "'/nowhere' is no directory"),
        (["--max-batch-size", "0"], "--max-batch-size: Input should be greater than or equal to 1"),
        (["--max-seq-len", "100000"], "max_seq_len 100000 is more than the model's 2048 positions"),
        (["--max-batch-size", "1000000"], "lower max_batch_size or max_seq_len"),
        (["--max-num-batched-tokens", "3", "--max-batch-size", "4"], "max_num_batched_tokens (3) is below"),
        (["--attention-backend", "flash_attn"], "attention_backend flash_attn needs a CUDA device"),
        (["--device", "tpu"], "device 'tpu'"),
    ],
)
def test_a_setting_that_cannot_work_is_one_clear_line(flags: list[str], words: str) -> None:
    command = [sys.executable, "-m", "chairlift", "serve", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert words in result.stderr.splitlines()[-1]


def test_generate_prints_the_answer_and_nothing_else() -> None:
    command = [sys.executable, "-m", "chairlift", "generate", "What is 17 + 25?"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd())
    assert result.returncode == 0
    assert "42" in result.stdout
    assert len(result.stdout.splitlines()) == 1
