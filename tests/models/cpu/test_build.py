"""Compiling the kernels: what is kept where, and in what words it fails."""

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from chairlift import LLM
from chairlift.errors import ConfigurationError
from chairlift.models import cpu
from chairlift.models.cpu import CpuKernelsUnavailable, build, load_library
from chairlift.models.cpu.build import usable_instruction_sets
from tests.support.kernels import needs_kernels

# A compiler that counts its calls, and whose library is one that was compiled before.
COPYING = """#!/bin/sh
echo "$*" >> {calls}
for last; do :; done
cp {library} "$last"
"""


@pytest.fixture(scope="session")
def library() -> str:
    """The file of one that was compiled before."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    load_library()
    (best, *_) = usable_instruction_sets()
    (found,) = (each for each in build.instruction_sets(platform.machine()) if each.name == best)
    return str(build.cache_directory() / build.file_name(found))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that does not exist yet. No library counts as loaded in this process."""
    directory = tmp_path / "cache" / "kernels"
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(directory))
    monkeypatch.delenv("CHAIRLIFT_CPU_LEVEL", raising=False)
    monkeypatch.setattr(build, "load_library", build.load_library.__wrapped__)
    return directory


def load(isa: str | None = None) -> ctypes.CDLL:
    """Past what this process has loaded already."""
    return build.load_library(isa)


