"""Instruction sets, number formats and shapes that the native code is tried with."""

import platform
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.models.cpu import CpuKernelsUnavailable, build, load_library
from chairlift.models.cpu.build import instruction_sets
from chairlift.models.cpu.processor import usable_instruction_sets
from tests.models.cpu.support import FORMATS, Format

_USED_HERE = next(iter(usable_instruction_sets()), "plain")  # the default of this machine; the others are slow tests
_EMULATED_AMX = Path(__file__).with_name("emulated_amx.h")


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name == _USED_HERE else pytest.mark.slow)
        for name in (instruction_set.name for instruction_set in instruction_sets(platform.machine()))
    ]
)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "amx":
        name = amx_or_emulated(monkeypatch) or name
    if name not in usable_instruction_sets():
        pytest.skip(f"this processor does not have {name}")
    try:
        load_library(name)
    except CpuKernelsUnavailable as error:
        if "the system does not let" not in str(error):
            raise
        pytest.skip(str(error))
    return name


def amx_or_emulated(monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Returns the instruction set with AMX, or one that computes as it does, for processors with AVX-512 and VNNI."""
    sets, usable = instruction_sets("x86_64"), usable_instruction_sets()
    if "amx" in usable:
        return "amx"
    base = next((each for each in sets if each.name in usable and "avx512_vnni" in each.features), None)
    if base is None:
        return None
    version = f"-DVERSION={zlib.crc32(_EMULATED_AMX.read_bytes())}"
    emulated = replace(base, name="emulated_amx", flags=(*base.flags, "-include", str(_EMULATED_AMX), version))
    monkeypatch.setitem(build._BY_MACHINE, "x86_64", (*sets, emulated))
    return emulated.name


@pytest.fixture(params=FORMATS, ids=str)
def number_format(request: pytest.FixtureRequest) -> Format:
    chosen: Format = request.param
    return chosen
