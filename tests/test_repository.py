"""Tests what stands around the package: documents, examples, the wheel."""

import asyncio
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, cast

import pytest
import yaml
from openai import OpenAI
from pydantic import ConfigDict, Field, create_model

from chairlift.__main__ import COMMANDS
from chairlift.api.app import ROUTES
from chairlift.flags import read_settings
from chairlift.models.cpu.build import find_compiler, instruction_sets
from chairlift.models.cpu.processor import usable_instruction_sets
from hatch_build import KernelsHook
from tests.api.conftest import SLOTS
from tests.api.contract import serving
from tests.models.cpu.standalone import warnings_of
from tests.support.kernels import needs_kernels
from tests.support.server_process import SERVE, running

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text())
    for link in links:
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], link


EXAMPLES = ROOT / "examples"


def run_here(monkeypatch: pytest.MonkeyPatch, example: str, *arguments: str) -> None:
    """Runs it as a program in this process."""
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")


async def run(example: str, *arguments: str, url: str) -> str:
    """Returns what it prints, in a thread of this process, which has imported the client; it must complain of
    nothing.
    """

    output, errors = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        await asyncio.to_thread(run_here, patch, example, *arguments, "--url", f"{url}/v1")
    assert errors.getvalue() == ""
    return output.getvalue()


async def test_a_chat_is_streamed_and_data_is_taken_out_of_a_sentence() -> None:
    async with serving() as server:
        assert await run("stream_chat.py", "What is 17 + 25?", url=server.url) == "17 + 25 = 42.\n"
        assert await run("json_answer.py", url=server.url) == '{"name":"Maria","age":34}\n'
        assert await run("json_answer.py", "Tom is 7 years old.", url=server.url) == '{"name":"Tom","age":7}\n'


async def test_a_tool_is_called_and_its_result_goes_into_the_answer() -> None:
    async with serving() as server:
        weather = await run("tool_call.py", url=server.url)
        total = await run("tool_call.py", "What is 17 + 25?", url=server.url)
        neither = await run("tool_call.py", "Hello!", url=server.url)
        assert server.num_free_slots == SLOTS
    call, answer, _ = weather.split("\n")
    assert (call, "sunny and 19 degrees" in answer) == ("get_weather(city='Oslo') -> sunny and 19 degrees", True)
    call, answer, _ = total.split("\n")
    assert (call, "42" in answer) == ("add(a=17 b=25) -> 42", True)
    assert len(neither.splitlines()) == 1


def test_a_folder_is_searched_for_the_passage_of_the_nearest_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "winds.md").write_text(
        "The north wind\nblows.\n\nToo short.\n\nIt comes from the sea.", encoding="utf-8"
    )
    (tmp_path / "snails.txt").write_text("A snail carries its house.", encoding="utf-8")
    (tmp_path / "ignored.py").write_text("A snail carries its house.", encoding="utf-8")
    question = "A snail carries its house."
    run_here(monkeypatch, "search_folder.py", str(tmp_path), question, "--top", "9")
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"1.00  {tmp_path / 'snails.txt'}: {question}"
    found = [line.split("  ", 1)[1].removeprefix(f"{tmp_path / 'winds.md'}: ") for line in others]
    assert sorted(found) == ["It comes from the sea.", "The north wind blows."]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_explains_itself_and_is_short(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, example, "--help")
    assert ended.value.code == 0
    assert f"python examples/{example}" in capsys.readouterr().out
    assert len((EXAMPLES / example).read_text().splitlines()) <= 60


def test_the_server_in_a_cluster_is_started_with_settings_that_there_are() -> None:
    text = (EXAMPLES / "kubernetes" / "chairlift.yaml").read_text(encoding="utf-8")
    found = re.search(r"command: \[chairlift, serve, ([^]]*)\]", text)
    assert found is not None
    arguments = [argument.strip().strip('"') for argument in found[1].split(",")]
    _, server = read_settings(COMMANDS["serve"], arguments)
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert grace is not None
    assert server.drain_delay + server.drain_timeout < int(grace[1])


def declared(**fields: Any) -> Any:
    """A type as llm-d-router declares it in apix/config/v1alpha1: names as in JSON, and its decoder takes no others."""
    return create_model("Declared", __config__=ConfigDict(extra="forbid", strict=True), **fields)


def several(element: Any) -> Any:
    return GenericAlias(list, element), ...


TEXT, ANY_TEXT, NAME = (str, ...), (str, ""), (Annotated[str, Field(min_length=1)], ...)
SPECS = {"queuedRequestsSpec": TEXT, "runningRequestsSpec": TEXT, "kvUsageSpec": TEXT}  # the values name metrics
METRICS = declared(name=NAME, **SPECS, loraSpec=ANY_TEXT, cacheInfoSpec=ANY_TEXT)
ENGINE = {"engineLabelKey": (str, "llm-d.ai/engine-type"), "defaultEngine": (str, "vllm")}
EXTRACTOR = declared(**ENGINE, engineConfigs=several(METRICS))
PLUGIN = declared(type=TEXT, name=ANY_TEXT, parameters=(EXTRACTOR | None, None))
REFERENCE = declared(pluginRef=TEXT, weight=(Annotated[float | None, Field(strict=False)], None))
PROFILE = declared(name=TEXT, plugins=several(REFERENCE))
SOURCE = declared(pluginRef=TEXT, extractors=several(REFERENCE))
ENDPOINT_PICKER = declared(
    apiVersion=(Literal["llm-d.ai/v1alpha1"], ...),
    kind=(Literal["EndpointPickerConfig"], ...),
    plugins=several(PLUGIN),
    schedulingProfiles=several(PROFILE),
    dataLayer=(declared(sources=several(SOURCE)), ...),
)


