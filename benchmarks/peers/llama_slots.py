"""llama.cpp's server, whose slot is saved to a file and restored by hand, as its clients do around a restart.

The server reads token ids, and its slot is the same one each time, as there is only one.
"""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.keeper import free_port, wait_until_healthy
from peers.workers.llama_cpp_worker import environment_of

_FILE = "slot.bin"
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """Says how the server is started."""

    binary: str
    gguf: Path
    directory: Path  # of its file
    num_threads: int
    num_tokens: int  # of a slot

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves the model, and stops it by SIGTERM; its URL."""
        port, threads = free_port(), str(self.num_threads)
        command = [
            *(self.binary, "--model", str(self.gguf), "--host", "127.0.0.1", "--port", str(port)),
            *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--parallel", "1"),
            *("--ctx-size", str(-(-self.num_tokens // 256) * 256), "--batch-size", "2048", "--ubatch-size", "512"),
            *("--cache-ram", "0", "--slot-save-path", f"{self.directory}/", "--no-webui", "--log-verbosity", "1"),
        ]
        with subprocess.Popen(command, env=environment_of(self.binary), stdin=subprocess.DEVNULL) as process:
            try:
                wait_until_healthy(process, port)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(_STOP_S)


@dataclass(frozen=True, slots=True)
class LlamaReply:
    """An answer: when its first token came, and how many tokens of the prompt were cached."""

    first_token_s: float
    num_cached: int


def measure(server: LlamaServer, prompt: list[int], num_answered: int) -> dict[str, Any]:
    """Asks, saves, restarts, restores and asks again. Seconds and bytes."""
    with server.running() as url:
        cold, memory = (_ask(url, prompt, num_answered) for _ in range(2))
        saved_s, saved = _turn_to_file(url, "save")
    begin = time.perf_counter()
    with server.running() as url:
        start_s = time.perf_counter() - begin
        restored_s, restored = _turn_to_file(url, "restore")
        disk = _ask(url, prompt, num_answered)
    assert restored["n_restored"] == saved["n_saved"], "the file has what was saved"
    return {
        "start_s": start_s,
        "cold": asdict(cold),
        "memory": asdict(memory),
        "disk": asdict(disk),
        "save_s": saved_s,
        "restore_s": restored_s,
        "num_bytes": saved["n_written"],
    }


def _ask(url: str, prompt: list[int], num_answered: int) -> LlamaReply:
    """Streams an answer of the likeliest tokens."""
    body = {"prompt": prompt, "n_predict": num_answered, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
    begin, first_token_s, last = time.perf_counter(), 0.0, dict[str, Any]()
    with _post(f"{url}/completion", body | {"cache_prompt": True, "stream": True, "id_slot": 0}) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                first_token_s = first_token_s or time.perf_counter() - begin
                last = json.loads(line[len(b"data: ") :])
    return LlamaReply(first_token_s, last["timings"]["cache_n"])


def _turn_to_file(url: str, action: str) -> tuple[float, dict[str, Any]]:
    """Saves or restores the slot; the seconds that it took, and what the server says of it."""
    begin = time.perf_counter()
    with _post(f"{url}/slots/0?action={action}", {"filename": _FILE}) as reply:
        return time.perf_counter() - begin, json.load(reply)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request)
