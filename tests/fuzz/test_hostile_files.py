"""Whatever is in the files of a checkpoint, it is served, or one line says what is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.cases import CORPUS, list_files

MOST_BYTES = 460_800  # of the corpus


def fuzz(*arguments: str) -> dict[str, int]:
    """Runs the fuzzer. Returns its counts; fails with its report if there is a defect."""
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "0", *arguments]
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **one_thread}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_mutated_headers_are_served_or_refused() -> None:
    counts = fuzz("--rounds", "1", "--only", "model")
    assert counts["refused"] > 50
    assert counts["served"] > 20


@pytest.mark.slow
def test_mutated_files_are_served_or_refused() -> None:
    counts = fuzz("--rounds", "4", "--minutes", "2")
    assert counts["refused"] > 200
    assert counts["served"] > 50


def test_the_corpus_is_small() -> None:
    assert sum((CORPUS / file).stat().st_size for file in list_files()) < MOST_BYTES
    assert {Path(file).suffix for file in list_files()} == {".json", ".safetensors", ".gguf", ".jinja"}
