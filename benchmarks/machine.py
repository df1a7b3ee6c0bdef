"""Says what all benchmarks have: flags, a table, what they ran on, and a last line of JSON."""

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

_REPOSITORY = Path(__file__).parents[1]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A script's flags: its docstring as it is written, and `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the last line too")
    return parser


def usable_cores() -> int:
    """Physical cores, as far as this process may use them."""
    allowed = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def describe_machine() -> dict[str, Any]:
    """Model name, the level that Chairlift's kernels take here unless told otherwise, cores, memory, system."""
    from chairlift.models.cpu.processor import usable_instruction_sets, wanted_level  # torch, after what is measured

    return {
        "cpu": _cpu_model(),
        "cpu_level": wanted_level() or next(iter(usable_instruction_sets()), None),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def describe_commit() -> str:
    """The commit of the checkout, with "+" where it has changes that are not committed; empty if nothing knows it."""
    commit = _git("rev-parse", "HEAD")
    return commit + "+" if commit and _git("status", "--porcelain") else commit


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join(
        "  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def print_report(arguments: argparse.Namespace, **parts: Any) -> None:
    """A benchmark's last line: what it was asked for (or `settings`), where it ran, what it found."""
    report = {"settings": vars(arguments), "machine": describe_machine(), "commit": describe_commit(), **parts}
    line = json.dumps(report, default=str)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", str(_REPOSITORY), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
