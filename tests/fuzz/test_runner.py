"""The fuzzer sees what it looks for: crashes, hangs, memory, exceptions; and its cases can be made again."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.cases import CORPUS, Case, list_files, write_out
from tests.fuzz.gguf_layout import fields_of
from tests.fuzz.mutations import mutate

SCRIPT = """
import ctypes, os, signal, sys, time
from tests.fuzz.cases import Case
from tests.fuzz.runner import Defect, run

def attempt(path):
    {body}

for outcome in run([Case("llama/config.json", number) for number in (1, 2)], attempt):
    print(outcome.case, repr(outcome.refusal), (outcome.defect or "sound").splitlines()[0])
"""


def said_of(body: str) -> list[str]:
    """Returns what the runner says of two cases whose checkpoints are served by that statement."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "None sound"),
        ("return f'{path} is damaged'", "'PATH is damaged' sound"),
        ("ctypes.string_at(0)", "None was ended by SIGSEGV"),
        ("os.abort()", "None was ended by SIGABRT"),
        ("os._exit(3)", "None exited with 3"),
        ("bytearray(2 ** 31)", "None MemoryError"),
        ("memory = b'x' * 2 ** 27", "None took 12"),
        ("{}['name']", "None KeyError: 'name'"),
    ],
)
def test_every_outcome_is_told_and_the_next_case_is_run(body: str, said: str) -> None:
    first, second = said_of(body)
    assert first.startswith(f"llama/config.json:1 {said}")
    assert second.startswith(f"llama/config.json:2 {said}")


@pytest.mark.slow
def test_a_case_that_computes_for_ever_is_ended() -> None:
    first, _ = said_of("while True: pass")
    assert first == "llama/config.json:1 None took more than 10 s of processor time"


def test_a_number_makes_the_same_case_again_and_another_makes_another() -> None:
    for file in list_files():
        contents = [Case(file, number).content() for number in range(1, 30)]
        assert contents == [Case.parse(f"{file}:{number}").content() for number in range(1, 30)]
        assert len({*contents, Case(file, 0).content()}) > 20


def test_a_gguf_header_is_known_field_by_field() -> None:
    content = (CORPUS / "gguf-bytes" / "model.gguf").read_bytes()
    fields = fields_of(content)
    texts = [content[field.start : field.start + field.size] for field in fields if field.kind == "text"]
    assert texts[:2] == [b"general.architecture", b"qwen2"]
    assert b"token_embd.weight" in texts
    assert {field.kind for field in fields} == {
        *("magic", "version", "number of tensors", "number of keys", "length", "text", "type", "number"),
        *("number of elements", "number of dimensions", "dimension", "type of a tensor", "offset"),
    }
    assert all(a.start + a.size <= b.start for a, b in pairwise(fields))


def test_whatever_is_no_header_is_mutated_as_bytes() -> None:
    for content in (b"", b"GGUF", b"{", b"\xff" * 40):
        for number in range(200):
            for name in ("a.gguf", "a.json", "a.safetensors", "a.jinja"):
                assert isinstance(mutate(name, content, Random(number)), bytes)


def test_a_case_can_be_written_out_to_look_at_it(tmp_path: Path) -> None:
    path = write_out(Case("awq/config.json", 3), tmp_path / "case")
    assert (path / "config.json").read_bytes() == Case("awq/config.json", 3).content()
    assert (path / "model.safetensors").read_bytes() == (CORPUS / "awq" / "model.safetensors").read_bytes()
