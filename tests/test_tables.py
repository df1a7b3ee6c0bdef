"""Figures in the documents' tables are those of benchmarks/results, from which `tools/write_tables.py` writes them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "write_tables.py"
RESULTS = Path("benchmarks") / "results"
MEASURED = ("speed", "performance", "prefix-reuse", "scheduling", "speculation", "load-test")
WRITTEN = re.compile(r"<!-- table .*?<!-- end of table -->", re.DOTALL)


def write_tables(root: Path, *flags: str) -> tuple[int, str]:
    """The script's exit code and what it says."""
    command = [sys.executable, str(SCRIPT), "--root", str(root), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents and the files with figures."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    return tmp_path


def replace(path: Path, old: str, new: str, count: int = -1) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, count), encoding="utf-8")


def test_the_documents_have_the_figures_of_the_files() -> None:
    code, said = write_tables(ROOT, "--check")
    assert code == 0, f"{said}run python tools/write_tables.py"


def test_a_figure_changed_in_a_document_is_found_and_mended(copy: Path) -> None:
    replace(copy / "README.md", "| 24,002 |", "| 25,002 |")
    assert write_tables(copy, "--check") == (1, "README.md: not what tools/write_tables.py writes\n")
    assert write_tables(copy) == (0, "README.md: written\n")
    assert (copy / "README.md").read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_figure_changed_in_a_file_is_found_wherever_it_is_shown(copy: Path) -> None:
    name = "formats-smollm2-epyc-avx512-2-cores.json"
    replace(copy / RESULTS / name, '"perplexity": 25.', '"perplexity": 26.')
    code, said = write_tables(copy, "--check")
    assert (code, [line.partition(":")[0] for line in said.splitlines()]) == (1, ["README.md", "docs/speed.md"])


@pytest.mark.parametrize("mark", ["<!-- table formats: python tools/write_tables.py -->", "<!-- end of table -->"])
def test_a_document_without_a_mark_is_refused(copy: Path, mark: str) -> None:
    replace(copy / "README.md", mark, "", count=1)
    code, said = write_tables(copy)
    assert code == 1
    assert "ValueError: README.md has" in said


@pytest.mark.parametrize("name", MEASURED)
def test_no_table_of_a_page_with_figures_has_one_by_hand(name: str) -> None:
    by_hand = WRITTEN.sub("", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    rows = [line for line in by_hand.splitlines() if line.startswith("|") and re.search(r"\| \**\d", line)]
    assert rows == []


def test_every_file_with_figures_is_shown_or_linked() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    linked = "".join(path.read_text(encoding="utf-8") for path in documents)
    files = sorted((ROOT / RESULTS).iterdir())
    assert files
    assert [path.name for path in files if f"results/{path.name}" not in linked] == []
