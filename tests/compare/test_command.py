"""`chairlift compare` from the command line to its files, on models of this process and on a server."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from chairlift.__main__ import main
from chairlift.compare.command import measure
from chairlift.compare.config import CompareConfig
from chairlift.compare.divergence import Whole
from chairlift.compare.own_model import OwnModel
from chairlift.compare.sides import open_side, read_pairs
from chairlift.config import DType
from chairlift.errors import ConfigurationError
from chairlift.models import load_model, open_checkpoint
from chairlift.models.attention import Projections
from tests.support.server_process import SERVE, running

Printed = pytest.CaptureFixture[str]
TEXT = "One, two, three: a text that is long enough for some windows of a model with a token for each byte. " * 4


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def result_of(path: Path) -> dict[str, float]:
    summary = json.loads(path.read_text())["summary"]
    return {name: each["value"] if isinstance(each, dict) else each for name, each in summary.items()}


def test_a_format_beside_its_model(text: Path, tmp_path: Path, capsys: Printed) -> None:
    result = tmp_path / "result.json"
    plot = tmp_path / "plot.png"
    flags = ["--text", str(text), "--context", "64", "--json", str(result), "--plot", str(plot)]
    assert main(["compare", "bundled", "model=bundled,quantization=int4", *flags]) == 0
    printed = capsys.readouterr().out
    summary = result_of(result)
    assert f"{summary['reference_perplexity']:.4f} ± " in printed
    assert 0 < summary["median_divergence"] < summary["mean_divergence"] < summary["max_divergence"]
    assert 0.5 < summary["top_agreement"] < 1
    num_windows = len(TEXT) // 64
    assert summary["num_positions"] == num_windows * 31
    assert len(json.loads(result.read_text())["positions"]["divergence"]) == num_windows * 31
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_distributions_are_those_of_the_torch_model() -> None:
    """Windows, and which of their tokens count, computed once more with the wiring in torch and no engine."""
    side = OwnModel("bundled", {"model": "bundled", "dtype": "float32"}, 64)
    tokens = side.tokenize(TEXT)
    model = load_model(open_checkpoint("bundled"), DType.FLOAT32, "cpu", 64)
    window = torch.tensor(tokens[:64])

    def attend(_: int, new: Projections) -> torch.Tensor:
        assert new.own is not None
        query, key, value = (each.transpose(0, 1)[None] for each in (new.query, *new.own))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1)

    with torch.inference_mode():
        logits = model.logits(model(window, torch.arange(64), attend))
    expected = logits.log_softmax(-1)[32:-1]
    torch.testing.assert_close(side.score(tokens[:64], 32).logprobs, expected, rtol=1e-4, atol=1e-4)
    side.close()


def test_a_server_beside_its_own_model(text: Path, tmp_path: Path, capsys: Printed) -> None:
    result = tmp_path / "result.json"
    with running(SERVE, "--max-seq-len", "128", "--api-key", "secret") as server:
        flags = ["--text", str(text), "--context", "64", "--max-windows", "3", "--json", str(result)]
        assert main(["compare", "bundled", f"url={server.url},api_key=secret", *flags]) == 0
        assert "secret" not in capsys.readouterr().out + result.read_text()
        summary = result_of(result)
        assert summary["num_positions"] == 93
        assert summary["max_divergence"] < 1e-6
        assert summary["top_agreement"] == 1
        assert math.isclose(summary["perplexity_ratio"], 1, rel_tol=1e-6)
        assert main(["compare", "bundled", server.url, *flags]) == 2
        assert "status 401" in capsys.readouterr().err


MODELS = {"data": [{"id": "m"}]}
NEEDED = "; only servers with /tokenize and prompt_logprobs, such as vLLM's and Chairlift's, can be compared"


@pytest.mark.parametrize(
    ("replies", "line"),
    [
        ({}, "answered /v1/models with status 404: no such path"),
        ({"/v1/models": {"models": []}}, "names no model at /v1/models; write url="),
        ({"/v1/models": MODELS}, f"answered /tokenize with status 404: no such path{NEEDED}"),
        # As llama.cpp's server does, which reads another field.
        ({"/v1/models": MODELS, "/tokenize": {"tokens": []}}, f"makes no tokens of a prompt at /tokenize{NEEDED}"),
        (
            {"/v1/models": MODELS, "/tokenize": {"tokens": [5]}, "/v1/completions": {"choices": [{"text": "a"}]}},
            f"tells no log-probabilities of prompts{NEEDED}",
        ),
    ],
)
def test_a_server_that_lacks_what_is_needed_is_refused(replies: dict[str, object], line: str, capsys: Printed) -> None:
    with serving(replies) as url:
        assert main(["compare", "bundled", url]) == 2
    assert f"{url} {line}" in capsys.readouterr().err


@contextmanager
def serving(replies: dict[str, object]) -> Iterator[str]:
    """A server that gives these replies, by path, and yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = replies.get(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(404 if reply is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"no such\npath" if reply is None else json.dumps(reply).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bundled"], "CANDIDATE is missing"),
        (["bundled", "nowhere/at-all/x"], "nowhere/at-all/x"),
        (["bundled", "model=bundled,quantisation=int4"], "model=bundled,quantisation=int4: quantisation: Extra inputs"),
        (["bundled", "model=bundled,max_batch_size=4"], "max_batch_size cannot be set here; leave it out"),
        (["bundled", "model=bundled,int4"], "'int4' is no setting; write name=value,name=value"),
        (["bundled", "model=bundled,model=smollm2"], "model is given twice; leave one of them out"),
        (["bundled", "url=http://127.0.0.1:9,key=x"], "key is no setting of a server; known are url, model, api_key"),
        (["bundled", "bundled", "--text", "/nowhere"], "--text: /nowhere cannot be read"),
        (["bundled", "bundled", "--json", "/nowhere/at/all"], "--json: there is no folder /nowhere/at"),
        (["bundled", "bundled", "--context", "100000"], "max_seq_len 100000 is more than the model's 2048 positions"),
    ],
)
def test_mistakes_are_named(arguments: list[str], line: str, capsys: Printed) -> None:
    assert main(["compare", *arguments]) == 2
    assert line in capsys.readouterr().err


