"""Instruction sets, number formats and shapes that the native code is tried with."""

import platform

import pytest

from chairlift.models.cpu import CpuKernelsUnavailable, load_library
from chairlift.models.cpu.build import instruction_sets, usable_instruction_sets
from tests.models.cpu.support import FORMATS, Format

_USED_HERE = next(iter(usable_instruction_sets()), "plain")  # the default of this machine; the others are slow tests


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name == _USED_HERE else pytest.mark.slow)
        for name in (instruction_set.name for instruction_set in instruction_sets(platform.machine()))
    ]
)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in usable_instruction_sets():
        pytest.skip(f"this processor does not have {name}")
    try:
        load_library(name)
    except CpuKernelsUnavailable as error:
        if "the system does not let" not in str(error):
            raise
        pytest.skip(str(error))
    return name


@pytest.fixture(params=FORMATS, ids=str)
def number_format(request: pytest.FixtureRequest) -> Format:
    chosen: Format = request.param
    return chosen
