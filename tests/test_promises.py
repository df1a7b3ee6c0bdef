"""docs/promises.md names tests that exist: each file, and for each expression with `-k` a test that it selects."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_ROW = re.compile(r"^\|.*\| `(tests/[^`]+)` \|$", re.MULTILINE)
COMMANDS = _ROW.findall((ROOT / "docs/promises.md").read_text())


def test_each_row_of_the_table_has_a_command() -> None:
    rows = [line for line in (ROOT / "docs/promises.md").read_text().splitlines() if line.startswith("|")]
    assert len(COMMANDS) == len(rows) - 2  # its head


@pytest.mark.parametrize("command", COMMANDS)
def test_the_tests_that_a_promise_names_exist(command: str) -> None:
    words = shlex.split(command)
    expression = words[words.index("-k") + 1] if "-k" in words else ""
    paths = [ROOT / word for word in words[: words.index("-k") if "-k" in words else None]]
    assert [path for path in paths if not path.exists()] == []
    files = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    for file in files:
        tests = re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
        assert [test for test in tests if expression in test], f"{file} has no test that this selects"
