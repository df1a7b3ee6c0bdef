"""Comparisons of engines: the command with fake workers in every engine's place, what `--peer` may name, figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import compare
import formats
import pytest
import shapes
import speculation
import speculation_peers
from comparison.ceiling import Rates, Workload
from comparison.contest import Score, Standing, Trial, record, table
from peers.engines import Engine, UsageError

from chairlift.loadtest.workload import WORDS
from chairlift.models.cpu.processor import usable_instruction_sets
from tests.support.kernels import needs_kernels

from .conftest import FIELDS, SETTINGS, SHAPE, FakeEngine, RunScript


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration; the workers that measure it are fakes."""
    monkeypatch.setattr(Engine, "command", FakeEngine.command)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(FIELDS), encoding="utf-8")
    return directory


def test_a_comparison_ends_in_a_line_of_json(model: Path, tmp_path: Path, run_script: RunScript) -> None:
    flags = ["--model", str(model), "--workloads", "2x4+3", "1x8+1", "--rounds", "2", "--json", str(tmp_path / "out")]
    ran = run_script(compare, *flags, "--peer", "transformers", "--peer", f"vllm={sys.executable},raises=1")
    report = ran.report
    engines, (first, second), settings = report["engines"], report["results"], report["settings"]
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8")) == report
    assert "2x4+3, round 2, transformers: " in ran.err
    assert ran.out.startswith("workload")

    # A batch of one prompt is a start-up's too.
    assert (ran.code, report["failed"]) == (1, True)
    assert run_script(compare, *flags[:3], "2x4+3", "--rounds", "1").code == 0
    assert engines["vllm"]["failure"] == "did not start: RuntimeError: out of blocks"
    assert (first["workload"], second["workload"], second["unit"]) == ("2x4+3", "1x8+1", "prompt tokens/s")
    assert (len(first["engines"]["chairlift"]["seconds"]), len(first["machine_rates"])) == (2, 3)
    assert (settings["max_requests"], settings["max_prompt_tokens"], settings["cache_gigabytes"]) == (2, 8, 1)
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["cpu_level"] == next(iter(usable_instruction_sets()), None)
    assert engines["transformers"]["about"]["fake"] == "1.0"


def test_a_peer_that_is_not_there_is_one_line_and_a_workload_that_is_none_is_refused(run_script: RunScript) -> None:
    missing = "compare.py: --peer vllm: no executable file at /no/python\n"
    twice = "compare.py: --peer transformers: named twice; tell them apart with as=NAME\n"
    assert run_script(compare, "--peer", "vllm=/no/python") == (2, "", missing)
    assert run_script(compare, *["--peer", "transformers"] * 2) == (2, "", twice)
    ran = run_script(compare, "--workloads", "8x128")
    assert ran.code == 2
    assert "'8x128' is no workload: write REQUESTSxPROMPT+OUTPUT" in ran.err


