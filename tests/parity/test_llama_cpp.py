"""llama.cpp's server as a judge of vectors and scores: the same GGUF files, and the same texts.

It runs where `llama-server` is on the path, or where LLAMA_SERVER names it.
"""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import LLM
from chairlift.errors import CheckpointError
from chairlift.models.smollm2 import find_smollm2
from chairlift.prompt_work import Pooling
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_model
from tests.support.gguf_rerankers import add_small_tokenizer, write_reranker

TEXTS = ["Snails carry their house.", "The wind comes from the north.", "a", "How are random numbers drawn? " * 8]
SERVER = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SERVER is None, reason="there is no llama-server on the path, and LLAMA_SERVER names none"),
]


@contextmanager
def llama_server(file: Path, *flags: str) -> Iterator[str]:
    """Serves a file's vectors or scores; its URL."""
    assert SERVER is not None, "tests are skipped otherwise"
    command = [SERVER, "--model", str(file), *flags, "--host", "127.0.0.1", "--port", "0", "--parallel", "1"]
    command += ["--ctx-size", "1024", "--batch-size", "1024", "--ubatch-size", "1024", "--no-webui"]
    folder = str(Path(SERVER).resolve().parent)  # shared libraries may lie beside it
    libraries = os.environ.get("LD_LIBRARY_PATH")
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{libraries}" if libraries else folder}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None, "it is a pipe"
        log = []
        try:
            for line in run.stdout:
                log.append(line)
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(log[-20:]))
            yield found[1]
        finally:
            run.kill()


def ask(url: str, body: dict[str, Any]) -> Any:
    """The reply of an endpoint."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of Qwen3's family, also as a reranker, and SmolLM2 if it is installed."""
    directory = tmp_path_factory.mktemp("files")
    shape: Any = {"head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    model = make_checkpoint(directory / "made", model_type="qwen3", **shape)
    found = {"qwen3": write_model(model, directory / "qwen3.gguf", tokenizer=add_small_tokenizer)}
    found["reranker"], _ = write_reranker(model, directory / "scores.gguf")
    with suppress(CheckpointError):
        found["smollm2"] = find_smollm2()
    return found


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_vectors_are_those_of_llama_cpp(name: str, pooling: Pooling, files: dict[str, Path]) -> None:
    if name not in files:
        pytest.skip(f"{name} is not installed")
    with LLM(str(files[name]), max_batch_size=4, max_seq_len=512, kv_cache_memory_bytes=2**26) as llm:
        llm.inputs.embedding = replace(llm.inputs.embedding, pooling=pooling)
        ours = np.array([each.embedding for each in llm.embed(TEXTS)])
    with llama_server(files[name], "--embeddings", "--pooling", pooling.value) as url:
        data = ask(f"{url}/v1/embeddings", {"input": TEXTS, "model": "any"})["data"]
    theirs = np.array([each["embedding"] for each in sorted(data, key=lambda each: each["index"])])
    cosines = (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosines.min() >= 0.999, cosines


def test_scores_are_those_of_llama_cpp(files: dict[str, Path]) -> None:
    with LLM(str(files["reranker"]), max_batch_size=4, max_seq_len=1024, kv_cache_memory_bytes=2**26) as llm:
        ours = [each.score for each in llm.score(TEXTS[0], TEXTS)]
    with llama_server(files["reranker"], "--reranking") as url:
        results = ask(f"{url}/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "model": "any"})["results"]
    theirs = {each["index"]: each["relevance_score"] for each in results}
    assert [theirs[index] for index in range(len(TEXTS))] == pytest.approx(ours, abs=1e-3)
