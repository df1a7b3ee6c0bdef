"""Compiling the kernels: what is kept where, and in what words it fails."""

import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from chairlift import LLM
from chairlift.errors import ConfigurationError
from chairlift.models.cpu import CpuKernelsUnavailable, build, load_library, structures
from chairlift.models.cpu.build import (
    CACHE_VARIABLE,
    TOOLCHAIN,
    Toolchain,
    file_name,
    instruction_sets,
    prepare_library,
)
from chairlift.models.cpu.processor import Processor, find_drawback, mac_features, usable_instruction_sets

# A compiler that counts its calls, and whose library is one that was compiled before.
COPYING = """#!/bin/sh
echo "$*" >> {calls}
for last; do :; done
cp {library} "$last"
"""


OTHER_FLAGS = (*TOOLCHAIN.flags, "-DX")
ENTRIES = {"start", "forward", "logits", "write_panels", "unpack_blocks"}
load_anew = load_library.__wrapped__  # which remembers nothing


@dataclass(frozen=True)
class Cache:
    """A directory of libraries, which does not exist at first. None counts as loaded in this process."""

    directory: Path
    around: Path  # a directory of the test's own
    patch: pytest.MonkeyPatch

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    @property
    def library(self) -> Path:
        """The only one."""
        (name,) = self.names
        return self.directory / name

    @property
    def mode(self) -> int:
        return stat.S_IMODE(self.directory.stat().st_mode)

    @property
    def calls(self) -> list[str]:
        """Returns how often the compiler that counts was called."""
        return (self.around / "calls").read_text().splitlines()

    def set_compiler(self, script: str) -> None:
        path = self.around / "compiler"
        path.write_text(script)
        path.chmod(0o755)
        self.patch.setenv("CXX", str(path))

    def refusal(self, isa: str | None = None, toolchain: Toolchain = TOOLCHAIN) -> str:
        with pytest.raises(CpuKernelsUnavailable) as caught:
            load_anew(isa, toolchain)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture(scope="session")
