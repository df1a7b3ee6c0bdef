"""Finds what the processor can do, and so which instruction sets the kernels use. It needs no torch."""

import ctypes
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from chairlift.errors import ConfigurationError
from chairlift.models.cpu.build import PLAIN, instruction_sets

LEVEL_VARIABLE = "CHAIRLIFT_CPU_LEVEL"

_LINUX, _MACOS = "Linux", "Darwin"
_CPUINFO = Path("/proc/cpuinfo")
_RENAMED = {"fma": "fma3"}  # as torch has it; and its AVX-512 features have one "_" more
_AT_HWCAPS = (16, 26)  # in the auxiliary vector that Linux passes to every process: 64 bits each
_ARM_HWCAPS = {"asimd": 1, "asimddp": 20, "i8mm": 64 + 13, "bf16": 64 + 14}  # their bits
_MAC_FACTS = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor, beneath an operating system."""

    system: str  # as `platform.system` names it
    machine: str  # likewise
    features: frozenset[str] = frozenset()
    vendor: str | None = None

    @classmethod
    def here(cls) -> Self:
        """Reads this machine's. Systems that have no kernels are not asked for features."""
        system, machine = platform.system(), platform.machine()
        if system == _MACOS and machine == "arm64":
            return cls(system, machine, mac_features(_sysctl))
        if system != _LINUX:
            return cls(system, machine)
        if machine == "aarch64":
            return cls(system, machine, arm_features(_hwcap()))
        return cls(system, machine, x86_features(_cpuinfo("flags")), _cpuinfo("vendor_id"))


def wanted_level() -> str | None:
    """Returns the instruction set that $CHAIRLIFT_CPU_LEVEL names. ConfigurationError if this processor lacks it."""
    wanted, usable = os.environ.get(LEVEL_VARIABLE), usable_instruction_sets()
    if not wanted or wanted in usable:
        return wanted or None
    has = ", ".join(usable) or "none"
    raise ConfigurationError(f"${LEVEL_VARIABLE}: {wanted!r} is not a level of this processor, which has {has}")


def usable_instruction_sets(processor: Processor | None = None) -> list[str]:
    """Names the sets whose features the processor has, the best first; those slow on it come last.

    `processor` None: this machine's.
    """
    processor = processor or Processor.here()
    if not processor.features and processor.system != _LINUX:
        return []
    usable = [each for each in instruction_sets(processor.machine) if processor.features.issuperset(each.features)]
    return [each.name for each in sorted(usable, key=lambda each: each.slow_on == processor.vendor)]


def find_drawback(processor: Processor | None = None) -> str | None:
    """Says why torch's own kernels are the better choice, as far as is known; None if they are not.

    `processor`: see `usable_instruction_sets`.
    """
    processor = processor or Processor.here()
    system, machine, usable = processor.system, processor.machine, usable_instruction_sets(processor)
    if system == _MACOS and usable:
        return "the native code is untested on macOS; attention_backend cpu uses it anyway"
    if system != _LINUX:
        name = "macOS on Intel" if system == _MACOS else system
        return f"the native code runs on Linux, not on {name}; a Linux container or virtual machine has it"
    if any(name != PLAIN for name in usable):
        return None
    return "this processor has no AVX2" if machine == "x86_64" else f"the native code is slow on {machine} processors"


def arm_features(hwcap: int) -> frozenset[str]:
    """Reads features as Linux tells them: https://docs.kernel.org/arch/arm64/elf_hwcaps.html"""
    return frozenset(name for name, bit in _ARM_HWCAPS.items() if hwcap >> bit & 1)


def mac_features(sysctl: Callable[[str], int]) -> frozenset[str]:
    """https://developer.apple.com/documentation/kernel/1387446-sysctlbyname/determining_instruction_set_characteristics"""
    return frozenset(["asimd", *(name for name, fact in _MAC_FACTS.items() if sysctl(f"hw.optional.arm.{fact}"))])


def x86_features(flags: str) -> frozenset[str]:
    """Reads features as Linux lists them on x86: https://docs.kernel.org/arch/x86/cpuinfo.html"""
    named = (_RENAMED.get(flag, flag) for flag in flags.split())
    return frozenset(re.sub(r"^avx512(?!_)", "avx512_", name) for name in named)


def _cpuinfo(field: str) -> str:
    """Reads a field of the first core, as Linux reports it on x86; empty if there is none."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.split("\t")[0] == field), "")


def _hwcap() -> int:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return sum(int(getauxval(kind)) << 64 * place for place, kind in enumerate(_AT_HWCAPS))


def _sysctl(name: str) -> int:
    """Reads a value of macOS's sysctl; 0 for an unknown name."""
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value
