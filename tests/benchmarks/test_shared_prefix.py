"""Users who share a system prompt: what they send, what comes of it, and the command with real servers."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import shared_prefix
from peers import server as server_module
from peers.engines import Engine, UsageError
from peers.server import Host, server_command
from peers.worker import WorkerError
from peers.workers.protocol import Settings
from prefix_visits import Arrival, Round, Series, Trial, Visits, record, table
from shapes import CHAT_TEMPLATE, make_servable, word_tokenizer
from transformers import PreTrainedTokenizerFast

from tests.loadtest import conftest as samples
from tests.support.checkpoints import make_checkpoint

from .conftest import SETTINGS, RunScript
from .test_contest import GONE, await_status

VISITS = Visits(num_users=3, num_turns=2, prefix_tokens=1500, question_tokens=40, output_tokens=32, think_time=0.5)
CHAIRLIFT = Engine("chairlift", "chairlift", "python")

HEALTHY_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "1.2.3"}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN_SERVER = "import sys; print('no such model'); sys.exit(3)"


def chat(tokenizer: PreTrainedTokenizerFast, *contents: str) -> list[int]:
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids


def test_every_id_is_a_word_that_is_read_back_as_that_id() -> None:
    tokenizer = word_tokenizer(320)
    assert len(tokenizer) == 320
    prompt = chat(tokenizer, "the of and", "to in")
    answer = [*range(1, 320)]
    repeated = chat(tokenizer, "the of and", "to in", str(tokenizer.decode(answer)), "for")
    assert prompt == [316, 1, 2, 3, 319, 317, 4, 5, 319, 318]
    assert repeated == [*prompt, *answer, 319, 317, 7, 319, 318]
    with pytest.raises(ValueError, match="a vocabulary of 50 has no room for the 85 words of the load test"):
        word_tokenizer(50)


def test_a_servable_checkpoint_has_the_weights_of_another(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "weights")
    model = make_servable(tmp_path / "weights", tmp_path / "model", 4096)
    assert (model / "model.safetensors").samefile(tmp_path / "weights" / "model.safetensors")
    assert json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"] == 4096
    assert PreTrainedTokenizerFast.from_pretrained(model).chat_template == CHAT_TEMPLATE


def test_options_are_flags_of_the_server() -> None:
    engine = replace(CHAIRLIFT, options={"enable_prefix_caching": "false", "max_num_batched_tokens": "512"})
    assert server_command(engine, SETTINGS, 8123) == [
        *("python", "-m", "chairlift", "serve", "--model", "nowhere", "--num-threads", "1"),
        *("--max-batch-size", "8", "--max-seq-len", "32", "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", "8123"),
        *("--no-enable-prefix-caching", "--max-num-batched-tokens", "512"),
    ]


def test_vllm_reuses_prefixes_too() -> None:
    engine = Engine("vllm", "vllm", "vllm/bin/python", {"preload": "libtcmalloc.so", "block_size": "32"})
    command = server_command(engine, SETTINGS, 8123)
    assert command[:5] == ["vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "nowhere"]
    assert command[5:9] == ["--max-num-seqs", "8", "--max-model-len", "32"]
    assert "--enable-prefix-caching" in command
    assert command[-2:] == ["--block-size", "32"]


def test_an_engine_without_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--peer openvino: its server is not known here; there are chairlift, vllm"):
        Host(Engine("openvino", "openvino", "python"), SETTINGS, tmp_path / "log")


def command_of(code: str) -> Callable[[Engine, Settings, int], list[str]]:
    """A stand-in for `server_command`: a server of this code, which is told its port."""
    return lambda _engine, _settings, port: [sys.executable, "-c", code, str(port)]


def test_a_server_is_started_and_ended(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with closing(Host(CHAIRLIFT, SETTINGS, tmp_path / "log", command_of(HEALTHY_SERVER))) as host:
        host.start(60.0)
        children = set(psutil.Process().children(recursive=True)) - set(before)
    assert host.standing.version == "1.2.3"
    assert host.standing.healthy_s > 0
    assert host.standing.peak_bytes > 0
    assert len(children) == 2  # the keeper, and the server
    for child in children:
        await_status(child.pid, GONE)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    host = Host(CHAIRLIFT, SETTINGS, tmp_path / "log", command_of(BROKEN_SERVER))
    with closing(host), pytest.raises(WorkerError) as caught:
        host.start(60.0)
    assert str(caught.value) == "chairlift did not start: the server ended with exit code 3\nno such model"


def test_a_context_holds_the_longest_conversation() -> None:
    # 1500 + 2 of the system's message, (40 + 2 + 32 + 2) of each turn, 1 where the answer begins: 1655
    assert VISITS.max_tokens == 1664
    assert replace(VISITS, prefix_tokens=1509).max_tokens == 1664
    assert replace(VISITS, prefix_tokens=1510).max_tokens == 1792


@pytest.mark.parametrize(("text", "rate", "name"), [("all", None, "all at once"), ("0.5", 0.5, "0.5 users/s")])
def test_users_come_all_at_once_or_at_a_rate(text: str, rate: float | None, name: str) -> None:
    arrival = Arrival.parse(text)
    config = VISITS.test("http://host:8000", arrival, seed=7)
    assert arrival == Arrival(rate)
    assert arrival.name == name
    assert (config.request_rate, config.concurrency) == (rate, None if rate else 3)
    assert (config.num_requests, config.turns, config.warmup, config.seed) == (6, 2, 0, 7)
    assert config.is_chat


def test_a_round_keeps_times_by_turn() -> None:
    turns = [replace(samples.record(index), turn=index % 2) for index in range(3)]
    late = replace(turns[1], chunk_times=[53.0], ended_at=53.0, usage_cached_tokens=7)
    seen = Round.of(samples.result(turns[0], late, turns[2], samples.failed(3, samples.TIMEOUT)), num_turns=2)
    assert seen.ttft_ms == ((1000.0, 1000.0), (2000.0,))
    assert (seen.prompt_tokens, seen.cached_tokens, seen.output_tokens) == (30, 7, 9)
    assert (seen.duration_s, seen.lag_p99_ms) == (4.0, 1.0)
    assert (seen.num_failed, seen.failure) == (1, "timeout: no complete reply within 9 s")


def a_round(first: list[float], second: list[float]) -> Round:
    return Round((tuple(first), tuple(second)), 100, 90, 10, 1.0, 0.5, 0, None)


def a_trial() -> Trial:
    ours = Series([a_round([10.0, 30.0], [10.0, 10.0]), a_round([20.0, 20.0], [20.0, 20.0])])
    theirs = Series([a_round([30.0, 30.0], [20.0, 20.0]), a_round([80.0, 80.0], [80.0, 80.0])])
    return Trial(Arrival(0.5), {"chairlift": ours, "vllm": theirs, "late": Series(failure="2 requests, the first: no")})


def test_ratios_are_taken_within_rounds() -> None:
    trial = a_trial()
    assert (trial.quantile_ms("chairlift", 50), trial.quantile_ms("chairlift", 50, turn=0)) == (15.0, 20.0)
    # 25 to 10 and 80 to 20; of the second turn 20 to 10 and 80 to 20.
    assert (trial.ratio("vllm"), trial.ratio("vllm", turn=1), trial.ratio("late")) == (3.25, 3.0, None)


def test_the_table_has_a_line_for_each_server_and_names_failures() -> None:
    assert table([a_trial()], num_turns=2).splitlines() == [
        "0.5 users/s: time to first token, ms",
        "           turn 1  turn 2  all turns   p90  cached  ratio",
        "chairlift    20.0    15.0       15.0  22.0    0.90      -",
        "vllm         55.0    50.0       52.5  55.0    0.90   3.25",
        "late            -       -          -     -       -      -",
        "",
        "FAILED late, 0.5 users/s: 2 requests, the first: no",
    ]


def test_the_json_has_every_time_and_what_comes_of_them() -> None:
    recorded = record(a_trial())
    ours, theirs = (recorded["servers"][name] for name in ("chairlift", "vllm"))
    assert (recorded["arrival"], ours["ratio"]) == ("0.5 users/s", None)
    assert theirs["rounds"][0]["ttft_ms"] == ((30.0, 30.0), (20.0, 20.0))
    assert (theirs["ttft_p50_ms"], theirs["ttft_p50_ms_by_turn"]) == (52.5, [55.0, 50.0])
    assert (theirs["ratio"], theirs["ratio_by_turn"]) == (3.25, [2.75, 3.0])


@pytest.mark.slow
@pytest.mark.usefixtures("stays_frozen")
def test_the_command_measures_real_servers(tmp_path: Path, run_script: RunScript) -> None:
    make_checkpoint(tmp_path / "weights")
    flags = ["--model", str(tmp_path / "weights"), "--dtype", "float32", "--threads", "1", "--rounds", "1"]
    users = ["--users", "2", "--prefix-tokens", "60", "--question-tokens", "4", "--output-tokens", "4"]
    when = ["--arrivals", "all", "50", "--think-time", "0"]
    code, _, _ = ran = run_script(shared_prefix, *flags, *users, *when, "--json", str(tmp_path / "out"))
    report = ran.report
    assert code == 0
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8")) == report
    assert report["servers"]["no-reuse"]["options"] == {"enable_prefix_caching": "false"}
    assert [result["arrival"] for result in report["results"]] == ["all at once", "50 users/s"]
    seen = report["results"][0]["servers"]["chairlift"]["rounds"][0]
    # The first turn: 60 + 2 of the system, 4 + 2 of the user, 1; the second repeats it with an answer and a question.
    assert seen["prompt_tokens"] == 2 * 69 + 2 * (69 + 4 + 1 + 6 + 1)
    assert [len(times) for times in seen["ttft_ms"]] == [2, 2]
    assert seen["cached_tokens"] >= 2 * 69
    assert report["results"][0]["servers"]["no-reuse"]["cached_share"] == 0.0
    assert str(tmp_path) not in json.dumps(report)


def test_a_server_whose_warm_up_fails_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_script: RunScript
) -> None:
    make_checkpoint(tmp_path / "weights")
    monkeypatch.setattr(server_module, "server_command", command_of(HEALTHY_SERVER))
    ran = run_script(shared_prefix, "--model", str(tmp_path / "weights"))
    last = ran.err.splitlines()[-1]
    assert ran.code == 2
    assert last.startswith("shared_prefix.py: chairlift: its warm-up failed: http://127.0.0.1:")
    assert "no list of models" in last


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arrivals soon", "'soon' is no arrival: write all, or users per second"),
        ("--arrivals 0", "'0' is no arrival: write all, or users per second"),
        ("--users 0", "'0' is no count: write a whole number from 1 on"),
        ("--model / --peer vllm=/no/python", "--peer vllm: no executable file at /no/python"),
        ("--model / --peer chairlift,as=no-reuse", "--peer no-reuse: named twice; tell them apart with as=NAME"),
    ],
)
def test_a_bad_flag_or_a_peer_that_cannot_take_part_is_refused(flags: str, message: str, run_script: RunScript) -> None:
    ran = run_script(shared_prefix, *flags.split())
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err.splitlines()[-1]