def library() -> Path:
    """The file of one that was compiled before."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    load_library(None)
    (best, *_) = usable_instruction_sets()
    (found,) = (each for each in build.instruction_sets(platform.machine()) if each.name == best)
    return build.cache_directory() / build.file_name(found)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    directory = tmp_path / "cache" / "kernels"
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(directory))
    monkeypatch.delenv("CHAIRLIFT_CPU_LEVEL", raising=False)
    return Cache(directory, tmp_path, monkeypatch)


@pytest.fixture
def copying(library: Path, cache: Cache) -> Cache:
    """With the compiler that counts its calls."""
    cache.set_compiler(COPYING.format(calls=cache.around / "calls", library=library))
    return cache


def test_a_library_is_compiled_once_and_kept_under_its_instruction_set(copying: Cache) -> None:
    load_anew(None)
    assert copying.library.name.startswith(f"kernels-{usable_instruction_sets()[0]}-")
    load_anew(None)
    assert len(copying.calls) == 1
    copying.patch.setenv("CXX", "no-such-compiler")
    copying.patch.setenv("PATH", "")
    load_anew(None)
    assert len(copying.names) == 1


def test_a_library_shows_its_c_interface_alone(library: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    command = ["nm", "--dynamic", "--defined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[-1] for line in lines} == {f"chairlift_{entry}" for entry in ENTRIES}


def test_every_instruction_set_has_a_library_of_its_own_and_the_environment_names_one(copying: Cache) -> None:
    copying.patch.setenv("CHAIRLIFT_CPU_LEVEL", "plain")
    load_anew(None)
    assert copying.library.name.startswith("kernels-plain-")
    usable = usable_instruction_sets()
    for isa in usable:
        load_anew(isa)
    assert len(copying.names) == len(usable) == len(copying.calls)


@pytest.mark.parametrize(("vendor", "first"), [("GenuineIntel", "avx512_vnni"), ("AuthenticAMD", "avx512_bf16")])
def test_bf16_is_used_where_the_vendor_made_it_fast(vendor: str, first: str) -> None:
    sets = build.instruction_sets("x86_64")
    features = frozenset(name for each in sets for name in each.features if "amx" not in name)
    usable = usable_instruction_sets(Processor("Linux", "x86_64", features, vendor))
    assert usable[0] == first
    assert "avx512_bf16" in usable


ELSEWHERE = "the native code runs on Linux, not on {}; a Linux container or virtual machine has it"


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [
        ("Linux", "x86_64", "this processor has no AVX2"),
        ("Linux", "ppc64le", "the native code is slow on ppc64le processors"),
        ("Darwin", "arm64", "the native code is untested on macOS; attention_backend cpu uses it anyway"),
        ("Darwin", "x86_64", ELSEWHERE.format("macOS on Intel")),
        ("Windows", "AMD64", ELSEWHERE.format("Windows")),
    ],
)
def test_it_is_said_why_torch_computes(system: str, machine: str, said: str) -> None:
    features = frozenset({"asimd"} if machine == "arm64" else ())
    assert find_drawback(Processor(system, machine, features)) == said


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        ([], ["neon"]),  # of macOS 11, which does not know these names
        (["FEAT_DotProd"], ["neon_dotprod", "neon"]),  # M1
        (["FEAT_DotProd", "FEAT_I8MM", "FEAT_BF16"], ["neon_bf16", "neon_dotprod", "neon"]),  # M2
    ],
)
def test_a_mac_says_what_its_chip_has(facts: list[str], levels: list[str]) -> None:
    features = mac_features(lambda name: int(name.removeprefix("hw.optional.arm.") in facts))
    assert usable_instruction_sets(Processor("Darwin", "arm64", features)) == levels


def test_other_sources_or_flags_make_another_library(copying: Cache) -> None:
    load_anew(None)
    before = copying.library
    sources = shutil.copytree(TOOLCHAIN.sources, copying.around / "csrc")
    load_anew(None, Toolchain(sources))
    assert copying.library == before
    with (sources / "grouped" / "plain.h").open("a") as header:
        header.write("// changed\n")
    load_anew(None, Toolchain(sources))
    assert (len(copying.names), len(copying.calls)) == (2, 2)
    load_anew(None, Toolchain(sources, OTHER_FLAGS))
    assert (len(copying.names), len(copying.calls)) == (3, 3)
    assert ["-DX" in call for call in copying.calls] == [False, False, True]
    assert before.exists()


@pytest.mark.parametrize("compiler", [None, "no-such-compiler", "/no/such/compiler -O3", ""])
def test_without_a_compiler_the_message_says_what_to_install_or_to_set(cache: Cache, compiler: str | None) -> None:
    cache.patch.delenv("CXX", raising=False)
    if compiler is not None:
        cache.patch.setenv("CXX", compiler)
    cache.patch.setenv("PATH", "")
    wanted = f" {compiler!r}" if compiler else ""
    assert cache.refusal() == f"there is no C++ compiler{wanted}; install g++ or clang, or name one in $CXX"
    assert not cache.directory.exists()


def test_the_best_compiler_that_is_installed_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("c++", "clang++", "g++"):
        (tmp_path / name).touch(0o755)
        assert build.find_compiler() == [name]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            '#!/bin/sh\nfor i in 1 2 3 4 5; do echo "complaint $i" >&2; done\nexit 1\n',
            "compiling CPU kernels failed: complaint 1 / complaint 2 / complaint 3",
        ),
        ("#!/bin/sh\nexit 3\n", "compiling CPU kernels failed: exit status 3"),
        ("no program at all", "compiling CPU kernels failed: [Errno 8] Exec format error: '{compiler}'"),
        ("#!/bin/sh\nexec sleep 60\n", "compiling CPU kernels took more than 0 s"),
    ],
    ids=["complains", "says nothing", "is no program", "hangs"],
)
def test_what_is_wrong_with_a_compiler_is_in_the_message(cache: Cache, script: str, said: str) -> None:
    cache.set_compiler(script)
    toolchain = Toolchain(timeout_s=0.1 if "sleep" in script else 300.0)
    assert cache.refusal(toolchain=toolchain) == said.format(compiler=cache.around / "compiler")
    assert cache.names == []


def test_the_users_cache_directory_is_taken_if_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_directory() == Path("/somewhere/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert build.cache_directory() == Path("/home/someone/.cache/chairlift")


@pytest.mark.parametrize("damage", ["cut off", "cut off a little", "changed", "empty", "of before", "a link"])
def test_a_damaged_library_is_compiled_anew(copying: Cache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    load_anew(None)
    path = copying.library
    content = path.read_bytes()
    compiled = content.partition(b"chairlift-sha256")[0]
    path.unlink()  # what was loaded stays as it is
    if damage == "a link":
        (copying.around / "elsewhere.so").write_bytes(content)
        path.symlink_to(copying.around / "elsewhere.so")
    else:
        cut, changed = {"cut off": content[:4096], "cut off a little": content[:-1]}, bytes([content[0] ^ 1])
        path.write_bytes({**cut, "changed": changed + content[1:], "empty": b"", "of before": compiled}[damage])
    for _ in range(2):
        load_anew(None)
        assert len(copying.calls) == 2
    assert path.read_bytes().startswith(compiled)
    assert f"{path} " in caplog.text
    assert "compiled again" in caplog.text


def test_what_a_compiler_made_that_cannot_be_loaded_is_named_with_what_to_do(cache: Cache) -> None:
    cache.set_compiler('#!/bin/sh\nfor last; do :; done\necho broken > "$last"\n')
    message = cache.refusal()
    assert message.startswith(f"{cache.library} cannot be loaded")
    assert message.endswith("delete it to have it compiled again")


def test_where_the_loader_takes_no_descriptor_a_copy_without_the_digest_is_loaded(cache: Cache, library: Path) -> None:
    """On macOS, where the linker signs a library."""
    cache.directory.mkdir(parents=True)
    kept = Path(shutil.copy(library, cache.directory))
    cache.patch.setattr(platform, "system", lambda: "Darwin")
    loaded = build._load(kept)
    assert structures.start(loaded) is None
    assert Path(loaded._name).name.startswith("compiling-")
    assert cache.library == kept


def test_the_cache_directory_is_its_owners_alone(copying: Cache) -> None:
    load_anew(None)
    assert copying.mode == 0o700
    for before in (0o755, 0o711, 0o750):
        copying.directory.chmod(before)
        load_anew(None)
        assert copying.mode == 0o700
    assert len(copying.calls) == 1


@pytest.mark.parametrize("before", [0o777, 0o1777, 0o770, 0o775, 0o722])
def test_nothing_in_a_directory_that_others_can_write_to_is_run(cache: Cache, library: Path, before: int) -> None:
    cache.directory.mkdir(parents=True)
    shutil.copy(library, cache.directory)
    cache.directory.chmod(before)
    assert cache.refusal() == (
        f"compiled kernels cannot be kept in {cache.directory}: other users can write to it; delete it, or name"
        " another in $CHAIRLIFT_CACHE_DIR"
    )
    assert (cache.mode, cache.library.name) == (before, library.name)


def test_a_directory_of_another_user_is_refused(copying: Cache) -> None:
    load_anew(None)
    owner = copying.directory.stat().st_uid
    copying.patch.setattr(build, "_ROOT", -1)
    copying.patch.setattr(os, "geteuid", lambda: owner + 1)
    said = f"compiled kernels cannot be kept in {copying.directory}: it belongs to another user; "
    assert said in copying.refusal()
    assert len(copying.calls) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_library_that_another_user_has_planted_is_not_run(copying: Cache) -> None:
    load_anew(None)
    os.chown(copying.library, 12345, -1)
    load_anew(None)
    assert (len(copying.calls), copying.library.stat().st_uid) == (2, os.geteuid())


def test_a_directory_that_is_a_link_or_cannot_be_made_is_refused(cache: Cache) -> None:
    cache.set_compiler("#!/bin/sh\n")
    cache.directory.parent.mkdir()
    cache.directory.symlink_to(cache.around)
    assert f"compiled kernels cannot be kept in {cache.directory}: it is a symbolic link; " in cache.refusal()
    (cache.around / "file").write_text("in the way")
    cache.patch.setenv("CHAIRLIFT_CACHE_DIR", str(cache.around / "file" / "cache"))
    said = f"compiled kernels cannot be kept in {cache.around}/file/cache: Not a directory"
    assert cache.refusal().startswith(said)


def test_libraries_that_were_not_used_for_long_are_removed_with_the_next_that_is_made(copying: Cache) -> None:
    load_anew(None)
    used, cache = copying.library, copying.directory
    month_ago = time.time() - 31 * 24 * 3600
    os.utime(used, (month_ago, month_ago))
    load_anew(None)  # which is a use
    old, recent, other = cache / "kernels-plain-0.so", cache / "kernels-plain-1.so", cache / "notes.txt"
    killed = cache / "compiling-x" / "kernels-plain-2.so"  # of a process that was killed meanwhile
    killed.parent.mkdir()
    for path in (old, recent, other, killed):
        path.touch()
    for path in (old, other, killed.parent):
        os.utime(path, (month_ago, month_ago))
    load_anew(None, Toolchain(flags=OTHER_FLAGS))
    assert [path.exists() for path in (old, killed.parent)] == [False, False]
    assert [path.exists() for path in (used, recent, other)] == [True, True, True]
    assert len(copying.calls) == 2


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are(cache: Cache) -> None:
    levels = ", ".join(usable_instruction_sets())
    assert cache.refusal("avx9") == f"'avx9' is not a level of this processor, which has {levels}"
    assert not cache.directory.exists()
    cache.patch.setenv("CHAIRLIFT_CPU_LEVEL", "avx9")
    for backend in ("auto", "cpu", "torch"):
        with pytest.raises(ConfigurationError) as caught:
            LLM(device="cpu", max_batch_size=1, max_seq_len=64, attention_backend=backend)
        assert str(caught.value) == f"$CHAIRLIFT_CPU_LEVEL: 'avx9' is not a level of this processor, which has {levels}"


# Waits until both processes compile; then it is as quick as the other.
MEETING = """#!/bin/sh
: > {meeting}/$$
n=0
while [ $(ls {meeting} | wc -l) -lt 2 ] && [ $n -lt 600 ]; do sleep 0.05; n=$((n + 1)); done
for last; do :; done
cp {library} "$last"
"""
LOADING = """
from chairlift.models.cpu import load_library
load_library("plain")
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}))
"""


@pytest.mark.slow
def test_two_processes_may_compile_at_the_same_time_and_each_has_one_openmp_runtime(
    cache: Cache, library: Path
) -> None:
    """The runtime is torch's: two would take the cores from each other."""
    meeting = cache.around / "meeting"
    meeting.mkdir()
    cache.set_compiler(MEETING.format(meeting=meeting, library=library))
    command, pipe = [sys.executable, "-c", LOADING], subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert len(os.listdir(meeting)) == 2
    assert cache.library.name.startswith("kernels-plain-")
    for out, _ in results:
        (runtime,) = out.split()
        assert "/torch/lib/" in runtime


