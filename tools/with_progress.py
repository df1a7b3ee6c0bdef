"""Run a command under a title, and show how long it takes and what it does, one line in all.

    python tools/with_progress.py "installing torch" pip install torch

In a terminal the line has the command's last line. All of its output follows if it fails, and its exit code is this
one's.
"""

import shutil
import subprocess
import sys
import threading
import time

INTERVAL_S = 0.5


class Progress:
    """The line: a title, seconds, and the last line of a command's output."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()
        self.last = ""
        self._is_over = threading.Event()
        self._is_terminal = sys.stdout.isatty()

    def show(self) -> None:
        """Writes the line twice a second, until `end`."""
        while self._is_terminal and not self._is_over.wait(INTERVAL_S):
            width = shutil.get_terminal_size().columns - 1
            self._write(f"{self._title}: {self._seconds()}  {self.last}"[:width])

    def end(self, outcome: str) -> None:
        """Writes the line for good."""
        self._is_over.set()
        self._write(f"{self._title}: {outcome} {self._seconds()}\n")

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._start:.0f} s"

    def _write(self, text: str) -> None:
        sys.stdout.write(f"\r\x1b[K{text}" if self._is_terminal else text)
        sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Runs it."""
    title, *command = arguments
    progress, lines = Progress(title), []
    if not sys.stdout.isatty():
        print(f"{title} ...", flush=True)
    showing = threading.Thread(target=progress.show)
    showing.start()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            progress.last = line.strip()
    progress.end("done in" if process.returncode == 0 else "failed after")
    showing.join()
    if process.returncode:
        sys.stdout.writelines(lines)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