def make_compiler(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.fixture
def copying(library: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such a compiler; the file that it notes its calls in."""
    calls = tmp_path / "calls"
    assert not cache.exists()
    make_compiler(tmp_path / "compiler", COPYING.format(calls=calls, library=library), monkeypatch)
    return calls


def refusal(isa: str | None = None) -> str:
    with pytest.raises(CpuKernelsUnavailable) as caught:
        load(isa)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def only_library(cache: Path) -> Path:
    (name,) = names(cache)
    return cache / name


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def num_compiled(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_a_library_is_compiled_once_and_kept_under_its_instruction_set(
    cache: Path, copying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    assert only_library(cache).name.startswith(f"kernels-{usable_instruction_sets()[0]}-")
    load()
    assert num_compiled(copying) == 1
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    load()
    assert len(names(cache)) == 1


def test_a_library_shows_its_c_interface_alone(library: str) -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    command = ["nm", "--dynamic", "--defined-only", library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[-1] for line in lines} == {"chairlift_forward", "chairlift_logits", "chairlift_start"}


def test_every_instruction_set_has_a_library_of_its_own(cache: Path, copying: Path) -> None:
    usable = usable_instruction_sets()
    for isa in usable:
        load(isa)
    assert len(names(cache)) == len(usable) == num_compiled(copying)


@pytest.mark.parametrize(("vendor", "first"), [("GenuineIntel", "avx512_vnni"), ("AuthenticAMD", "avx512_bf16")])
def test_products_of_bf16_are_taken_where_the_vendor_made_them_fast(
    vendor: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = build.instruction_sets("x86_64")
    features = {name: True for each in sets for name in each.features if "amx" not in name}
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(build, "_vendor", lambda: vendor)
    assert usable_instruction_sets()[0] == first
    assert "avx512_bf16" in usable_instruction_sets()


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [
        ("Linux", "x86_64", "this processor has no AVX2"),
        ("Linux", "ppc64le", "the native code is slow on ppc64le processors"),
        ("Darwin", "arm64", "the native code was never run on macOS; attention_backend cpu tries it"),
        (
            "Darwin",
            "x86_64",
            "the native code runs on Linux, not on macOS on Intel; a Linux container or virtual machine has it",
        ),
        (
            "Windows",
            "AMD64",
            "the native code runs on Linux, not on Windows; a Linux container or virtual machine has it",
        ),
    ],
)
def test_it_is_said_why_torch_computes(system: str, machine: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(build, "_sysctl", lambda _: 0)
    assert build.find_drawback() == said


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        ([], ["neon"]),  # of macOS 11, which does not know these names
        (["FEAT_DotProd"], ["neon_dotprod", "neon"]),  # M1
        (["FEAT_DotProd", "FEAT_I8MM", "FEAT_BF16"], ["neon_bf16", "neon_dotprod", "neon"]),  # M2
    ],
)
def test_a_mac_says_what_its_processor_has(
    facts: list[str], levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(build, "_sysctl", lambda name: int(name.removeprefix("hw.optional.arm.") in facts))
    assert usable_instruction_sets() == levels


def test_other_sources_or_flags_make_another_library(
    cache: Path, copying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    before = only_library(cache)
    sources = shutil.copytree(build._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "_SOURCES", sources)
    load()
    assert only_library(cache) == before
    with (sources / "team.h").open("a") as header:
        header.write("// changed\n")
    load()
    assert (len(names(cache)), num_compiled(copying)) == (2, 2)
    monkeypatch.setattr(build, "_COMPILE_FLAGS", (*build._COMPILE_FLAGS, "-DX"))
    load()
    assert (len(names(cache)), num_compiled(copying)) == (3, 3)
    assert copying.read_text().count("-DX") == 1
    assert before.exists()


@pytest.mark.parametrize("compiler", [None, "no-such-compiler", "/no/such/compiler -O3", ""])
def test_without_a_compiler_the_message_says_what_to_install_or_to_set(
    cache: Path, compiler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "")
    wanted = "" if compiler is None else f" {compiler!r}"
    assert refusal() == f"there is no C++ compiler{wanted}; install g++ or clang, or name one in $CXX"
    assert not cache.exists()


@pytest.mark.parametrize("installed", [["c++"], ["c++", "clang++"], ["c++", "clang++", "g++"]])
def test_the_best_compiler_that_is_installed_is_taken(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in installed:
        (tmp_path / name).touch(0o755)
    assert build.find_compiler() == [installed[-1]]


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
def test_what_is_wrong_with_a_compiler_is_in_the_message(
    cache: Path, tmp_path: Path, script: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path / "compiler", script, monkeypatch)
    monkeypatch.setattr(build, "_COMPILE_TIMEOUT", 0.1 if "sleep" in script else 300.0)
    assert refusal() == said.format(compiler=tmp_path / "compiler")
    assert names(cache) == []


def test_a_cache_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_compiler(tmp_path / "compiler", "#!/bin/sh\n", monkeypatch)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CpuKernelsUnavailable, match=r"cannot be kept in .*file/cache: Not a directory"):
        build.load_library.__wrapped__()


def test_the_users_cache_directory_is_taken_if_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_directory() == Path("/somewhere/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert build.cache_directory() == Path("/home/someone/.cache/chairlift")


@pytest.mark.parametrize("damage", ["cut off", "cut off a little", "changed", "empty", "of before", "a link"])
def test_a_library_that_is_damaged_is_compiled_anew_and_not_run(
    cache: Path, copying: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    path = only_library(cache)
    content = path.read_bytes()
    compiled = content.partition(b"chairlift-sha256")[0]
    path.unlink()  # what was loaded stays as it is
    if damage == "a link":
        (tmp_path / "elsewhere.so").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere.so")
    else:
        kept = {
            "cut off": content[:4096],
            "cut off a little": content[:-1],
            "changed": bytes([content[0] ^ 1, *content[1:]]),
            "empty": b"",
            "of before": compiled,
        }
        path.write_bytes(kept[damage])
    load()
    assert num_compiled(copying) == 2
    assert path.read_bytes().startswith(compiled)
    assert f"{path} " in caplog.text
    assert "compiled again" in caplog.text
    load()
    assert num_compiled(copying) == 2


def test_what_a_compiler_made_that_cannot_be_loaded_is_named_with_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path / "compiler", '#!/bin/sh\nfor last; do :; done\necho broken > "$last"\n', monkeypatch)
    message = refusal()
    assert message.startswith(f"{only_library(cache)} cannot be loaded")
    assert message.endswith("delete it to have it compiled again")


def test_the_cache_directory_is_its_owners_alone(cache: Path, copying: Path) -> None:
    load()
    assert mode(cache) == 0o700
    for before in (0o755, 0o711, 0o750):
        cache.chmod(before)
        load()
        assert mode(cache) == 0o700
    assert num_compiled(copying) == 1


@pytest.mark.parametrize("before", [0o777, 0o1777, 0o770, 0o775, 0o722])
def test_a_directory_that_others_can_write_to_is_refused_and_nothing_in_it_is_run(
    cache: Path, library: str, before: int
) -> None:
    cache.mkdir(parents=True)
    planted = cache / Path(library).name
    shutil.copy(library, planted)
    cache.chmod(before)
    assert refusal() == (
        f"compiled kernels cannot be kept in {cache}: other users can write to it; delete it, or name"
        " another in $CHAIRLIFT_CACHE_DIR"
    )
    assert (mode(cache), names(cache)) == (before, [planted.name])


def test_a_directory_of_another_user_is_refused(cache: Path, copying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    owner = cache.stat().st_uid
    monkeypatch.setattr(build, "_ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"compiled kernels cannot be kept in {cache}: it belongs to another user; " in refusal()
    assert num_compiled(copying) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["directory", "library"])
def test_what_another_user_has_planted_is_not_run(cache: Path, copying: Path, what: str) -> None:
    load()
    planted = only_library(cache)
    os.chown(cache if what == "directory" else planted, 12345, -1)
    if what == "directory":
        assert f"compiled kernels cannot be kept in {cache}: it belongs to another user; " in refusal()
        assert num_compiled(copying) == 1
    else:
        load()
        assert (num_compiled(copying), planted.stat().st_uid) == (2, os.geteuid())


def test_a_directory_that_is_a_link_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    assert f"compiled kernels cannot be kept in {cache}: it is a symbolic link; " in refusal()


def test_with_auto_the_log_says_why_it_is_torch(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr(cpu, "load_library", build.load_library)
    with LLM(device="cpu", max_batch_size=1, max_seq_len=64, num_threads=1) as llm:
        assert llm.config.attention_backend == "torch"
    assert f"the attention backend is torch instead of cpu: compiled kernels cannot be kept in {cache}" in caplog.text


def test_libraries_that_were_not_used_for_long_are_removed_with_the_next_that_is_made(
    cache: Path, copying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    used = only_library(cache)
    month_ago = time.time() - 31 * 24 * 3600
    os.utime(used, (month_ago, month_ago))
    load()  # which is a use
    old, recent, other = cache / "kernels-plain-0.so", cache / "kernels-plain-1.so", cache / "notes.txt"
    killed = cache / "compiling-x" / "kernels-plain-2.so"  # of a process that was killed meanwhile
    killed.parent.mkdir()
    for path in (old, recent, other, killed):
        path.touch()
    for path in (old, other, killed.parent):
        os.utime(path, (month_ago, month_ago))
    monkeypatch.setattr(build, "_COMPILE_FLAGS", (*build._COMPILE_FLAGS, "-DX"))
    load()
    assert not old.exists()
    assert not killed.parent.exists()
    assert used.exists()
    assert recent.exists()
    assert other.exists()
    assert num_compiled(copying) == 2


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are(cache: Path) -> None:
    levels = ", ".join(usable_instruction_sets())
    assert refusal("avx9") == f"'avx9' is not a level of this processor, which has {levels}"
    assert not cache.exists()


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_a_mistyped_level_is_an_error_that_names_the_levels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_CPU_LEVEL", "avx9")
    levels = ", ".join(usable_instruction_sets())
    with pytest.raises(ConfigurationError) as caught:
        LLM(device="cpu", max_batch_size=1, max_seq_len=64, attention_backend=backend)
    assert str(caught.value) == f"$CHAIRLIFT_CPU_LEVEL: 'avx9' is not a level of this processor, which has {levels}"


def test_the_environment_names_the_instruction_set(cache: Path, copying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_CPU_LEVEL", "plain")
    load()
    assert copying.exists()
    assert [name.split("-")[1] for name in names(cache)] == ["plain"]


# Waits until both processes compile, then compiles quickly.
MEETING = """#!/bin/sh
: > {meeting}/$$
n=0
while [ $(ls {meeting} | wc -l) -lt 2 ] && [ $n -lt 600 ]; do sleep 0.05; n=$((n + 1)); done
exec g++ "$@" -O0
"""
LOADING = """
from chairlift.models.cpu import load_library
load_library("plain")
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}))
"""


@pytest.mark.slow
@needs_kernels
def test_two_processes_may_compile_at_the_same_time_and_each_has_one_openmp_runtime(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime is torch's: two would take the cores from each other."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    make_compiler(tmp_path / "compiler", MEETING.format(meeting=meeting), monkeypatch)
    processes = [
        subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert len(os.listdir(meeting)) == 2
    (name,) = names(cache)
    assert name.startswith("kernels-plain-")
    for out, _ in results:
        (runtime,) = out.split()
        assert "/torch/lib/" in runtime


def mapped(name: str) -> list[str]:
    """Files of that name whose code this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [path for line in lines if (path := line.split()[-1]).endswith(name)]


def test_the_openmp_runtime_is_found_beside_torch_under_a_name_with_a_digest(
    copying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch's wheels for Arm have it."""
    (torchs,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    own = tmp_path / "torch.libs" / "libgomp-947d5fa1.so.1.0.0"
    own.parent.mkdir()
    shutil.copy(torchs, own)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(build, "_SYSTEM_OPENMP", "no-such-library.so")
    load()
    assert str(own) in mapped(own.name)
    assert "-DCHAIRLIFT_OWN_THREADS" not in copying.read_text()


def test_without_an_openmp_runtime_the_kernels_have_threads_of_their_own(
    cache: Path, copying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(build, "_SYSTEM_OPENMP", "no-such-library.so")
    load()
    shared, own = copying.read_text().splitlines()
    assert "-DCHAIRLIFT_OWN_THREADS" not in shared
    assert "-DCHAIRLIFT_OWN_THREADS" in own
    assert len(names(cache)) == 2
