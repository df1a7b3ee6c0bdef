"""A real server process on a free port, for tests of its life."""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from tests.support import fork_server
from tests.support.fork_server import ForkedProcess

SERVE = "import sys; from chairlift.__main__ import main; sys.exit(main())"


@dataclass
class Process:
    url: str
    popen: "subprocess.Popen[bytes] | ForkedProcess"
    log: list[str]
    _reading: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def until_logged(self, words: str, num_lines: int = 1) -> None:
        """Waits for so many lines with these words."""
        deadline = time.monotonic() + 120
        while sum(words in line for line in self.log) < num_lines:
            assert time.monotonic() < deadline, f"not logged: {words}"
            time.sleep(0.01)

    def exit_code(self) -> int:
        """The exit code of a process that is about to end; its log is complete then."""
        code = self.popen.wait(20)
        self._reading.join()
        return code


@contextmanager
def running(
    script: str, *flags: str, reads_log: bool = True, is_forked: bool = True, **variables: str
) -> Iterator[Process]:
    """A server process on a free port; killed at the end if it still runs.

    `reads_log`: after its start, too. `is_forked`: of a process that has imported it already, where that is possible.
    """
    arguments = ["serve", "--port", "0", "--num-threads", "1", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    reading_end, writing_end = os.pipe()
    if not reads_log:
        fcntl.fcntl(writing_end, fcntl.F_SETPIPE_SZ, 4096)  # so that few lines fill it
    with open(reading_end, encoding="utf-8") as stderr:
        try:
            popen = start_python(textwrap.dedent(script), arguments, environment, writing_end, is_forked)
        finally:
            os.close(writing_end)
        log: list[str] = []
        try:
            url = _address(stderr, log)
            reading = threading.Thread(target=log.extend, args=[stderr], daemon=True)
            if reads_log:
                reading.start()
            yield Process(url, popen, log, reading)
        finally:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
            if reads_log and reading.is_alive():
                reading.join()


def run_to_end(*arguments: str, script: str = SERVE) -> tuple[int, str]:
    """Runs `chairlift` with these arguments: its exit code, and what it wrote to standard error."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        popen = start_python(textwrap.dedent(script), list(arguments), os.environ, stderr.fileno(), is_forked=True)
        code = popen.wait(120)
        stderr.seek(0)
        return code, stderr.read()


def start_python(
    code: str, arguments: list[str], environment: Mapping[str, str], stderr: int, is_forked: bool = True
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Runs Python code as `python -c code arguments` does; `stderr` is a file descriptor."""
    if is_forked and fork_server.is_possible():
        fork_server.ensure_started()
        return ForkedProcess(code, arguments, environment, stderr)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=stderr, env=environment)


def _address(stream: IO[str], log: list[str]) -> str:
    """Reads the log up to the line that says where the server listens."""
    for line in stream:
        log.append(line)
        if found := re.search(r"serving on (https?://\S+|unix:/\S+)", line):
            return found.group(1)
    raise AssertionError(f"the server did not start: {''.join(log)}")


def long_stream(num_tokens: int) -> dict[str, Any]:
    """A body that asks for a stream of just so many tokens."""
    return {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
