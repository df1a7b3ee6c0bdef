"""A real server process on a free port, for tests of its life."""

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

SERVE = "import sys; from chairlift.__main__ import main; sys.exit(main())"


@dataclass
class Process:
    url: str
    popen: "subprocess.Popen[str]"
    log: list[str]
    _reading: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def exit_code(self) -> int:
        """Of a process that is about to end; its log is complete then."""
        code = self.popen.wait(20)
        self._reading.join()
        return code


@contextmanager
def running(script: str, *flags: str, **variables: str) -> Iterator[Process]:
    """A server process on a free port; killed at the end if it still runs."""
    command = [sys.executable, "-c", textwrap.dedent(script), "serve", "--port", "0", "--num-threads", "1", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert popen.stderr is not None
    log: list[str] = []
    try:
        url = _address(popen.stderr, log)
        reading = threading.Thread(target=log.extend, args=[popen.stderr], daemon=True)
        reading.start()
        yield Process(url, popen, log, reading)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait()
        popen.stderr.close()


def _address(stream: IO[str], log: list[str]) -> str:
    """Reads the log up to the line that says where the server listens."""
    for line in stream:
        log.append(line)
        if found := re.search(r"serving on (https?://\S+)", line):
            return found.group(1)
    raise AssertionError(f"the server did not start: {''.join(log)}")


def long_stream(num_tokens: int) -> dict[str, Any]:
    """A body that asks for a stream of just so many tokens."""
    return {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
