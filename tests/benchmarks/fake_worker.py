"""A worker that needs nothing: it answers at once, or misbehaves as its options say.

    journal=FILE      notes there when it starts to generate and when it is done
    fewer=N           gives one token too few, to a batch of N prompts
    raises=N          raises, at a batch of N prompts
    dies=N            ends itself, at a batch of N prompts
    hangs=N           does not answer, at a batch of N prompts
    start=raises      does not get ready
    child=FILE        has a child process, and notes its id there

Its argument is the engine's kind: "rates" answers with rates.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

from peers.workers.protocol import Generate, Session, serve


def load(session: Session) -> Generate:
    options = session.settings.options
    sys.stdout.write("chatter of a library\n")
    sys.stdout.flush()
    session.imported(fake="1.0", pid=os.getpid())
    if options.get("start") == "raises":
        raise ValueError("no such\nmodel")
    if "child" in options:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(options["child"]).write_text(str(child.pid), encoding="ascii")

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        size = str(len(prompts))
        note(options, f"{os.getpid()} begins")
        sys.stdout.write("more chatter\n")
        sys.stdout.flush()
        if options.get("raises") == size:
            raise RuntimeError("out of blocks")
        if options.get("dies") == size:
            sys.stderr.write("last words\n")
            os._exit(3)
        if options.get("hangs") == size:
            threading.Event().wait()
        note(options, f"{os.getpid()} ends")
        if sys.argv[1:] == ["rates"]:
            return [30_000_000_000, 2_000_000_000_000]
        return [num_tokens - (options.get("fewer") == size)] * len(prompts)

    return generate


def note(options: dict[str, str], line: str) -> None:
    if "journal" in options:
        with Path(options["journal"]).open("a", encoding="ascii") as journal:
            journal.write(line + "\n")


if __name__ == "__main__":
    serve(load)