def test_the_openmp_runtime_is_found_beside_torch_under_a_name_with_a_digest(copying: Cache) -> None:
    """There torch's wheels for Arm have it."""
    (torchs,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    own = copying.around / "torch.libs" / "libgomp-947d5fa1.so.1.0.0"
    own.parent.mkdir()
    shutil.copy(torchs, own)
    load_anew(None, Toolchain(torch=copying.around / "torch", system_openmp="no-such-library.so"))
    assert str(own) in Path("/proc/self/maps").read_text()
    assert not any("-DCHAIRLIFT_OWN_THREADS" in call for call in copying.calls)


def test_without_an_openmp_runtime_the_kernels_have_threads_of_their_own(copying: Cache) -> None:
    load_anew(None)
    load_anew(None, Toolchain(torch=copying.around / "torch", system_openmp="no-such-library.so"))
    assert ["-DCHAIRLIFT_OWN_THREADS" in call for call in copying.calls] == [False, True]
    assert len(copying.names) == 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads an x86 processor's features")
def test_the_processors_features_are_those_that_torch_sees() -> None:
    seen = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    wanted = {feature for each in instruction_sets("x86_64") for feature in each.features}
    assert Processor.here().features & wanted == seen & wanted


def test_a_library_that_was_compiled_ahead_is_the_one_that_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compile_library", lambda _command, _set, path, _toolchain: path.write_bytes(b"made"))
    path = prepare_library(instruction_sets("x86_64")[-1])
    written = path.stat().st_mtime_ns
    assert path == tmp_path / "cache" / file_name(instruction_sets("x86_64")[-1])
    assert prepare_library(instruction_sets("x86_64")[-1]).stat().st_mtime_ns == written
