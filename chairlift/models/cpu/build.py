"""Finds the kernels' library for this machine: in the package if a wheel brought it, else compiled once and kept.

The processor's features decide at run time which instructions are used. There is one library per instruction set, so
that a home directory shared by several machines works, and tests can try every set that the machine has.

A library is executed, so no other user may be able to write to the cache directory, and a library in it ends with a
digest of all that is before it: one that was cut off or changed is compiled again rather than run.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from chairlift.models.cpu.compiler import (
    PLAIN,
    CpuKernelsUnavailable,
    InstructionSet,
    compile_library,
    file_name,
    find_compiler,
    instruction_sets,
)

logger = logging.getLogger(__name__)

LEVEL_VARIABLE = "CHAIRLIFT_CPU_LEVEL"
CACHE_VARIABLE = "CHAIRLIFT_CACHE_DIR"

_PACKAGED = Path(__file__).parent / "libraries"  # of a wheel, which are trusted as its other code is
_ROOT = 0
_MARK = b"chairlift-sha256"  # begins what is behind the library itself
_NUM_TRAILING = len(_MARK) + hashlib.sha256().digest_size
_UNUSED_AFTER_S = 30 * 24 * 3600.0
_AT_HWCAPS = (16, 26)  # in the vector of facts that Linux hands to every process: 64 bits each
_ARM_HWCAPS = {"asimd": 1, "asimddp": 20, "i8mm": 64 + 13, "bf16": 64 + 14}  # their bits


class _Damaged(Exception):
    """A cached library that must not be loaded; the message says why."""


@functools.cache
def load_library(isa: str | None = None) -> ctypes.CDLL:
    """The compiled kernels, of the best instruction set this machine has or the one named.

    CpuKernelsUnavailable if they have to be compiled and there is no compiler, or it fails; if this machine lacks the
    named set; if there is no OpenMP runtime.
    """
    wanted = isa or os.environ.get(LEVEL_VARIABLE)
    usable = usable_instruction_sets()
    if not usable:
        raise CpuKernelsUnavailable(f"the kernels are made for Linux, not {platform.system()}")
    if wanted is not None and wanted not in usable:
        source = "" if isa else f"{LEVEL_VARIABLE} "
        raise CpuKernelsUnavailable(f"{source}{wanted!r} is not one that this processor has: {', '.join(usable)}")
    by_name = {each.name: each for each in instruction_sets(platform.machine())}
    for name in [wanted] if wanted else usable:
        library = _open(by_name[name])
        if library.chairlift_start() == 0:
            logger.info("CPU kernels: %s", name)
            return library
        logger.warning("the system does not let this process use %s", name)
    raise CpuKernelsUnavailable(f"the system does not let this process use {wanted}")


def usable_instruction_sets() -> list[str]:
    """Names of the sets whose features this processor has, the best first; last what its vendor made slow."""
    if platform.system() != "Linux":
        return []
    machine, vendor = platform.machine(), _vendor()
    features = _arm_features(_hwcap()) if machine == "aarch64" else _x86_features()
    usable = [each for each in instruction_sets(machine) if features.issuperset(each.features)]
    return [each.name for each in sorted(usable, key=lambda each: each.slow_on == vendor)]


def _x86_features() -> frozenset[str]:
    """As torch names them."""
    return frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)


def _arm_features(hwcap: int) -> frozenset[str]:
    """As Linux names them: https://docs.kernel.org/arch/arm64/elf_hwcaps.html"""
    return frozenset(name for name, bit in _ARM_HWCAPS.items() if hwcap >> bit & 1)


def _hwcap() -> int:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return sum(int(getauxval(kind)) << 64 * place for place, kind in enumerate(_AT_HWCAPS))


def _vendor() -> str:
    """The processor's, as Linux tells it of x86; elsewhere nothing."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def are_kernels_fast() -> bool:
    """True if this processor has AVX2 or NEON at least: without them torch's own kernels are faster."""
    return any(name != PLAIN for name in usable_instruction_sets())


def _open(instruction_set: InstructionSet) -> ctypes.CDLL:
    _load_openmp()
    packaged = _PACKAGED / file_name(instruction_set)
    if packaged.is_file():
        return ctypes.CDLL(str(packaged))
    path = _library_path(instruction_set)
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    except _Damaged as error:
        logger.warning("%s %s: it is compiled again", path, error)
    _compile(instruction_set, path)
    try:
        return _load(path)
    except (_Damaged, OSError) as error:
        raise CpuKernelsUnavailable(f"{path} was compiled just now and {error}; is something changing it?") from error


