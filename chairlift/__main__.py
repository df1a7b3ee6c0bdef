"""The command line: `chairlift serve | chat | generate | bench`. Nothing slow is imported before it is needed."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from chairlift import __version__
from chairlift.errors import ChairliftError, ConfigurationError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_SPIN_COUNT = (
    "20000"  # a millisecond. By default OpenMP's threads spin much longer for work, which slows other programs
)

COMMANDS = ("serve", "chat", "generate", "bench")
HELP = """\
usage: chairlift COMMAND ...

Chairlift: a small, fast LLM serving engine.

commands:
  serve [MODEL]      serve a model over HTTP, with an OpenAI-style API
  chat [MODEL]       talk with a model in the terminal, its own or a server's
  generate PROMPT    answer one prompt on standard output
  bench              load-test any OpenAI-compatible server

flags:
  --help             show this, or after a command its flags, and leave
  --version          show the version and leave

examples:
  chairlift serve                                    # the bundled model on http://127.0.0.1:8000
  chairlift serve path-or-hub-id --port 9000
  chairlift chat smollm2
  chairlift generate "What is 17 + 25?"
  chairlift bench --url http://127.0.0.1:8000 --concurrency 16
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    name, *flags = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        return _run(name, flags)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChairliftError as error:
        for handler in logging.getLogger().handlers:
            handler.flush()  # what was logged earlier comes first
        for line in str(error).splitlines():
            sys.stderr.write(f"chairlift: error: {line}\n")
        return EXIT_USAGE


def _run(name: str, flags: Sequence[str]) -> int:
    if name in ("", "-h", "--help"):
        sys.stdout.write(HELP)
        return 0 if name else EXIT_USAGE
    if name == "--version":
        sys.stdout.write(f"chairlift {__version__}\n")
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        kind = "flag" if name.startswith("-") else "command"
        advice = f"did you mean {close[0]}?" if close else "see chairlift --help"
        raise ConfigurationError(f"unknown {kind} {name}; {advice}")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # before torch loads OpenMP, which reads it then
    from chairlift import commands

    run: Callable[[Sequence[str]], int] = getattr(commands, name)
    return run(flags)


if __name__ == "__main__":
    sys.exit(main())
