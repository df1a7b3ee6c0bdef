"""Walls: between keys, against foreign web pages, and against files that somebody else has written."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.models.checkpoint import find_model
from chairlift.models.cpu import CpuKernelsUnavailable, load_library
from tests.attacks.attacker import CHAT, COMPLETIONS, RESPONSES, Attacker, Shot, post
from tests.support.server_process import SERVE, Process, long_stream, run_to_end, running

pytestmark = pytest.mark.timeout(120)

FIRST, SECOND = "first-key", "second-key"
SECRET = "The password of the vault is 7359182640, and nobody else may know it."


# Keys


@pytest.fixture(scope="module")
def two_keys() -> Iterator[Process]:
    with running(SERVE, "--api-key", FIRST, "--api-key", SECOND) as process:
        yield process


def client_of(process: Process, key: str) -> httpx.Client:
    return httpx.Client(base_url=process.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def num_cached(process: Process, key: str, prompt: str, **fields: Any) -> int:
    """Prompt tokens that the reply says were there already."""
    with client_of(process, key) as client:
        usage = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, **fields}).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("name", "fields"), [("plain", {}), ("salted", {"cache_salt": "shared"}), ("users'", {"user": "same"})]
)
def test_no_key_can_tell_what_another_has_sent(two_keys: Process, name: str, fields: dict[str, Any]) -> None:
    prompt = f"{name}: {SECRET}"  # no two cases begin alike
    assert num_cached(two_keys, FIRST, prompt, **fields) == 0
    assert num_cached(two_keys, FIRST, prompt, **fields) > 50
    assert num_cached(two_keys, SECOND, prompt, **fields) == 0
    assert num_cached(two_keys, SECOND, prompt, **fields) > 50


def test_a_prompt_that_is_running_is_not_shared_either(two_keys: Process) -> None:
    prompt = "Once upon a running time. " * 8
    with client_of(two_keys, FIRST) as first:
        body = {**long_stream(1500), "prompt": prompt}
        with first.stream("POST", COMPLETIONS, json=body) as stream:
            next(stream.iter_lines())
            assert num_cached(two_keys, SECOND, prompt) == 0


def test_keys_share_prompts_where_a_setting_says_so() -> None:
    with running(SERVE, "--api-key", FIRST, "--api-key", SECOND, "--share-prefixes") as process:
        assert num_cached(process, FIRST, SECRET) == 0
        assert num_cached(process, SECOND, SECRET) > 50


@pytest.mark.parametrize("priority", [-1, 101, -(2**31 - 1), 2**31 - 1])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_a_priority_beyond_a_keys_range_is_refused_by_name(two_keys: Process, path: str, priority: int) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"input": "a"} if path == RESPONSES else chat("a")
    with client_of(two_keys, FIRST) as client:
        reply = client.post(path, json={**body, "priority": priority})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "priority"


def statuses_beside(attack: Callable[[Attacker], Coroutine[Any, Any, object]], ask: Shot, *flags: str) -> list[int]:
    """What one key is answered, time after time, while another attacks a server of two slots."""

    async def attack_and_ask(attacker: Attacker) -> list[int]:
        attacking = asyncio.ensure_future(attack(attacker))
        await asyncio.sleep(0.5)
        statuses = [(await attacker.fire(ask)).status for _ in range(10)]
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
        return statuses

    with running(SERVE, "--api-key", FIRST, "--api-key", SECOND, "--max-batch-size", "2", *flags) as process:
        return asyncio.run(attack_and_ask(Attacker(process.port)))


def test_a_key_that_floods_leaves_places_for_the_other() -> None:
    flood = post(COMPLETIONS, long_stream(700), headers=bearer(FIRST), leaves_after=10.0)
    ask = post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=bearer(SECOND))
    statuses = statuses_beside(lambda attacker: attacker.fire_at_once([flood] * 59), ask, "--max-queue-size", "8")
    assert statuses == [200] * 10


def test_the_most_urgent_priority_that_a_key_may_use_does_not_starve_the_other() -> None:
    hurried = post(COMPLETIONS, {**long_stream(400), "priority": 0}, headers=bearer(FIRST), leaves_after=20.0)
    ask = post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "priority": 0}, headers=bearer(SECOND))

    async def keep_on(attacker: Attacker) -> None:
        await attacker.fire_at_once(repeat(hurried, 1000), at_most=24)

    assert statuses_beside(keep_on, ask, "--max-queue-size", "64") == [200] * 10


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


# Foreign pages


@pytest.fixture(scope="module")
def keyless() -> Iterator[Process]:
    with running(SERVE, "--allowed-host", "llm.example", "--allowed-origin", "https://app.example") as process:
        yield process


def status_of(process: Process, method: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=20)
    body = b'{"prompt":"a","max_tokens":1}' if method == "POST" else None
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(body or b"")))
    connection.endheaders(body)
    with contextlib.closing(connection):
        return connection.getresponse().status


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=UTF-8", "application/vnd.x+json"])
def test_json_is_taken_however_it_is_written(keyless: Process, kind: str) -> None:
    assert status_of(keyless, "POST", COMPLETIONS, {"Content-Type": kind}) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil.example:8000", "[::1", "", "@"),
        *("192.168.1.5:8000", "[::2]", "a:b:c"),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/watch")])
def test_a_foreign_host_is_refused_without_a_key(keyless: Process, method: str, path: str, host: str) -> None:
    assert status_of(keyless, method, path, {**JSON, "Host": host}) in (400, 403)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "127.0.0.1",
            "[::1]",
            "localhost:80",
            "LocalHost:8000",
            "127.0.0.1:9",
            "127.1.2.3",
            "[::1]:8000",
        ),
        *("llm.example", "LLM.example:8000"),
    ],
)
def test_this_machines_names_and_allowed_ones_are_taken(keyless: Process, host: str) -> None:
    assert status_of(keyless, "POST", COMPLETIONS, {**JSON, "Host": host}) == 200


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "null", "https://app.example.evil.example", "http://app.example"),
        *("http://localhost:3000", "https://localhost:8000", "http://127.0.0.1:8000"),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/watch")])
def test_a_foreign_origin_is_refused_without_a_key(keyless: Process, method: str, path: str, origin: str) -> None:
    assert status_of(keyless, method, path, {**JSON, "Origin": origin}) == 403


def test_the_servers_own_pages_and_allowed_origins_are_taken(keyless: Process) -> None:
    own = {"Host": f"127.0.0.1:{keyless.port}", "Origin": keyless.url}
    assert status_of(keyless, "POST", COMPLETIONS, {**JSON, **own}) == 200
    assert status_of(keyless, "POST", COMPLETIONS, {**JSON, "Origin": "https://app.example"}) == 200


# Files


def library() -> Path:
    """The file of the kernels that this process has loaded, which it may know by a descriptor."""
    try:
        return Path(load_library()._name).resolve()
    except CpuKernelsUnavailable as error:
        pytest.skip(f"there are no kernels here: {error}")


def make_compiler(directory: Path) -> str:
    """One that copies what was compiled before, so that nobody waits for it."""
    script = directory / "compiler"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\nif [ "$1" = -shared ]; then cp '
        + str(library())
        + ' "$last"; else : > "$last"; fi\n'
    )
    script.chmod(0o755)
    return str(script)


def answer_of(process: Process) -> str:
    reply = httpx.post(f"{process.url}{CHAT}", json={**chat("What is 17 + 25?"), "temperature": 0}, timeout=60)
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_library_that_somebody_planted_is_not_executed(tmp_path: Path) -> None:
    planted, marker = tmp_path / "shared", tmp_path / "executed"
    planted.mkdir()
    planted.chmod(0o777)
    source = tmp_path / "evil.c"
    source.write_text(f'#include <stdio.h>\n__attribute__((constructor)) void run() {{ fopen("{marker}", "w"); }}\n')
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no compiler")
    target = planted / library().name
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(target)], check=True, timeout=60)
    compiler = make_compiler(tmp_path)
    # To refuse is fine as well.
    with contextlib.suppress(AssertionError), running(SERVE, CHAIRLIFT_CACHE_DIR=str(planted), CXX=compiler) as process:
        assert answer_of(process) == "17 + 25 = 42."
    assert not marker.exists()


def test_a_folder_that_others_may_write_is_not_used_as_it_is(tmp_path: Path) -> None:
    """Whoever may write it could exchange the library after it was checked. To refuse is fine as well."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shutil.copy(library(), shared)
    shared.chmod(0o777)
    is_used = False
    with contextlib.suppress(AssertionError), running(SERVE, CHAIRLIFT_CACHE_DIR=str(shared)) as process:
        is_used = str(shared) in Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert not is_used or not shared.stat().st_mode & 0o022


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_truncated_library_is_compiled_anew(tmp_path: Path, share: float) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    kept = Path(shutil.copy(library(), own))
    size = kept.stat().st_size
    os.truncate(kept, int(share * size))
    with running(SERVE, CHAIRLIFT_CACHE_DIR=str(own), CXX=make_compiler(tmp_path)) as process:
        assert answer_of(process) == "17 + 25 = 42."
    assert kept.stat().st_size >= size


def copied_checkpoint(directory: Path) -> Path:
    shutil.copytree(find_model("bundled"), directory)
    return directory


def change_json(path: Path, **fields: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **fields}))


SAYS_YES = f"""
import builtins, sys
def agree(question=""):
    sys.stderr.write(question)
    return "y"
builtins.input = agree
{SERVE}
"""


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
        ),
        ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}}),
        ("config.json", {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}),
    ],
    ids=["tokenizer", "unknown kind of model", "model"],
)
def test_a_checkpoints_own_code_does_not_run_whoever_says_yes(
    tmp_path: Path, file: str, fields: dict[str, Any]
) -> None:
    model, marker = copied_checkpoint(tmp_path / "model"), tmp_path / "executed"
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: ...\n")
    change_json(model / file, **fields)
    _, stderr = run_to_end("generate", "What is 17 + 25?", "--model", str(model), script=SAYS_YES)
    assert not marker.exists()
    assert "[y/N]" not in stderr
    assert "Traceback" not in stderr