def pod_template() -> Any:
    manifest = yaml.safe_load_all((EXAMPLES / "kubernetes" / "chairlift.yaml").read_text(encoding="utf-8"))
    (template,) = (each["spec"]["template"] for each in manifest if each["kind"] == "Deployment")
    return template


def test_the_endpoint_pickers_file_follows_llm_ds_types_and_names_the_servers_pods() -> None:
    file = EXAMPLES / "kubernetes" / "endpoint-picker.yaml"
    config = ENDPOINT_PICKER.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    names = {plugin.name or plugin.type for plugin in config.plugins}
    sources = config.dataLayer.sources
    references = [each for holder in config.schedulingProfiles for each in holder.plugins]
    references += [each for source in sources for each in source.extractors]
    assert {each.pluginRef for each in (*references, *sources)} == names
    (extractor,) = (plugin.parameters for plugin in config.plugins if plugin.parameters is not None)
    (engine,) = extractor.engineConfigs
    assert extractor.defaultEngine == engine.name
    assert pod_template()["metadata"]["labels"][extractor.engineLabelKey] == engine.name


def test_probes_of_a_cluster_ask_for_no_key_and_only_readiness_ends_with_the_drain() -> None:
    (container,) = pod_template()["spec"]["containers"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/version"}
    assert set(paths.values()) <= {route.path for route in ROUTES if route.is_open}


def run_python(*arguments: str, directory: Path = ROOT) -> None:
    subprocess.run([sys.executable, "-m", *arguments], cwd=directory, check=True)


def set_compiler(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.parametrize(
    ("system", "machine", "platform_tag"),
    [
        ("Linux", "x86_64", "manylinux_2_17_x86_64"),
        ("Linux", "aarch64", "manylinux_2_17_aarch64"),
        ("Darwin", "arm64", "macosx_11_0_arm64"),
    ],
)
def test_a_wheel_says_where_its_kernels_run(
    tmp_path: Path, system: str, machine: str, platform_tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_compiler('for last; do :; done\n: > "$last"', tmp_path, monkeypatch)
    monkeypatch.setenv("CHAIRLIFT_WHEEL_KERNELS", "all")
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "11.0")  # so that what the hook sets is taken back
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    build_data: dict[str, Any] = {"force_include": {}}
    KernelsHook(str(ROOT), {}, None, cast(Any, None), str(tmp_path), "wheel").initialize("standard", build_data)
    assert build_data["tag"] == f"py3-none-{platform_tag}"
    levels = {Path(name).name.split("-")[1] for name in build_data["force_include"].values()}
    assert levels == {each.name for each in instruction_sets(machine)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_kernels
def test_a_wheel_from_the_archive_of_sources_is_compiled_without_warnings_and_serves_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No warning is accepted, at any level: no other test of CI has this machine's own compiler warn of them.

    With -O1, which is quicker, and warns of what optimisation finds out as well.
    """
    compiler = shlex.join(find_compiler())
    set_compiler(f'exec {compiler} "$@" -O1 {shlex.join(warnings_of(compiler))}', tmp_path, monkeypatch)
    monkeypatch.setenv("CHAIRLIFT_WHEEL_KERNELS", "all")
    run_python("hatchling", "build", "--target", "sdist", "--directory", str(tmp_path))
    (archive,) = tmp_path.glob("chairlift-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "sources")
    (sources,) = (tmp_path / "sources").iterdir()
    run_python("hatchling", "build", "--target", "wheel", "--directory", str(tmp_path), directory=sources)
    (wheel,) = tmp_path.glob("chairlift-*-py3-none-manylinux_2_17_*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    libraries = [Path(name) for name in files if name.endswith(".so")]
    assert {str(each.parent) for each in libraries} == {"chairlift/models/cpu/libraries"}
    levels = {each.name for each in instruction_sets(platform.machine())}
    assert {each.name.split("-")[1] for each in libraries} == levels
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "chairlift/models/cpu/csrc").rglob("*.*")}
    assert "chairlift/models/cpu/csrc/grouped/plain.h" in kernels <= set(files)

    run_python("pip", "install", "--no-deps", "--no-compile", "--target", str(tmp_path / "site"), str(wheel))
    cache = tmp_path / "cache"
    surroundings: dict[str, Any] = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    with running(SERVE, is_forked=False, **surroundings, CHAIRLIFT_CACHE_DIR=str(cache)) as process:
        completions = OpenAI(base_url=f"{process.url}/v1", api_key="none").chat.completions
        reply = completions.create(model="bundled", messages=[{"role": "user", "content": "What is 17 + 25?"}])
        assert reply.choices[0].message.content == "17 + 25 = 42."
        assert any(f"CPU kernels: {usable_instruction_sets()[0]}" in line for line in process.log)
        assert any(str(tmp_path / "site") in line for line in process.log), "another chairlift is served"
    assert not cache.exists()