def test_a_peer_runs_in_its_own_python_and_llama_cpp_s_server_is_driven_by_ours(tmp_path: Path) -> None:
    engine = Engine.parse(f"vllm={sys.executable},max_num_batched_tokens=2048,as=vllm-2k")
    assert engine == Engine("vllm-2k", "vllm", sys.executable, {"max_num_batched_tokens": "2048"})
    assert engine.command() == [sys.executable, "-m", "peers.workers.vllm_worker"]
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    engine = Engine.parse(f"llama.cpp={sys.executable},gguf={gguf}")
    assert (engine.python, engine.options) == (sys.executable, {"gguf": str(gguf), "binary": sys.executable})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vlm=/bin/sh", "--peer vlm: no such peer; there are chairlift, transformers, transformers-batch, vllm"),
        ("chairlift", "--peer chairlift: give it a name, as chairlift,as=NAME,SETTING=VALUE"),
        ("vllm", "--peer vllm: name its Python, as vllm=/path/to/it"),
        ("vllm=/no/python", "--peer vllm: no executable file at /no/python"),
        ("llama.cpp=/bin/sh", "--peer llama.cpp: name its gguf, as llama.cpp=/bin/sh,gguf=PATH"),
        ("llama.cpp=/bin/sh,gguf=/no/file", "--peer llama.cpp: nothing at /no/file"),
        ("openvino=/bin/sh,hint=LATENCY", "--peer openvino: name its model"),
        ("vllm=/bin/sh,fast", "--peer vllm: 'fast' is no option: write key=value"),
        ("vllm=/bin/sh,preload=/bin/sh:/no/library", "--peer vllm: nothing at /no/library"),
    ],
)
def test_what_is_not_there_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Engine.parse(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_workers_see_our_scripts_and_no_network_and_vllm_is_told_its_cores_and_cache() -> None:
    ours = Engine.parse("transformers").environment(replace(SETTINGS, num_threads=2), {"PATH": "/bin"})
    assert Path(ours["PYTHONPATH"]).name == "benchmarks"
    assert (ours["HF_HUB_OFFLINE"], ours["OMP_NUM_THREADS"], ours["PATH"]) == ("1", "2", "/bin")
    engine = Engine.parse("vllm=/bin/sh,preload=/bin/sh:/bin/ls")
    vllms = engine.environment(replace(SETTINGS, num_threads=1, cache_gigabytes=3), {})
    assert (vllms["VLLM_CPU_KVCACHE_SPACE"], vllms["LD_PRELOAD"]) == ("3", "/bin/sh:/bin/ls")
    assert vllms["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
    assert "OMP_NUM_THREADS" not in vllms


def standing(kind: str, imports_done: float, first_token: float, num_gigabytes: int) -> Standing:
    marks = {"imports_done": imports_done, "first_token": first_token}
    return Standing(kind, marks=marks, peak_bytes=num_gigabytes * 10**9)


STANDINGS = {
    "chairlift": standing("chairlift", 1.0, 2.5, 1),
    "transformers": standing("transformers", 1.0, 4.0, 2),
    "vllm": standing("vllm", 5.0, 70.0, 5),
    "ov-int8": standing("openvino", 0.5, 1.0, 1),
}


def trial(**seconds: list[float]) -> Trial:
    """Ten requests of ten tokens: so a second is a hundred tokens per second."""
    scores = {name.replace("_", "-"): Score(values) for name, values in seconds.items()}
    rates = [Rates(1e12, flops) for flops in (500_000.0, 1_000_000.0, 600_000.0)]
    return Trial(Workload(10, 3, 10), scores, rates)


FULL = trial(chairlift=[1.0, 2.0, 1.0], transformers=[4.0, 5.0, 5.0], vllm=[2.0, 2.0, 2.0], ov_int8=[1.25, 5.0, 1.25])


def test_the_best_peer_is_the_fastest_of_those_made_for_the_purpose() -> None:
    assert FULL.best_peer(STANDINGS) == "ov-int8"
    fast = trial(chairlift=[1.0], transformers=[0.1], vllm=[2.0], ov_int8=[3.0])
    assert fast.best_peer(STANDINGS) == "vllm"
    assert trial(chairlift=[1.0], transformers=[0.1]).best_peer(STANDINGS) is None


def test_one_that_failed_has_no_figures_but_what_there_was_is_kept() -> None:
    some = trial(chairlift=[1.0, 1.0], vllm=[0.5], ov_int8=[2.0, 2.0])
    failure = some.scores["vllm"].failure = "round 2: it ended with exit code 3"
    assert (some.median("vllm"), some.ratio("vllm"), some.best_peer(STANDINGS)) == (None, None, "ov-int8")
    kept = record(some, STANDINGS, SHAPE)
    assert kept["engines"]["vllm"] == {"seconds": [0.5], "failure": failure, "rates": [200.0], "median": None}
    assert (kept["workload"], kept["ratios"]) == ("10x3+10", {"vllm": None, "ov-int8": 2.0})
    assert kept["machine_rates"][1] == {"bytes_per_second": 1e12, "flops_per_second": 1_000_000.0}
    assert kept["best_peer"] == "ov-int8"


def test_the_ceiling_is_at_the_median_rates_and_also_at_the_highest() -> None:
    median, highest = FULL.ceiling(SHAPE), FULL.ceiling(SHAPE, max)
    assert median is not None
    assert highest is not None
    assert highest / median == pytest.approx(1_000_000 / 600_000)
    assert FULL.share(SHAPE) == pytest.approx(100.0 / median)


def test_the_table_shows_medians_and_below_them_ratios_and_says_what_failed_and_why() -> None:
    lines = [line.split() for line in table([FULL], STANDINGS, SHAPE).splitlines()]
    assert lines[0] == ["workload", *STANDINGS, "ceiling", "share", "best", "peer"]
    assert lines[1][:7] == ["10x3+10", "output", "tokens/s", "100.0", "20.0", "50.0", "80.0"]
    assert lines[2] == ["ratio", "4.00", "2.00", "1.25", "ov-int8", "1.25"]
    assert lines[5] == ["chairlift", "2.50", "1.50", "1.00"]
    assert lines[7] == ["vllm", "70.00", "65.00", "5.00"]
    assert len(lines) == 9

    some = trial(chairlift=[1.0], vllm=[], ov_int8=[])
    some.scores["vllm"].failure = "warm-up: RuntimeError: out of blocks"
    absent = some.scores["ov-int8"].failure = "did not start: it was ended by SIGFPE"
    standings = {name: STANDINGS[name] for name in ("chairlift", "vllm")}
    failed = table([some], standings | {"ov-int8": Standing("openvino", failure=absent)}, SHAPE).splitlines()
    assert failed[1].split()[3:6] == ["100.0", "failed", "failed"]
    assert failed[-2] == "FAILED ov-int8: did not start: it was ended by SIGFPE"
    assert failed[-1] == "FAILED vllm at 10x3+10, warm-up: RuntimeError: out of blocks"


def test_a_workload_is_written_as_requests_prompt_and_output_and_in_no_other_way() -> None:
    workload = Workload.parse("32x1024+64")
    assert workload == Workload(num_requests=32, prompt_tokens=1024, output_tokens=64)
    assert workload.name == "32x1024+64"
    for text in ("", "8", "8x128", "0x128+1", "8x0+1", "8x128+0", "8 x 128 + 1", "8x128+1 ", "-1x2+3"):
        with pytest.raises(ValueError, match="is no workload: write REQUESTSxPROMPT"):
            Workload.parse(text)


def test_output_tokens_count_unless_there_is_only_the_first() -> None:
    assert (Workload(8, 128, 64).num_counted_tokens, Workload(8, 128, 64).unit) == (512, "output tokens/s")
    assert (Workload(2, 1024, 1).num_counted_tokens, Workload(2, 1024, 1).unit) == (2048, "prompt tokens/s")


def test_prompts_are_the_same_for_every_engine_others_in_every_round_and_of_tokens_that_every_model_has() -> None:
    workload = Workload(4, 16, 8)
    assert workload.prompts("round 1", 1000) == workload.prompts("round 1", 1000)
    prompts = [tuple(ids) for turn in ("warm-up", "round 1", "round 2") for ids in workload.prompts(turn, 1000)]
    assert len(set(prompts)) == 12
    assert {len(ids) for ids in prompts} == {16}
    assert [max(map(max, Workload(32, 128, 1).prompts("x", size))) for size in (128256, 50)] == [199, 49]


def test_each_engine_guesses_in_turns_with_itself(model: Path, tmp_path: Path, run_script: RunScript) -> None:
    journal = tmp_path / "journal"
    flags = ["--model", "bundled", "--kinds", "copy", "--rows", "1", "3", "--rounds", "2"]
    peer = f"openvino={sys.executable},model={model},journal={journal},raises=3"
    ran = run_script(speculation_peers, *flags, "--peer", peer)
    chairlift, openvino, third, failed = ran.report["figures"]
    assert (ran.code, failed["failure"]) == (1, "RuntimeError: out of blocks")
    assert [len(pair) for pair in chairlift["seconds"]] == [len(pair) for pair in openvino["seconds"]] == [2, 2]
    assert ran.out.splitlines()[2].split() == ["copy,", "3", "rows", f"{third['ratio']:.2f}", "failed"]
    begun = [line.split()[0] for line in journal.read_text(encoding="ascii").splitlines() if line.endswith("begins")]
    without, guessing = dict.fromkeys(begun)
    assert begun[:8] == [without, without, guessing, guessing, without, guessing, without, guessing]  # a start, rounds

    stranger = run_script(speculation_peers, *flags, "--peer", "transformers")
    assert stranger.code == 2
    assert "--peer transformers: it does not guess from the text" in stranger.err


@needs_kernels
@pytest.mark.parametrize("number_format", ["bfloat16", "int4"])
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


@needs_kernels
@pytest.mark.usefixtures("model")
def test_a_row_has_bits_perplexity_speed_and_memory_of_a_format_at_a_level(run_script: RunScript) -> None:
    level = usable_instruction_sets()[0]
    flags = ["--model", "bundled", "--formats", "bfloat16", "int8", "--workloads", "1x4+3", "2x4+3", "--rounds", "1"]
    ran = run_script(formats, *flags)
    head, _, plain, int8, _ = ran.out.splitlines()
    assert head == "| level | format | bits a weight | perplexity | 1x4+3 | 2x4+3 | peak memory, GB |"
    assert plain.startswith(f"| {level} | bfloat16 | 16.")
    assert int8.startswith(f"| {level} | int8 | 9.4 |")  # with the padding of a small model
    known, results = ran.report["formats"], ran.report["results"]
    assert known["int8"]["perplexity"] == pytest.approx(known["bfloat16"]["perplexity"], rel=0.02)
    assert [len(result["rates"][f"{level} int8"]) for result in results] == [1, 1]
    assert (ran.code, ran.report["engines"][f"{level} int8"]["options"]["level"]) == (0, level)


def test_only_a_gguf_file_has_a_format_of_its_own(run_script: RunScript) -> None:
    ran = run_script(formats, "--model", "bundled", "--formats", "file")
    assert ran == (2, "", "formats.py: --formats file: bundled is no GGUF file\n")
