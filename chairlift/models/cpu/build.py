"""Finds a library of the kernels: in the package if a wheel brought it, else compiled once and kept.

The processor's features decide at run time which one is used (`library`). There is one library per
instruction set, so that a home directory shared by several machines works, and tests can try every set that the machine
has.

A library is executed, so no other user may be able to write to the cache directory, and a library in it ends with a
digest of its content: one that was truncated or changed is compiled again rather than run.

Building a wheel uses this module, too, without torch, so torch is imported only where it is needed.
"""

import contextlib
import ctypes
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
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "CHAIRLIFT_CACHE_DIR"
COMPILER_VARIABLE = "CXX"

_PACKAGED = Path(__file__).parent / "libraries"  # of a wheel, and trusted like its other code
_ROOT = 0
_MARK = b"chairlift-sha256"  # begins the trailer after the library itself
_NUM_TRAILING = len(_MARK) + hashlib.sha256().digest_size
_SCRATCH = "compiling-"  # begins the names of folders that exist while a compiler runs
_UNUSED_AFTER_S = 30 * 24 * 3600.0
_LINUX = "Linux"

_SOURCES = Path(__file__).parent / "csrc"
_COMPILE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-Wno-psabi"),
    *("-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden"),
)
# Linked to the C library only: a process should have one OpenMP runtime, which is loaded first, and the compiler's own
# libraries may be newer than those of the machine where the kernels run.
_LINK_FLAGS = ("-shared", "-nodefaultlibs")
_COMPILERS = ("g++", "clang++", "c++")


class CpuKernelsUnavailable(Exception):
    """The kernels do not work on this machine; the message says why."""


class _Damaged(Exception):
    """A cached library that must not be loaded; the message says why."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A way to compile: the processor features that it needs, and the compiler's flags."""

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    slow_on: str | None = None  # the vendor whose processors compute faster with the sets that follow


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Holds what the kernels are compiled from, and what they are compiled and run with beside an instruction set."""

    sources: Path = _SOURCES
    flags: tuple[str, ...] = _COMPILE_FLAGS
    timeout_s: float = 300.0
    torch: Path | None = None  # its package, whose OpenMP runtime is used; None: the one that is imported
    system_openmp: str = "libgomp.so.1"  # used if torch has none


TOOLCHAIN = Toolchain()

PLAIN = "plain"  # any processor
_AVX2 = ("avx2", "fma3", "f16c")
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_int8", "amx_bf16")
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
_PLAIN_SET = InstructionSet(PLAIN, (), ())

_BY_MACHINE = {  # the best first
    "x86_64": (
        InstructionSet("amx", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16")),
        # Intel's processors start a vdpbf16ps every second cycle, but two float32 products in each.
        InstructionSet("avx512_bf16", _BF16, _BF16_FLAGS, slow_on="GenuineIntel"),
        InstructionSet("avx512_vnni", _VNNI, _VNNI_FLAGS),
        InstructionSet("avx512", _AVX512, ("-march=x86-64-v4",)),
        InstructionSet("avx2_vnni", (*_AVX2, "avx_vnni"), ("-march=x86-64-v3", "-mavxvnni")),
        InstructionSet("avx2", _AVX2, ("-march=x86-64-v3",)),
        _PLAIN_SET,
    ),
    "aarch64": (  # of macOS as well, which calls it arm64
        InstructionSet("neon_bf16", ("asimd", "asimddp", "i8mm", "bf16"), ("-march=armv8.2-a+dotprod+i8mm+bf16",)),
        InstructionSet("neon_dotprod", ("asimd", "asimddp"), ("-march=armv8.2-a+dotprod",)),
        # Atomics that are chosen at run time are in the compiler's own library.
        InstructionSet("neon", ("asimd",), ("-march=armv8-a", "-mno-outline-atomics")),
    ),
}


def instruction_sets(machine: str) -> tuple[InstructionSet, ...]:
    """Returns the instruction sets of a kind of machine, as `platform.machine` names it; the best first."""
    return _BY_MACHINE.get("aarch64" if machine == "arm64" else machine, (_PLAIN_SET,))


def open_library(instruction_set: InstructionSet, toolchain: Toolchain = TOOLCHAIN) -> ctypes.CDLL:
    """Opens the kernels' library, compiled if that has not been done before. CpuKernelsUnavailable if that fails."""
    if platform.system() == _LINUX and not _load_openmp(toolchain):  # other systems do not use it: see team.h
        instruction_set = replace(instruction_set, flags=(*instruction_set.flags, "-DCHAIRLIFT_OWN_THREADS"))
    name = file_name(instruction_set, toolchain)
    packaged = _PACKAGED / name
    if packaged.is_file():
        return ctypes.CDLL(str(packaged))
    path = cache_directory() / name
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    except _Damaged as error:
        logger.warning("%s %s: it is compiled again", path, error)
    _compile(instruction_set, path, toolchain)
    try:
        return _load(path)
    except (_Damaged, OSError) as error:
        raise CpuKernelsUnavailable(f"{path} was compiled just now and {error}; is something changing it?") from error


