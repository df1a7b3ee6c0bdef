"""Measures the road: runs the traced chat, with native code that counts its own lines.

The native code is compiled for this run with g++'s coverage, and without optimisation, which would leave lines out that
run; gcov reads the counts that the process left. They are of the process's whole life, in which little else than two
chats uses native code; what loads weights is left out. Machines with AMX use the level below it, so that all machines
run the same files.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chairlift.models.cpu.build import CACHE_VARIABLE, COMPILER_VARIABLE
from chairlift.models.cpu.processor import LEVEL_VARIABLE, usable_instruction_sets

Lines = dict[str, list[int]]
"""Numbers of the lines that ran, by path below `chairlift/`."""

NATIVE = "models/cpu/csrc/"
"""The folder of the native code, below `chairlift/`."""

_LOADING = f"{NATIVE}loading/"
_COMPILER, _READER = "g++", "gcov"
_CHAT = Path(__file__).with_name("chat.py")
_PACKAGE = Path(__file__).resolve().parents[2] / "chairlift"


def find_obstacle() -> str | None:
    """Says why the road cannot be measured on this machine; None if it can."""
    missing = [name for name in (_COMPILER, _READER) if shutil.which(name) is None]
    if missing:
        return f"measuring the native code's part of the road needs {' and '.join(missing)}; install g++"
    return None if _levels() else "this processor has no level of the native code"


def measure() -> Lines:
    """Runs the traced chat in a process of its own; returns the lines of Python and of native code that ran."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        written, compiler = scratch / "lines.json", scratch / "compiler"
        counting = f"--coverage -fprofile-update=atomic -dumpdir {scratch}/ -O0"
        compiler.write_text(f'#!/bin/sh\nexec {_COMPILER} "$@" {counting}\n')  # the last -O counts
        compiler.chmod(0o700)
        own = {
            COMPILER_VARIABLE: str(compiler),
            CACHE_VARIABLE: f"{scratch}/kernels",
            LEVEL_VARIABLE: _levels()[0],
            "PYTHONPATH": str(_PACKAGE.parent),
        }
        subprocess.run([sys.executable, str(_CHAT), str(written)], env={**os.environ, **own}, check=True)
        lines: Lines = json.loads(written.read_text())
        return {**lines, **_native_lines(scratch)}


def _levels() -> list[str]:
    return [name for name in usable_instruction_sets() if name != "amx"]


def _native_lines(scratch: Path) -> Lines:
    """Reads the counts that a process left in that folder."""
    (counts,) = scratch.glob("*.gcda")
    command = [_READER, "--json-format", "--stdout", counts.name]
    said = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=True).stdout
    lines: Lines = {}
    for file in json.loads(said)["files"]:
        path = Path(file["file"]).resolve()
        ran = sorted({line["line_number"] for line in file["lines"] if line["count"]})
        name = path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else None
        if ran and name is not None and not name.startswith(_LOADING):
            lines[name] = ran
    return lines
