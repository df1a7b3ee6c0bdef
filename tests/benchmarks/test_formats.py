"""The table of formats and levels, with fake workers in place of the engines that are timed."""

import sys

import formats
import pytest
from peers.engines import Engine

from chairlift.models.cpu.build import usable_instruction_sets
from tests.support.kernels import needs_kernels

from .fakes import FAKE_WORKER, RunScript

LEVEL = usable_instruction_sets()[0]


@pytest.fixture(autouse=True)
def _fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "command", lambda engine: [sys.executable, FAKE_WORKER, engine.kind])


@needs_kernels
def test_a_row_has_bits_perplexity_speed_and_memory_of_a_format_at_a_level(run_script: RunScript) -> None:
    flags = ["--model", "bundled", "--formats", "bfloat16", "int8", "--workloads", "1x4+3", "2x4+3", "--rounds", "1"]
    ran = run_script(formats, *flags)
    head, _, plain, int8, _ = ran.out.splitlines()
    assert head == "| level | format | bits a weight | perplexity | 1x4+3 | 2x4+3 | peak memory, GB |"
    assert plain.startswith(f"| {LEVEL} | bfloat16 | 16.")
    assert int8.startswith(f"| {LEVEL} | int8 | 9.4 |")  # with the padding of a small model
    known = ran.report["formats"]
    assert known["int8"]["perplexity"] == pytest.approx(known["bfloat16"]["perplexity"], rel=0.02)
    assert [len(result["rates"][f"{LEVEL} int8"]) for result in ran.report["results"]] == [1, 1]
    assert ran.report["engines"][f"{LEVEL} int8"]["options"]["level"] == LEVEL
    assert ran.code == 0


def test_only_a_gguf_file_has_a_format_of_its_own(run_script: RunScript) -> None:
    ran = run_script(formats, "--model", "bundled", "--formats", "file")
    assert ran == (2, "", "formats.py: --formats file: bundled is no GGUF file\n")
