"""Loads the kernels of the best instruction set that this machine has."""

import ctypes
import functools
import logging
import platform

from chairlift.models.cpu.build import (
    TOOLCHAIN,
    CpuKernelsUnavailable,
    InstructionSet,
    Toolchain,
    file_name,
    instruction_sets,
    open_library,
)
from chairlift.models.cpu.processor import find_drawback, usable_instruction_sets, wanted_level
from chairlift.models.cpu.structures import start

logger = logging.getLogger(__name__)

_INSTRUCTION_SET = "instruction_set"  # the attribute of a library that says what it was compiled for


@functools.cache
def load_library(isa: str | None, toolchain: Toolchain = TOOLCHAIN) -> ctypes.CDLL:
    """The compiled kernels, of the best instruction set this machine has (None) or the one named.

    CpuKernelsUnavailable if this machine lacks the named set, or if compiling fails, as without a compiler.
    """
    usable = usable_instruction_sets()
    if not usable:
        raise CpuKernelsUnavailable(find_drawback() or "there is no native code for this machine")
    wanted = isa or wanted_level()
    if wanted is not None and wanted not in usable:
        raise CpuKernelsUnavailable(f"{wanted!r} is not a level of this processor, which has {', '.join(usable)}")
    by_name = {each.name: each for each in instruction_sets(platform.machine())}
    problem: str | None = None
    for name in (wanted,) if wanted else usable:
        library = open_library(by_name[name], toolchain)
        problem = start(library)
        if problem is None:
            logger.info("CPU kernels: %s", name)
            vars(library)[_INSTRUCTION_SET] = by_name[name]
            return library
        logger.warning("the kernels for %s cannot be used: %s", name, problem)
    raise CpuKernelsUnavailable(f"no kernels can be used: {problem}")


def name_kernels() -> str:
    """Names the kernels that this machine uses: their instruction set, and a digest of their source and flags."""
    instruction_set: InstructionSet = vars(load_library(None))[_INSTRUCTION_SET]
    return file_name(instruction_set)