def prepare_library(instruction_set: InstructionSet) -> Path:
    """Compiles the kernels' library unless it is there, and returns its path. CpuKernelsUnavailable if that fails.

    It needs no torch, and takes an OpenMP runtime for granted: without one `open_library` compiles another.
    """
    name = file_name(instruction_set)
    if (packaged := _PACKAGED / name).is_file():
        return packaged
    path = cache_directory() / name
    if not path.is_file():
        _compile(instruction_set, path, TOOLCHAIN)
    return path


def _load_openmp(toolchain: Toolchain) -> bool:
    """Loads torch's own, so that both share one thread pool: two would compete for cores. False: there is none."""
    import torch

    package = toolchain.torch or Path(torch.__file__).parent
    # Wheels for Arm have it beside the package, with a digest in its name.
    own = [*package.glob("lib/libgomp*"), *package.with_name("torch.libs").glob("libgomp*")]
    for runtime in (*map(str, own), toolchain.system_openmp):
        with contextlib.suppress(OSError):
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # where the kernels' unresolved symbols are looked up
            return True
    logger.info("there is no OpenMP runtime: the kernels make threads of their own")
    return False


def _load(path: Path) -> ctypes.CDLL:
    """FileNotFoundError if it is not there. Loads the very file that was checked, even if its name was taken over."""
    with _own_directory(path.parent) as directory:
        try:
            library = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise _Damaged(f"cannot be opened ({error.strerror})") from error
    try:
        content = _verify(library)
        with contextlib.suppress(OSError):  # a cache that cannot be written to works, too
            os.utime(library)  # it is in use: see `_remove_unused`
        # Not closed: for a name that it has seen, the loader returns the library that it loaded then.
        if platform.system() == _LINUX:
            return ctypes.CDLL(f"/proc/self/fd/{library}")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_SCRATCH) as own:  # macOS: as the linker signed it
            own.write(content)
            own.flush()
            return ctypes.CDLL(own.name)
    except (OSError, _Damaged) as error:
        os.close(library)
        if isinstance(error, _Damaged):
            raise
        message = f"{path} cannot be loaded ({error}); delete it to have it compiled again"
        raise CpuKernelsUnavailable(message) from error


