"""The benchmarks of speculation: with random weights of a tiny shape, and with a server that says it is llama.cpp's."""

import sys
from pathlib import Path

import pytest
import shapes
import speculation
import speculation_peers

from chairlift.loadtest.workload import WORDS
from tests.support.kernels import needs_kernels

from .fakes import FIELDS, RunScript


@needs_kernels
@pytest.mark.parametrize("number_format", ["bfloat16", "int8", "int4"])
def test_random_weights_answer_as_predicted(
    number_format: str, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = FIELDS | {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 2 * len(WORDS)}
    monkeypatch.setitem(shapes.SHAPES, "tiny", fields)
    small = ["--shape", "tiny", "--rows", "2", "--rounds", "1", "--tokens", "40", "--guessed", "8"]
    ran = run_script(speculation, *small, "--kinds", "prediction", "free", "--format", number_format)
    predicted, free = ran.report["figures"]
    assert predicted["accepted"] >= 60
    assert predicted["rejected"] == 0
    assert free["accepted"] <= 4  # tokens are random


FAKE_SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({{"usage": {{"completion_tokens": body["max_tokens"]}}}})

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_two_servers_of_llama_cpp_take_turns(tmp_path: Path, run_script: RunScript) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text(FAKE_SERVER)
    binary.chmod(0o700)
    ran = run_script(speculation_peers, str(binary), "model.gguf", "--rows", "2", "--kinds", "copy", "--rounds", "1")
    (figures,) = ran.report["figures"]
    assert (figures["kind"], figures["rows"], len(figures["seconds"])) == ("copy", 2, 1)
    ((without, guessing),) = figures["seconds"]
    assert figures["ratio"] == round(without / guessing, 3)
