"""benchmarks/gpu.py: its figures beside their floors, worked out by hand, and the whole on a CPU at tiny shapes."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from on_gpu.device import Idle, measure_idle
from on_gpu.engine import unpadded
from on_gpu.grouped import write_grouped
from on_gpu.measurements import PARTS
from on_gpu.report import Line, make_lines, table
from on_gpu.scale import SAMPLINGS, SCALES, TOP_P, Decode, hugging_face_config, model_shape
from on_gpu.setup import Measurement, Setup

from chairlift.models import open_checkpoint
from chairlift.models.grouped import GroupedWeight

from .conftest import SHAPE, RunScript

SHAPES = {"large": SHAPE, "small": SHAPE}
RATES: Measurement = {"kind": "rates", "bytes_per_second": 1e6, "flops_per_second": 1e9}


def decode(seconds: float, target: float | None = None) -> Measurement:
    sizes = {"kind": "decode", "shape": "large", "rows": 3, "context": 10, "num_generated": 5}
    return sizes | {"variant": "torch, graphs, 8 a launch", "target": target, "seconds": seconds}


def contest(who: str, seconds: float) -> Measurement:
    return {"kind": "contest", "who": who, "workload": "2x8+8", "seconds": seconds}


def lines(*measurements: Measurement) -> list[Line]:
    return make_lines(measurements, SHAPES)


def test_the_floor_of_a_decode_step_is_what_it_must_read() -> None:
    # 2464 bytes of weights and 3 rows of 10 + 5 - 1 cached tokens, 32 bytes each: 3808 bytes at 1 MB/s.
    _, good, slow, free = lines(RATES, decode(0.007616, target=0.5), decode(0.008, target=0.5), decode(0.008))
    assert good == Line("decode large, 3 x 10, torch, graphs, 8 a launch", "7.616 ms", "3.808 ms", 0.5, 0.5)
    assert [line.verdict for line in (good, slow, free)] == ["met", "missed", ""]


def test_rows_are_spread_evenly_around_their_mean_and_the_table_says_so() -> None:
    assert Decode(4, 100).lengths == [100, 100, 100, 100]
    assert Decode(5, 100, spread=80).lengths == [20, 60, 100, 140, 180]
    assert Decode(1, 100).lengths == [100]
    full = SCALES["full"].uneven_decodes[1]
    assert (min(full.lengths), max(full.lengths), full.longest) == (64, 2048, 2048)
    spread, sampled = lines(decode(0.008) | {"spread": 7}, decode(0.008) | {"sampling": TOP_P})
    assert spread.what == "decode large, 3 x 10±7, torch, graphs, 8 a launch"
    assert sampled.what == "decode large, 3 x 10, top-p, torch, graphs, 8 a launch"


def test_a_shape_whose_bytes_are_not_counted_has_no_floor() -> None:
    line = lines(RATES, decode(0.008) | {"shape": "recurrent"})[1]
    assert (line.measured, line.floor, line.share) == ("8.000 ms", "", None)


FIRST_TOKEN = {"kind": "first_token", "shape": "large", "variant": "graphs", "prompt_tokens": 3}


def test_a_first_token_s_floor_is_its_prompt_s_prefill_and_beside_other_rows_it_has_none() -> None:
    # 2464 bytes at 1 MB/s take longer than 7456 FLOPs at 1 GFLOP/s.
    figures = {"seconds": 0.009856, "host_seconds": 0.0005}
    _, alone, beside = lines(RATES, FIRST_TOKEN | {"rows": 0} | figures, FIRST_TOKEN | {"rows": 4} | figures)
    what = "first token large, 3, graphs: in all, host"
    assert alone == Line(what, "9.856 ms, 0.500 ms", "2.464 ms", 0.25)
    assert beside == Line("first token large, 3 beside 4 rows, graphs: in all, host", "9.856 ms, 0.500 ms")


PREFILL = {"kind": "prefill", "shape": "large", "workload": "1x3+1"}


def test_a_prefill_s_share_is_that_of_the_matrix_rate_and_an_idle_device_must_stay_below_its_limit() -> None:
    # 3 tokens: 7456 FLOPs (tests of the ceiling), in 10 microseconds: 745.6 MFLOP/s of 1 GFLOP/s.
    line = lines(RATES, PREFILL | {"seconds": 1e-5})[1]
    assert line.share == pytest.approx(0.7456)
    assert line.verdict == "met"
    idle = {"kind": "idle", "shape": "large", "rows": 32, "total": 0.08}
    good, bad = lines(idle | {"between_steps": 0.04}, idle | {"between_steps": 0.06})
    assert (good.measured, good.share, good.verdict, bad.verdict) == ("8.0%", 0.04, "met", "missed")


def test_a_peer_s_share_is_how_many_times_as_long_it_takes() -> None:
    assert lines(contest("slow", 8.0))[0].verdict == ""
    ours, slow, fast = lines(contest("chairlift", 2.0), contest("slow", 8.0), contest("fast", 4.0))
    assert (ours.share, ours.verdict) == (None, "")
    assert (slow.share, slow.verdict) == (4.0, "met")
    assert (fast.share, fast.verdict) == (2.0, "missed")


def test_without_rates_there_are_figures_but_no_verdicts() -> None:
    without = lines(decode(0.008, target=0.5), PREFILL | {"seconds": 0.25})
    figures = [(line.measured, line.floor, line.verdict) for line in without]
    assert figures == [("8.000 ms", "", ""), ("250.000 ms", "", "")]


def test_the_table_ends_with_what_failed() -> None:
    text = table(lines(RATES, decode(0.008, target=0.5)), {"small": "exit code 1: boom"})
    assert text.splitlines() == [
        "                                                 measured        floor  share   target",
        "memory, matrix products                            0 GB/s  0.0 TFLOP/s",
        "decode large, 3 x 10, torch, graphs, 8 a launch  8.000 ms     3.808 ms   0.48  >= 0.50  missed",
        "FAILED small: exit code 1: boom",
    ]


def test_idle_is_what_no_work_covers() -> None:
    # Busy 0-10, 8-20, 21-30 and 70-100: gaps of 1 (within a step) and 40.
    idle = measure_idle([(8.0, 20.0), (0.0, 10.0), (70.0, 100.0), (21.0, 30.0), (22.0, 25.0)])
    assert idle == Idle(total=0.41, between_steps=0.40)
    assert measure_idle([(5.0, 10.0), (10.0, 12.0)]) == Idle(0.0, 0.0)
    with pytest.raises(ValueError, match="saw no work"):
        measure_idle([])


@pytest.mark.parametrize(("name", "num_parameters"), [("large", 8_030_000_000), ("small", 1_236_000_000)])
def test_the_full_shapes_are_those_of_llama_3_1_8b_and_llama_3_2_1b_which_is_tied(
    name: str, num_parameters: int
) -> None:
    fields, is_tied = getattr(SCALES["full"], name), name == "small"
    shape = model_shape(fields, "bfloat16")
    num_weights = shape.num_layer_weights + (1 if is_tied else 2) * shape.num_head_weights
    assert num_weights == pytest.approx(num_parameters, rel=1e-3)
    assert hugging_face_config(fields, 256, "bfloat16").tie_word_embeddings is is_tied


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_json_and_a_part_that_fails_is_reported(
    tmp_path: Path, run_script: RunScript
) -> None:
    tiny = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--json", str(tmp_path / "out.json")]
    ran = run_script(gpu, *tiny, "--parts", "small")
    report = ran.report
    assert ran.code == 0, ran.err
    assert [line.split(",")[0] for line in ran.out.splitlines()[1:-1]] == ["decode small"]
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == report
    assert [each["kind"] for each in report["measurements"]] == ["decode"]
    assert (report["failures"], report["versions"]["torch"]) == ({}, torch.__version__)

    late = run_script(gpu, *tiny, "--parts", "checks", "small", "--limit", "0.01")
    assert (late.code, late.report["failures"]) == (1, dict.fromkeys(("checks", "small"), "took longer than 0.01 s"))
    assert "FAILED checks: took longer than 0.01 s" in late.out


def test_results_are_in_their_file_after_each_part_and_not_only_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    settings = {"shape": "tiny", "device": "cpu", "dtype": "float32", "attention": "auto", "limit": 0.01}
    gpu.measure(argparse.Namespace(parts=["small"], json=file, **settings))
    assert json.loads(file.read_text(encoding="utf-8"))["failures"] == {"small": "took longer than 0.01 s"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('3 failed\\n'); print('a warning', file=sys.stderr); sys.exit(1)", "exit code 1: 3 failed"),
        ("raise ValueError('boom')", "exit code 1: ValueError: boom"),
        ("import sys; sys.exit(2)", "exit code 2: it said nothing"),
    ],
)
def test_the_reason_of_a_failure_is_the_last_line(code: str, said: str) -> None:
    with pytest.raises(gpu.PartError, match=f"^{said}$"):
        gpu._run([sys.executable, "-c", code], 60.0)


def test_what_a_part_said_before_it_was_stopped_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    with pytest.raises(gpu.PartError, match=r"^took longer than 1 s$"):
        gpu._run([sys.executable, "-c", code], 1.0)
    assert capsys.readouterr().err == "begun\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_one_line_says_what_can_be_done(run_script: RunScript) -> None:
    message = "gpu.py: there is no CUDA device here; --device cpu --shape tiny tries the way through\n"
    assert run_script(gpu) == (2, "", message)


def measured(name: str, tmp_path: Path) -> list[Measurement]:
    return PARTS[name](Setup("tiny", "cpu", "float32", tmp_path))


def test_the_large_part_decodes_prefills_contests_and_profiles(tmp_path: Path) -> None:
    rates, *measurements = measured("rates", tmp_path) + measured("large", tmp_path)
    kinds = [("decode", 1), ("decode", 4), ("prefill", None), ("contest", None), ("idle", 1), ("idle", 4)]
    assert [(each["kind"], each.get("rows")) for each in measurements] == kinds
    assert all(each["seconds"] > 0 for each in measurements[:4])
    assert all(0 <= each["between_steps"] <= each["total"] < 1 for each in measurements[4:])
    shape = model_shape(SCALES["tiny"].large, "float32")
    decode_line = make_lines([rates, measurements[0]], {"large": shape, "small": shape})[1]
    assert decode_line.share is not None
    assert 0 < decode_line.share < 1.5


def test_every_sampling_is_timed(tmp_path: Path) -> None:
    measurements = measured("sampled", tmp_path)
    assert [each["sampling"] for each in measurements] == list(SAMPLINGS)
    assert all(each["seconds"] > 0 for each in measurements)


@pytest.mark.parametrize("name", ["latency", "latency_without_mixed_graphs"])
def test_first_tokens_are_waited_for_alone_and_beside_rows(name: str, tmp_path: Path) -> None:
    measurements = measured(name, tmp_path)
    assert [(each["rows"], each["prompt_tokens"]) for each in measurements] == [(0, 4), (0, 16), (2, 4), (2, 16)]
    assert all(0 < each["host_seconds"] < each["seconds"] for each in measurements)


def test_uneven_rows_are_timed_beside_even_ones(tmp_path: Path) -> None:
    measurements = measured("uneven", tmp_path)
    assert [(each["rows"], each["context"], each["spread"]) for each in measurements] == [(3, 12, 0), (3, 12, 8)]


def test_a_recurrent_model_decodes_and_reads_a_prompt(tmp_path: Path) -> None:
    measurements = measured("recurrent", tmp_path)
    kinds = [("decode", 1), ("decode", 2), ("first_token", 0)]
    assert [(each["kind"], each["rows"]) for each in measurements] == kinds
    config = hugging_face_config(SCALES["full"].recurrent, 256, "bfloat16")
    assert config.architectures == ["Qwen3_5ForCausalLM"]
    assert config.to_dict()["layer_types"].count("full_attention") == 6


@pytest.mark.parametrize(("name", "shape"), [("mixture", "mixture"), ("float8_mixture", "mixture, float8")])
def test_a_mixture_of_experts_decodes_and_reads_a_prompt(name: str, shape: str, tmp_path: Path) -> None:
    kinds = [("decode", 1, shape), ("decode", 2, shape), ("first_token", 0, shape)]
    assert [(each["kind"], each["rows"], each["shape"]) for each in measured(name, tmp_path)] == kinds


def test_weights_in_groups_of_4_bits_are_read_as_such(tmp_path: Path) -> None:
    (measurement,) = measured("grouped", tmp_path)
    assert (measurement["shape"], measurement["variant"].split(",")[0]) == ("large, int4", "cpu")
    directory = write_grouped(SCALES["tiny"].large, 32, "float32", tmp_path / "again", "cpu")
    checkpoint = open_checkpoint(str(directory))
    matrix = checkpoint.open_weights().read("model.layers.1.mlp.down_proj.weight")
    assert isinstance(matrix, GroupedWeight)
    assert matrix.dequantize().std() == pytest.approx(96**-0.5, rel=0.05)


@pytest.mark.slow
def test_a_server_takes_all_that_clients_send_and_then_a_share_of_it(tmp_path: Path) -> None:
    measurements = measured("served", tmp_path)
    loads = [each["load"] for each in measurements]
    assert [load.split(",")[0] for load in loads] == ["3 clients", "Poisson", "3 clients", "Poisson"]
    assert loads[1] == loads[3]
    assert all(each["summary"]["num_succeeded"] == 6 for each in measurements)
    assert [line.measured.count("ms") for line in lines(*measurements)] == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["large_single_steps", "large_without_graphs"])
def test_single_steps_are_measured_apart(name: str, tmp_path: Path) -> None:
    (measurement,) = measured(name, tmp_path)
    assert measurement["variant"].endswith("no graphs, 1 a launch")  # a CPU has none


@pytest.mark.parametrize(
    ("name", "who"),
    [("transformers_static", "transformers generate"), ("transformers_continuous", "transformers generate_batch")],
)
def test_transformers_takes_part(name: str, who: str, tmp_path: Path) -> None:
    (measurement,) = measured(name, tmp_path)
    assert (measurement["kind"], measurement["who"], measurement["workload"]) == ("contest", who, "2x8+8")
    assert measurement["seconds"] > 0


class PaddingForward:
    """As far as the executor looks at it."""

    num_layers = 2

    @property
    def can_pad(self) -> bool:
        return True


def test_a_forward_without_padded_steps_is_otherwise_the_same() -> None:
    forward: Any = PaddingForward()
    assert forward.can_pad
    without: Any = unpadded(forward)
    assert (without.can_pad, without.num_layers, isinstance(without, PaddingForward)) == (False, 2, True)
