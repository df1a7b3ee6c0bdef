"""The evaluation with guidellm: what it is asked for, what is read of its report, and the files that servers share."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from evaluation import LOADS, SLACK, Cell, Client, Figures, Play, measure, without_reuse
from gguf import GGUFReader
from peers import write_gguf
from peers.engines import Engine
from peers.server import Host, server_command
from shapes import MAX_POSITIONS

from tests.support.checkpoints import make_checkpoint

from .conftest import SETTINGS

PROGRAM = """#!/usr/bin/env python3
import json, sys
path = sys.argv[-1].partition("path=")[2]
json.dump({report}, open(path, "w"))
"""

SERVER = """#!{python}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"version": "1.2.3"}}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
FIGURES = Figures(41.5, 120.0, 20.0, num_completed=3, num_cut=0, num_failed=0)


def summary(successful: float | None, incomplete: float | None, total: float = 0.0) -> dict[str, Any]:
    """guidellm's figures of one measure; None: of no request."""
    kinds = {"successful": successful, "incomplete": incomplete}
    return {
        **{kind: {"count": int(each is not None), "median": each or 0.0} for kind, each in kinds.items()},
        "total": {"count": 1, "mean": total},
    }


def report(ttft: dict[str, Any], itl: dict[str, Any]) -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": 3, "incomplete": 2, "errored": 0, "total": 5},
        "output_tokens_per_second": summary(10.0, 5.0, total=41.237),
        "time_to_first_token_ms": ttft,
        "inter_token_latency_ms": itl,
    }
    return {"benchmarks": [{"metrics": metrics}]}


def test_figures_are_of_answered_requests_or_else_of_those_that_were_cut() -> None:
    figures = Figures.of(report(summary(120.5, 900.0), summary(None, 25.25)))
    assert (figures.output_tokens_per_s, figures.ttft_ms, figures.itl_ms) == (41.24, 120.5, 25.25)
    assert (figures.num_completed, figures.num_cut, figures.num_failed) == (3, 2, 0)
    assert Figures.of(report(summary(None, None), summary(None, None))).ttft_ms is None


def test_guidellm_plays_a_cell_and_its_report_is_read(tmp_path: Path) -> None:
    program = tmp_path / "guidellm"
    program.write_text(PROGRAM.format(report=report(summary(120.0, None), summary(20.0, None))))
    program.chmod(0o755)
    client = Client(program, tmp_path / "model", requests_per_user=2, limit_s=30.0, scratch=tmp_path)
    host = cast(Host, SimpleNamespace(url="http://127.0.0.1:1", name="chairlift"))
    assert client.play(host, Cell("chat_lite", 8)).itl_ms == 20.0
    command = " ".join(client.command(host.url, Cell("rag", 8), tmp_path / "report.json"))
    for part in ("prompt_tokens=7680,output_tokens=512", "streams=8", "count=16", "seconds=30", "/v1/completions"):
        assert part in command
    assert "samples=16" in command, "prompts are made while the server is measured, by one of its cores"
    program.write_text("#!/bin/sh\necho it has no tokenizer >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="guidellm failed at chairlift: it has no tokenizer"):
        client.play(host, Cell("chat", 1))


def test_random_models_have_positions_for_every_load() -> None:
    assert max(sum(lengths) for lengths in LOADS.values()) + SLACK == 8256
    assert MAX_POSITIONS >= 8256


def test_llama_cpps_server_is_started_as_its_worker_starts_it() -> None:
    engine = Engine("llama.cpp", "llama.cpp", "python", {"binary": "llama-server", "gguf": "model.gguf"})
    command = server_command(engine, SETTINGS, 8123)
    assert command[:7] == ["llama-server", "--model", "model.gguf", "--host", "127.0.0.1", "--port", "8123"]
    assert {"--no-cache-prompt", "--parallel"} <= set(command)


@pytest.mark.parametrize(("model_type", "turns"), [("llama", True), ("qwen3", False)])
def test_a_checkpoints_rows_are_written_in_the_order_of_its_architecture(
    tmp_path: Path, model_type: str, turns: bool
) -> None:
    model = make_checkpoint(tmp_path / "model", model_type=model_type, num_hidden_layers=1, dtype=torch.bfloat16)
    write_gguf.write(tmp_path / "model", tmp_path / "model.gguf", "f16")
    tensors = {each.name: each for each in GGUFReader(tmp_path / "model.gguf").tensors}
    queries = model.model.layers[0].self_attn.q_proj.weight.detach().half()
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    heads = queries.view(config["num_attention_heads"], 2, -1, queries.shape[1])
    expected = heads.swapaxes(1, 2).reshape(queries.shape) if turns else queries
    assert np.array_equal(tensors["blk.0.attn_q.weight"].data, expected.numpy())
    assert ("blk.0.attn_q_norm.weight" in tensors) == (model_type == "qwen3")


def test_no_server_reuses_prompts_unless_it_is_asked_to() -> None:
    ours, theirs = (without_reuse(Engine(kind, kind, "python", {"as": "it"})) for kind in ("chairlift", "vllm"))
    assert ours.options == theirs.options == {"enable_prefix_caching": "false", "as": "it"}
    asked = Engine("vllm", "vllm", "python", {"enable_prefix_caching": "true"})
    assert without_reuse(asked).options == {"enable_prefix_caching": "true"}
    assert "--no-enable-prefix-caching" in server_command(ours, SETTINGS, 8123)


def test_llama_cpp_gets_no_flag_that_it_does_not_know() -> None:
    options = {"binary": "llama-server", "gguf": "model.gguf"}
    assert without_reuse(Engine("llama.cpp", "llama.cpp", "python", options)).options == options


def played(tmp_path: Path, play: Play) -> dict[str, Any]:
    """What is reported of three cells of one server, which is healthy and does nothing."""
    program = tmp_path / "python"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    arguments = argparse.Namespace(
        loads=["chat", "chat_lite", "rag"],
        users=[1],
        requests_per_user=2,
        limit=30.0,
        threads=1,
        cache_gigabytes=None,
        start_limit=60.0,
        model=None,
        shape="tiny",
    )
    return measure([Engine("chairlift", "chairlift", str(program))], SETTINGS, tmp_path, arguments, play)


def test_cells_before_one_that_fails_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def play(host: Host, cell: Cell) -> Figures:
        if cell.load == "rag":
            raise RuntimeError(f"guidellm failed at {host.name}: it has no tokenizer")
        return FIGURES

    report = played(tmp_path, play)
    assert [each["load"] for each in report["results"]] == ["chat", "chat_lite"]
    assert report["failure"] == "guidellm failed at chairlift: it has no tokenizer"
    assert report["servers"]["chairlift"]["version"] == "1.2.3"
    out, err = capsys.readouterr()
    assert "chat_lite, 1 users" in out
    assert "rag" not in out
    assert "evaluation.py: guidellm failed at chairlift: it has no tokenizer" in err


def test_nothing_is_reported_when_the_first_cell_fails(tmp_path: Path) -> None:
    def play(host: Host, _: Cell) -> Figures:
        raise RuntimeError(f"guidellm took more than 30 s at {host.name}")

    with pytest.raises(RuntimeError, match="guidellm took more than 30 s at chairlift"):
        played(tmp_path, play)


def test_without_a_failure_all_cells_are_reported(tmp_path: Path) -> None:
    report = played(tmp_path, lambda *_: FIGURES)
    assert (len(report["results"]), report["failure"]) == (3, None)
