"""Each protocol is a folder: without it, its tests and its lines in the one list, all else is as before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path("chairlift/api/protocols.py")
FOLDERS = ("openai", "responses", "anthropic", "rerank")

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


def without(folder: str, target: Path) -> Path:
    """A copy of the package and its tests without a protocol's folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for each in ("chairlift", "tests"):
        shutil.copytree(ROOT / each, target / each, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)
    for each in ("chairlift", "tests"):
        shutil.rmtree(target / each / "api" / folder)
    lines = (ROOT / LIST).read_text().splitlines(keepends=True)
    (target / LIST).write_text(
        "".join(line for line in lines if not re.search(rf"\b{folder}|\b{folder.upper()}", line))
    )
    return target


def run(root: Path, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *args], cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_protocol_can_be_deleted_with_its_tests(folder: str, tmp_path: Path) -> None:
    """The server serves all other endpoints, and the other tests are collected and, where they take no server, pass."""
    root = without(folder, tmp_path)
    served = run(root, "-c", SMOKE).split()
    owned = {"openai": "completions", "responses": "responses", "anthropic": "messages", "rerank": "rerank"}
    assert {name for name, word in owned.items() if any(word in path for path in served)} == set(owned) - {folder}
    others = [f"tests/api/{each}" for each in (*FOLDERS, "answers") if each != folder]
    # The tests of the server itself speak OpenAI's protocol. All are collected, and those that take no server run.
    collected = others if folder == "openai" else ["tests/api"]
    run(
        root,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *collected,
        "-k",
        "test_scores or test_input or test_call_ids",
    )
