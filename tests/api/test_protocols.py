"""Each protocol is a folder: without it, its tests and its lines in the one list, all else is as before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.without_protocol import FOLDERS, VARIABLE, remove, words_of

SLOW = ("api_workers", "faults", "process", "slow_reader", "timeouts", "waiting")
SMOKE = """
import asyncio, sys, tempfile
import aiohttp
from chairlift.api import ServerConfig
from tests.api.conftest import serving

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"input": "Hi"},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), {"query": "Hi", "documents": ["Ho"]}),
    **dict.fromkeys(("/v1/score", "/score"), {"text_1": "Hi", "text_2": "Ho"}),
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/reset_prefix_cache": {},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
REFUSED = {("post", "/v1/files"): 415, ("post", "/v1/batches"): 400}  # without a form, and without its file

async def smoke():
    config = ServerConfig(batch_dir=tempfile.mkdtemp())
    async with serving(config) as server, aiohttp.ClientSession(server.url) as http:
        async with http.get("/openapi.json") as response:
            paths = (await response.json())["paths"]
        assert not set(paths).isdisjoint(BODIES)
        for path, operations in paths.items():
            for method in operations:
                url = path.replace("{model}", "bundled").replace("{id}", "x")
                async with http.request(method, url, json=BODIES.get(path)) as response:
                    expected = 404 if "{id}" in path else REFUSED.get((method, path), 200)
                    assert response.status == expected, (path, await response.text())
                if path in BODIES and "stream" in str(operations):
                    async with http.post(path, json={**BODIES[path], "stream": True}) as response:
                        assert response.status == 200 and "event: error" not in await response.text(), path
    print(*sorted(paths))

asyncio.run(smoke())
"""


def run(root: Path, *args: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root), **variables}
    done = subprocess.run(
        [sys.executable, *args], cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_protocol_can_be_deleted_with_its_tests(folder: str, tmp_path: Path) -> None:
    """The server serves all other endpoints, and the tests of the API pass, but for those that speak the protocol.

    All of them run without OpenAI's, on which most depend; without another, the others' are imported, to save time.

    Not run again are tests of readers of answers, which no protocol has a part in, and those that are slow because they
    start processes or wait for clocks. Most tests of the server itself speak OpenAI's protocol, so fewer are left
    without it: those of the other protocols, and those of no protocol.
    """
    root = remove(folder, tmp_path)
    served = run(root, "-c", SMOKE).split()
    owned = {"openai": "completions", "responses": "responses", "anthropic": "messages", "rerank": "rerank"}
    assert {name for name, word in owned.items() if any(word in path for path in served)} == set(owned) - {folder}
    run(root, "tools/write_api_reference.py")
    left_out = [f"--ignore=tests/api/{each}" for each in ("answers", *(f"test_{name}.py" for name in SLOW))]
    plugins = ["-p", "no:cacheprovider", "-p", "tests.api.without_protocol"]
    words = {VARIABLE: words_of(folder)}
    way = [] if folder == "openai" else ["--collect-only"]
    done = run(root, "-m", "pytest", "-q", *plugins, *left_out, "-m", "not slow", *way, "tests/api", **words)
    num_tests = re.search(r"(\d+)(?:/\d+)? (?:passed|tests collected)", done)
    assert num_tests is not None
    assert int(num_tests[1]) > 300
