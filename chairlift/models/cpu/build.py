"""Compiles `csrc/` for this machine, once: the library is kept in the user's cache directory.

The processor's features decide at run time which instructions are used. There is one library per instruction set, so
that a home directory shared by several machines works, and tests can try every set that the machine has.

A library is executed, so no other user may be able to write to the directory, and a library ends with a digest of all
that is before it: one that was cut off or changed is compiled again rather than run.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from chairlift.models.user_cache import CACHE_VARIABLE, CacheUnusable, cache_directory, is_own, own_directory

logger = logging.getLogger(__name__)

ISA_VARIABLE = "CHAIRLIFT_CPU_ISA"
COMPILER_VARIABLE = "CXX"

_SOURCES = Path(__file__).parent / "csrc"
_COMPILE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi")
_COMPILE_TIMEOUT = 300.0
_MARK = b"chairlift-sha256"  # begins what is behind the library itself
_NUM_TRAILING = len(_MARK) + hashlib.sha256().digest_size
_UNUSED_AFTER_S = 30 * 24 * 3600.0


class CpuKernelsUnavailable(Exception):
    """The kernels do not work on this machine; the message says why."""


class _Damaged(Exception):
    """A cached library that must not be loaded; the message says why."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A way to compile: the processor features it takes, as torch names them, and the compiler's flags."""

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16", "avx512_vnni")
_AMX = ("amx_tile", "amx_bf16")
_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")

INSTRUCTION_SETS = (  # the best first
    InstructionSet("amx", (*_AVX512, *_AMX), (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16")),
    InstructionSet("avx512_bf16", _AVX512, _AVX512_FLAGS),
    InstructionSet("avx512", _AVX512[:4], ("-march=x86-64-v4",)),
    InstructionSet("avx2", ("avx2", "fma3", "f16c"), ("-march=x86-64-v3",)),
    InstructionSet("plain", (), ()),
)
_FAST = ("amx", "avx512_bf16", "avx512")


@functools.cache
def load_library(isa: str | None = None) -> ctypes.CDLL:
    """The compiled kernels, of the best instruction set this machine has or the one named.

    CpuKernelsUnavailable if there is no compiler, if compiling fails, or if this machine lacks the named set.
    """
    wanted = isa or os.environ.get(ISA_VARIABLE)
    usable = usable_instruction_sets()
    if not usable:
        raise CpuKernelsUnavailable(f"the kernels are made for Linux, not {platform.system()}")
    if wanted is not None and wanted not in usable:
        source = "" if isa else f"{ISA_VARIABLE} "
        raise CpuKernelsUnavailable(f"{source}{wanted!r} is not one that this processor has: {', '.join(usable)}")
    for instruction_set in INSTRUCTION_SETS:
        if instruction_set.name == wanted or (wanted is None and instruction_set.name in usable):
            library = _open(instruction_set)
            if library.chairlift_start() == 0:
                logger.info("CPU kernels: %s", instruction_set.name)
                return library
            logger.warning("the system does not let this process use %s", instruction_set.name)
    raise CpuKernelsUnavailable(f"the system does not let this process use {wanted}")


def usable_instruction_sets() -> list[str]:
    """Names of the sets whose features this processor has, the best first."""
    if platform.system() != "Linux":
        return []
    features = torch.cpu.get_capabilities()
    return [s.name for s in INSTRUCTION_SETS if all(features.get(feature) for feature in s.features)]


def are_kernels_fast() -> bool:
    """True if this processor has AVX-512: without it torch's own kernels are faster."""
    return any(name in _FAST for name in usable_instruction_sets())


def _open(instruction_set: InstructionSet) -> ctypes.CDLL:
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


def _library_path(instruction_set: InstructionSet) -> Path:
    try:
        return cache_directory() / f"kernels-{instruction_set.name}-{_fingerprint(instruction_set)}.so"
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


@contextlib.contextmanager
def _own_directory(path: Path) -> Iterator[int]:
    """The cache directory, if no other user can write to it. FileNotFoundError if there is none."""
    try:
        with own_directory(path) as directory:
            yield directory
    except CacheUnusable as error:
        raise CpuKernelsUnavailable(f"compiled kernels cannot be kept in {error}") from error


def _verify(library: int) -> None:
    info = os.fstat(library)
    if not stat.S_ISREG(info.st_mode) or not is_own(info):
        raise _Damaged("is not this user's file")
    with open(library, "rb", closefd=False) as file:
        content = file.read()
    if content[-_NUM_TRAILING:] != _trailer(content[:-_NUM_TRAILING]):
        raise _Damaged("is damaged")


def _trailer(library: bytes) -> bytes:
    return _MARK + hashlib.sha256(library).digest()


def _fingerprint(instruction_set: InstructionSet) -> str:
    """Of everything that the library depends on but the compiler: a machine without one may use what is there."""
    digest = hashlib.sha256(repr((instruction_set, _COMPILE_FLAGS, _openmp_library(), platform.machine())).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(instruction_set: InstructionSet, path: Path) -> None:
    compiler = _find_compiler()
    start = time.perf_counter()
    logger.info("compiling CPU kernels (%s); they are kept in %s", instruction_set.name, path.parent)
    try:
        path.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        with _own_directory(path.parent) as directory, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            objects, library = Path(scratch) / "decoder.o", Path(scratch) / path.name
            source = str(_SOURCES / "decoder.cpp")
            _run([*compiler, *_COMPILE_FLAGS, *instruction_set.flags, "-c", source, "-o", str(objects)])
            _run([*compiler, "-shared", str(objects), *_openmp_library(), "-o", str(library)])
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


def _find_compiler() -> list[str]:
    try:
        command = shlex.split(os.environ.get(COMPILER_VARIABLE, "g++"))
    except ValueError as error:
        raise CpuKernelsUnavailable(f"${COMPILER_VARIABLE} is not a command: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise CpuKernelsUnavailable(
            f"there is no C++ compiler {' '.join(command)!r}; install g++, or name one in ${COMPILER_VARIABLE}"
        )
    return command


def _openmp_library() -> tuple[str, ...]:
    """Torch's own OpenMP runtime, so that both have one pool of threads: two would take the cores from each other."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return (str(own[0]),) if own else ("-lgomp",)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels took more than {_COMPILE_TIMEOUT:.0f} s") from error
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {' / '.join(complaint[:3])}")