def _load_openmp() -> None:
    """Torch's own OpenMP runtime, so that both have one pool of threads: two would take the cores from each other."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    runtime = str(own[0]) if own else "libgomp.so.1"
    try:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # where the kernels look for what they were not linked to
    except OSError as error:
        raise CpuKernelsUnavailable(f"the OpenMP runtime {runtime} cannot be loaded: {error}") from error


def _library_path(instruction_set: InstructionSet) -> Path:
    try:
        return cache_directory() / file_name(instruction_set)
    except RuntimeError as error:  # there is no home directory
        raise CpuKernelsUnavailable(
            f"there is no place for compiled kernels ({error}); set ${CACHE_VARIABLE}"
        ) from error


def _load(path: Path) -> ctypes.CDLL:
    """FileNotFoundError if it is not there. Loads the very file that was checked, even if its name was taken over."""
    with _own_directory(path.parent) as directory:
        try:
            library = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _Damaged(f"cannot be opened ({error.strerror})") from error
    try:
        _verify(library)
        with contextlib.suppress(OSError):  # a cache that cannot be written to works, too
            os.utime(library)  # it is in use: see `_remove_unused`
        # Not closed: the loader takes a name that it has seen for the library that it has seen there.
        return ctypes.CDLL(f"/proc/self/fd/{library}")
    except OSError as error:
        os.close(library)
        raise CpuKernelsUnavailable(
            f"{path} cannot be loaded ({error}); delete it to have it compiled again"
        ) from error
    except _Damaged:
        os.close(library)
        raise


def cache_directory() -> Path:
    """$CHAIRLIFT_CACHE_DIR, or `chairlift` in the user's cache directory. RuntimeError if there is no home."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"


@contextlib.contextmanager
def _own_directory(path: Path) -> Iterator[int]:
    """A descriptor of the directory, if no other user can write to it. FileNotFoundError if there is none."""
    refusal = f"compiled kernels cannot be kept in {path}: %s; delete it, or name another in ${CACHE_VARIABLE}"
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise CpuKernelsUnavailable(refusal % reason) from error
    try:
        info = os.fstat(directory)
        if not _is_own(info):
            raise CpuKernelsUnavailable(refusal % "it belongs to another user")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CpuKernelsUnavailable(refusal % "other users can write to it, and may have")
        if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and info.st_uid == os.geteuid():
            os.fchmod(directory, stat.S_IRWXU)
        yield directory
    finally:
        os.close(directory)


def _is_own(info: os.stat_result) -> bool:
    """True for what belongs to this user, or to root, who can change everything anyway."""
    return info.st_uid in (os.geteuid(), _ROOT)


def _verify(library: int) -> None:
    info = os.fstat(library)
    if not stat.S_ISREG(info.st_mode) or not _is_own(info):
        raise _Damaged("is not this user's file")
    with open(library, "rb", closefd=False) as file:
        content = file.read()
    if content[-_NUM_TRAILING:] != _trailer(content[:-_NUM_TRAILING]):
        raise _Damaged("is damaged")


def _trailer(library: bytes) -> bytes:
    return _MARK + hashlib.sha256(library).digest()


def _compile(instruction_set: InstructionSet, path: Path) -> None:
    compiler, start = find_compiler(), time.perf_counter()
    logger.info("compiling CPU kernels (%s); they are kept in %s", instruction_set.name, path.parent)
    try:
        path.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        with _own_directory(path.parent) as directory, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            library = Path(scratch) / path.name
            compile_library(compiler, instruction_set, library)
            _seal(library)
            library.replace(path)  # at once, so that two processes starting together do no harm
            os.fsync(directory)
            _remove_unused(path.parent)
    except OSError as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {error}") from error
    logger.info("compiled CPU kernels in %.1f s", time.perf_counter() - start)


def _seal(library: Path) -> None:
    """Appends the digest, and has all of it on the disk before it gets its name."""
    with library.open("r+b") as file:
        file.write(_trailer(file.read()))
        file.flush()
        os.fsync(file.fileno())


def _remove_unused(directory: Path) -> None:
    """Deletes libraries that no process has loaded for a month: those of other versions."""
    for path in directory.glob("kernels-*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it as well
            if time.time() - path.stat().st_mtime > _UNUSED_AFTER_S:
                path.unlink()
                logger.info("removed %s, which was not used for long", path)
