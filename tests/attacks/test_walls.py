"""Walls: between keys, against foreign web pages, and against files that somebody else has written."""

import asyncio
import contextlib
import http.client
import json
import shutil
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.models.checkpoint import find_model
from tests.attacks.attacker import CHAT, COMPLETIONS, RESPONSES, Attacker, post
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
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        (RESPONSES, {"input": "a"}),
    ],
)
def test_a_priority_beyond_a_keys_range_is_refused_by_name(
    two_keys: Process, path: str, body: dict[str, Any], priority: int
) -> None:
    with client_of(two_keys, FIRST) as client:
        reply = client.post(path, json={**body, "priority": priority})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "priority"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "at_most", "num_tokens", "fields", "max_queue_size"),
    [(59, 1000, 400, {}, 8), (1000, 24, 150, {"priority": 0}, 64)],
    ids=["all at once", "on and on, with the most urgent priority that it may use"],
)
async def test_a_key_that_floods_leaves_places_for_the_other(
    number: int, at_most: int, num_tokens: int, fields: dict[str, int], max_queue_size: int
) -> None:
    first, second = ({"Authorization": f"Bearer {key}"} for key in (FIRST, SECOND))
    flood = post(COMPLETIONS, {**long_stream(num_tokens), **fields}, headers=first, leaves_after=20.0)
    ask = post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields}, headers=second)
    flags = ("--max-batch-size", "2", "--max-queue-size", str(max_queue_size))
    with running(SERVE, "--api-key", FIRST, "--api-key", SECOND, *flags) as process:
        attacker = Attacker(process.port)
        attacking = asyncio.ensure_future(attacker.fire_at_once(repeat(flood, number), at_most))
        await asyncio.sleep(0.5)
        assert [(await attacker.fire(ask)).status for _ in range(4)] == [200] * 4
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)


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
FOREIGN_HOSTS = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil.example:8000", "[::1"]
FOREIGN_HOSTS += ["", "@", "192.168.1.5:8000", "[::2]", "a:b:c"]
OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]", "localhost:80", "LocalHost:8000", "127.0.0.1:9", "127.1.2.3"]
OWN_HOSTS += ["[::1]:8000", "llm.example", "LLM.example:8000"]
FOREIGN_PAGES = ["http://evil.example", "null", "https://app.example.evil.example", "http://app.example"]
FOREIGN_PAGES += ["http://localhost:3000", "https://localhost:8000", "http://127.0.0.1:8000"]


@pytest.mark.parametrize(
    ("header", "value", "statuses"),
    [
        *(("Host", host, {400, 403}) for host in FOREIGN_HOSTS),
        *(("Host", host, {200}) for host in OWN_HOSTS),
        *(("Origin", page, {403}) for page in FOREIGN_PAGES),
        ("Origin", "https://app.example", {200}),
    ],
)
def test_without_a_key_only_this_machines_and_allowed_names_and_pages_are_served(
    keyless: Process, header: str, value: str, statuses: set[int]
) -> None:
    for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/watch")):
        assert status_of(keyless, method, path, {**JSON, header: value}) in statuses


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=UTF-8", "application/vnd.x+json"])
def test_its_own_page_is_served_and_json_is_taken_however_it_is_written(keyless: Process, kind: str) -> None:
    own = {"Host": f"127.0.0.1:{keyless.port}", "Origin": keyless.url}
    assert status_of(keyless, "POST", COMPLETIONS, {"Content-Type": kind, **own}) == 200


# Checkpoints with code of their own. Their tokenizers: tests/engine/test_special_tokens.py


SAYS_YES = f"""
import builtins, sys
def agree(question=""):
    sys.stderr.write(question)
    return "y"
builtins.input = agree
{SERVE}
"""


@pytest.mark.parametrize("kind", [{"model_type": "evil"}, {}], ids=["unknown kind of model", "known kind of model"])
def test_a_checkpoints_own_code_does_not_run_whoever_says_yes(tmp_path: Path, kind: dict[str, str]) -> None:
    model, marker = tmp_path / "model", tmp_path / "executed"
    shutil.copytree(find_model("bundled"), model)
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: ...\n")
    config = json.loads((model / "config.json").read_text())
    own_code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")
    (model / "config.json").write_text(json.dumps({**config, **kind, "auto_map": own_code}))
    _, stderr = run_to_end("generate", "What is 17 + 25?", "--model", str(model), script=SAYS_YES)
    assert not marker.exists()
    assert "[y/N]" not in stderr
    assert "Traceback" not in stderr
