"""llama.cpp's `llama-server`: token ids go to /completion, all requests of a workload at the same time.

The server, and not `llama-batched-bench`: only the server is given the same token ids, samples, and has a time to the
first token; it was seen within a few percent of what batched-bench's two rates come to. Options: `binary`, its path;
`gguf`, its model; `ubatch`, its physical batch; `spec_type`, how it guesses tokens (none unless given); `repack=off`
keeps weights from being rearranged for the CPU, without which its AMX code crashes on q8_0 (llama.cpp's issue 20824,
seen with 0.5.0). Any Python runs this: the standard library is enough.
"""

import http.client
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peers.keeper import free_port, wait_until_healthy
from peers.workers.protocol import Generate, Session, Settings, serve

_BATCH_TOKENS = 2048
_REQUEST_LIMIT_S = 3600.0


def load(session: Session) -> Generate:
    """Starts the server with a slot for each request of the largest workload, and waits until it is healthy."""
    settings = session.settings
    environment = environment_of(settings.options["binary"])
    session.imported(llama_cpp=version_of(settings.options["binary"], environment))
    port = free_port()
    command = command_of(settings, port)
    session.about["command"] = command
    server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    wait_until_healthy(server, port)
    pool = ThreadPoolExecutor(settings.max_requests)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        return list(pool.map(lambda ids: _complete(port, ids, num_tokens), prompts))

    return generate


def command_of(settings: Settings, port: int) -> list[str]:
    """Makes the command that serves a model.

    It has threads on all cores, flash attention, no prompt cache, and a context that is split evenly over the slots.
    """
    slot_tokens = -(-settings.max_tokens // 256) * 256
    threads = str(settings.num_threads)
    return [
        settings.options["binary"],
        *("--model", settings.options["gguf"], "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on"),
        *("--parallel", str(settings.max_requests), "--ctx-size", str(slot_tokens * settings.max_requests)),
        *("--batch-size", str(_BATCH_TOKENS), "--ubatch-size", settings.options.get("ubatch", "512")),
        *("--no-kv-unified", "--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0"),
        *("--spec-type", settings.options.get("spec_type", "none")),
        *(["--no-repack"] if settings.options.get("repack") == "off" else []),
        *("--no-webui", "--threads-http", str(settings.max_requests + 2), "--log-verbosity", "1"),
    ]


def _complete(port: int, ids: list[int], num_tokens: int) -> int:
    body = {
        "prompt": ids,
        "n_predict": num_tokens,
        "samplers": ["top_k"],  # the quickest way to the likeliest token: a temperature of 0 takes twice a step's time
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_LIMIT_S)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"llama-server answered {response.status}: {answer}")
    if answer["tokens_evaluated"] != len(ids):
        raise RuntimeError(f"llama-server took {answer['tokens_evaluated']} prompt tokens for {len(ids)}")
    return len(answer["tokens"])


def environment_of(binary: str) -> dict[str, str]:
    """Its shared libraries may lie beside it, wherever it was built."""
    folders = [str(Path(binary).resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, folders))}


def version_of(binary: str, environment: dict[str, str]) -> str:
    """Asks the program for its version."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, env=environment)
    found = re.search(r"version: (.*)", done.stdout + done.stderr)
    return found.group(1) if found else "unknown"


if __name__ == "__main__":
    serve(load)
