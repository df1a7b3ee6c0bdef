"""What a benchmark ran on, and its last line."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def usable_cores() -> int:
    """Physical cores, as far as this process may use them."""
    allowed = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def describe_machine() -> dict[str, Any]:
    """Model name, cores, memory, system."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def describe_commit(repository: Path) -> str:
    """The commit of the checkout, with "+" where it has changes that are not committed."""
    commit = _git(repository, "rev-parse", "HEAD")
    return commit + "+" if commit and _git(repository, "status", "--porcelain") else commit


def print_report(report: Mapping[str, Any], file: Path | None) -> None:
    """A benchmark's last line: everything as JSON, for the file too if there is one."""
    line = json.dumps(report)
    print(line)
    if file is not None:
        file.write_text(line + "\n", encoding="utf-8")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
