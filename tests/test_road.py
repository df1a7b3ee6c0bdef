"""ARCHITECTURE.md names the files that one streamed chat runs, and documents say how many lines that are."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "write_road.py"
DOCUMENTS = ("README.md", "ARCHITECTURE.md")
NAMED = ["scheduler/scheduler.py", "models/cpu/csrc/decoder.cpp"]


def write_road(*flags: str | Path) -> tuple[int, str]:
    """The script's exit code and its complaints."""
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Documents whose road has two files, and numbers that were not written yet."""
    mark = "<!-- road: python tools/write_road.py -->\nnone\n<!-- end of road -->\n"
    road = "## The token's road\n\n1. `scheduler/scheduler.py`: plans\n2. `csrc/decoder.cpp`: computes\n"
    for name in DOCUMENTS:
        (tmp_path / name).write_text(f"{mark}\n{road}\n## Why\n\n`cache/ledger.py`\n")
    return tmp_path


def measured(root: Path, *names: str) -> tuple[str | Path, ...]:
    """Flags that say which files ran."""
    path = root / "lines.json"
    path.write_text(json.dumps({name: [1, 2, 3] for name in names}))
    return ("--root", root, "--measured", path)


@pytest.mark.slow
def test_architecture_names_the_files_that_a_chat_runs() -> None:
    if shutil.which("g++") is None or shutil.which("gcov") is None:
        pytest.skip("g++ and gcov measure the native code's part of the road")
    assert write_road("--check") == (0, "")


def test_numbers_are_written_into_both_documents(root: Path) -> None:
    flags = measured(root, *NAMED)
    assert write_road("--check", *flags)[0] == 1
    assert write_road(*flags) == (0, "")
    assert write_road("--check", *flags) == (0, "")
    assert all("1 files of Python with" in (root / name).read_text() for name in DOCUMENTS)


def test_a_file_that_runs_and_is_not_named_is_a_fault(root: Path) -> None:
    code, said = write_road(*measured(root, *NAMED, "cache/ledger.py"))
    assert (code, said) == (1, "ARCHITECTURE.md does not name cache/ledger.py, which a chat runs\n")


def test_a_file_that_is_named_and_does_not_run_is_a_fault(root: Path) -> None:
    code, said = write_road(*measured(root, NAMED[0]))
    assert (code, said) == (1, f"ARCHITECTURE.md names {NAMED[1]}, which no chat runs\n")


def test_a_number_that_is_far_off_is_stale(root: Path) -> None:
    flags = measured(root, *NAMED)
    write_road(*flags)
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("1 files of Python", "2 files of Python"))
    assert write_road("--check", *flags) == (1, "README.md has stale numbers of the road: python tools/write_road.py\n")