def cache_directory() -> Path:
    """$CHAIRLIFT_CACHE_DIR, or `chairlift` in the user's cache directory. CpuKernelsUnavailable if there is no home."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"
    except RuntimeError as error:
        raise CpuKernelsUnavailable(f"there is no place for kernels ({error}); set ${CACHE_VARIABLE}") from error


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
            raise CpuKernelsUnavailable(refusal % "other users can write to it")
        if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and info.st_uid == os.geteuid():
            os.fchmod(directory, stat.S_IRWXU)
        yield directory
    finally:
        os.close(directory)


def _is_own(info: os.stat_result) -> bool:
    """True for what belongs to this user, or to root, who can change everything anyway."""
    return info.st_uid in (os.geteuid(), _ROOT)


def _verify(library: int) -> bytes:
    """The content before the digest."""
    info = os.fstat(library)
    if not stat.S_ISREG(info.st_mode) or not _is_own(info):
        raise _Damaged("is not this user's file")
    with open(library, "rb", closefd=False) as file:
        content = file.read()
    if content[-_NUM_TRAILING:] != _trailer(content[:-_NUM_TRAILING]):
        raise _Damaged("is damaged")
    return content[:-_NUM_TRAILING]


def _trailer(library: bytes) -> bytes:
    return _MARK + hashlib.sha256(library).digest()


def _compile(instruction_set: InstructionSet, path: Path, toolchain: Toolchain) -> None:
    compiler, home, start = find_compiler(), path.parent, time.perf_counter()
    logger.info("compiling CPU kernels (%s); they are kept in %s", instruction_set.name, home)
    try:
        home.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        with _own_directory(home) as directory, tempfile.TemporaryDirectory("", _SCRATCH, home) as scratch:
            library = Path(scratch) / path.name
            compile_library(compiler, instruction_set, library, toolchain)
            _seal(library)
            library.replace(path)  # atomically, so that two processes starting together do no harm
            os.fsync(directory)
            _remove_unused(home)
    except OSError as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {error}") from error
    logger.info("compiled CPU kernels in %.1f s", time.perf_counter() - start)


def _seal(library: Path) -> None:
    """Appends the digest, and syncs the file to the disk before it gets its name."""
    with library.open("r+b") as file:
        file.write(_trailer(file.read()))
        file.flush()
        os.fsync(file.fileno())


def _remove_unused(directory: Path) -> None:
    """Deletes libraries that no process has loaded for a month (of other versions), and folders of killed processes."""
    for path in (*directory.glob("kernels-*.so"), *directory.glob(f"{_SCRATCH}*")):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if time.time() - path.stat().st_mtime > _UNUSED_AFTER_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                logger.info("removed %s, which was not used for long", path)


def file_name(instruction_set: InstructionSet, toolchain: Toolchain = TOOLCHAIN) -> str:
    """The library's name: a digest of everything it depends on except the compiler."""
    flags = (instruction_set, toolchain.flags, _LINK_FLAGS, platform.machine())
    digest = hashlib.sha256(repr(flags).encode())
    for source in sorted(toolchain.sources.rglob("*.*")):
        digest.update(source.read_bytes())
    return f"kernels-{instruction_set.name}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str]:
    """The command, as a list: $CXX, or else the first that is installed. CpuKernelsUnavailable if it is not there."""
    advice = f"install g++ or clang, or name one in ${COMPILER_VARIABLE}"
    own = os.environ.get(COMPILER_VARIABLE, next(filter(shutil.which, _COMPILERS), ""))
    try:
        command = shlex.split(own)
    except ValueError as error:
        raise CpuKernelsUnavailable(f"${COMPILER_VARIABLE} is not a command: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise CpuKernelsUnavailable(f"there is no C++ compiler{f' {own!r}' if own else ''}; {advice}")
    return command


def compile_library(
    compiler: list[str], instruction_set: InstructionSet, path: Path, toolchain: Toolchain = TOOLCHAIN
) -> None:
    """Writes the library. CpuKernelsUnavailable if that fails. `compiler`: see `find_compiler`."""
    flags = (*_LINK_FLAGS, *toolchain.flags, *instruction_set.flags)
    command = [*compiler, *flags, str(toolchain.sources / "decoder.cpp"), "-lc", "-o", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=toolchain.timeout_s, check=False)
    except OSError as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels took more than {toolchain.timeout_s:.0f} s") from error
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {' / '.join(complaint[:3])}")