def test_a_short_text_is_refused(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "short.txt").write_text("short")
    assert main(["compare", "bundled", "bundled", "--text", str(tmp_path / "short.txt")]) == 2
    assert "the text has 5 tokens, and a window 512; give a longer text or lower --context" in capsys.readouterr().err


class ScriptedSide:
    """A side whose every distribution is that of its vocabulary's size."""

    def __init__(self, name: str, token_ids: list[int], vocab_size: int) -> None:
        self.name = name
        self._token_ids, self._vocab_size = token_ids, vocab_size

    def tokenize(self, _text: str) -> list[int]:
        return self._token_ids

    def beginning(self) -> int | None:
        return None

    def score(self, token_ids: Sequence[int], first: int) -> Whole:
        uniform = torch.full((len(token_ids) - first - 1, self._vocab_size), -math.log(self._vocab_size))
        return Whole(uniform)

    def close(self) -> None: ...


def test_only_models_with_the_same_tokens_are_compared() -> None:
    config = CompareConfig(reference="a", candidate="b", context=8)
    one = ScriptedSide("one", [0, 1, 2, 3] * 4, 5)
    report = measure(one, ScriptedSide("two", [0, 1, 2, 3] * 4, 5), "", config)
    assert report.summary.reference_perplexity.value == pytest.approx(5)
    assert report.summary.num_positions == 6
    with pytest.raises(ConfigurationError, match="two makes other tokens of the text than one"):
        measure(one, ScriptedSide("two", [0, 1, 2, 4] * 4, 5), "", config)
    with pytest.raises(ConfigurationError, match="the models have 5 and 6 tokens"):
        measure(one, ScriptedSide("two", [0, 1, 2, 3] * 4, 6), "", config)


def test_names_are_not_settings() -> None:
    assert read_pairs("folder/model.gguf") is None
    assert read_pairs("url=http://a:1,model=b") == {"url": "http://a:1", "model": "b"}
    with pytest.raises(ConfigurationError):
        open_side("model=bundled,dtype=int3", CompareConfig(reference="a", candidate="b"))
