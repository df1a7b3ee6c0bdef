"""A wheel that brings compiled kernels serves where there is no compiler."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from chairlift.models.cpu.build import usable_instruction_sets
from tests.support.kernels import needs_kernels
from tests.support.server_process import SERVE, running

REPOSITORY = Path(__file__).parent.parent


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=240)


@pytest.mark.slow
@needs_kernels
def test_a_wheel_with_kernels_serves_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = usable_instruction_sets()[0]
    monkeypatch.setenv("CHAIRLIFT_WHEEL_KERNELS", f"{best} avx2")
    run_pip("wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("chairlift-*-py3-none-manylinux_2_17_*.whl")
    libraries = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert {str(each.parent) for each in libraries} == {"chairlift/models/cpu/libraries"}
    assert {each.name.split("-")[1] for each in libraries} == {best, "avx2"}

    run_pip("install", "--target", str(tmp_path / "site"), str(wheel))
    cache = tmp_path / "cache"
    surroundings: dict[str, Any] = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    with running(SERVE, is_forked=False, **surroundings, CHAIRLIFT_CACHE_DIR=str(cache)) as process:
        client = OpenAI(base_url=f"{process.url}/v1", api_key="none")
        reply = client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0.0
        )
        assert reply.choices[0].message.content == "17 + 25 = 42."
        assert any(f"CPU kernels: {best}" in line for line in process.log)
        assert any(str(tmp_path / "site") in line for line in process.log), "another chairlift is served"
    assert not cache.exists()
