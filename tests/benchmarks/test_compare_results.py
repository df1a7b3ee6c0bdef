"""What a comparison computes: workloads, ceilings, medians and tables."""

import pytest
from comparison.ceiling import (
    DEFAULT_WORKLOADS,
    ModelShape,
    Pass,
    Rates,
    Workload,
    decode_step,
    least_seconds,
    most_tokens_per_second,
    prefill,
)
from comparison.contest import Score, Standing, Trial, record
from comparison.report import table

from .fakes import FIELDS, SHAPE

STANDINGS = {
    "chairlift": Standing("chairlift", marks={"imports_done": 1.0, "first_token": 2.5}, peak_bytes=10**9),
    "transformers": Standing("transformers", marks={"imports_done": 1.0, "first_token": 4.0}, peak_bytes=2 * 10**9),
    "vllm": Standing("vllm", marks={"imports_done": 5.0, "first_token": 70.0}, peak_bytes=5 * 10**9),
    "ov-int8": Standing("openvino", marks={"imports_done": 0.5, "first_token": 1.0}, peak_bytes=10**9),
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


def test_one_that_failed_has_no_figures() -> None:
    some = trial(chairlift=[1.0, 1.0], vllm=[0.5], ov_int8=[2.0, 2.0])
    some.scores["vllm"].failure = "round 2: it ended with exit code 3"
    assert some.median("vllm") is None
    assert some.ratio("vllm") is None
    assert some.best_peer(STANDINGS) == "ov-int8"
    assert record(some, STANDINGS, SHAPE)["engines"]["vllm"]["rates"] == [200.0]  # what there was is kept


def test_the_ceiling_is_at_the_median_rates_and_also_at_the_highest() -> None:
    median, highest = FULL.ceiling(SHAPE), FULL.ceiling(SHAPE, max)
    assert median is not None
    assert highest is not None
    assert highest / median == pytest.approx(1_000_000 / 600_000)
    assert FULL.share(SHAPE) == pytest.approx(100.0 / median)


def test_a_record_holds_raw_figures_and_what_follows() -> None:
    kept = record(FULL, STANDINGS, SHAPE)
    assert kept["workload"] == "10x3+10"
    assert kept["unit"] == "output tokens/s"
    assert kept["engines"]["vllm"] == {
        "seconds": [2.0, 2.0, 2.0],
        "failure": None,
        "rates": [50.0, 50.0, 50.0],
        "median": 50.0,
    }
    assert kept["machine_rates"][1] == {"bytes_per_second": 1e12, "flops_per_second": 1_000_000.0}
    assert kept["ratios"] == {"transformers": 4.0, "vllm": 2.0, "ov-int8": 1.25}
    assert kept["best_peer"] == "ov-int8"


def test_the_table_shows_medians_and_below_them_ratios() -> None:
    lines = table([FULL], STANDINGS, SHAPE).splitlines()
    assert lines[0].split() == ["workload", *STANDINGS, "ceiling", "share", "best", "peer"]
    assert lines[1].split()[:7] == ["10x3+10", "output", "tokens/s", "100.0", "20.0", "50.0", "80.0"]
    assert lines[2].split() == ["ratio", "4.00", "2.00", "1.25", "ov-int8", "1.25"]
    assert lines[5].split() == ["chairlift", "2.50", "1.50", "1.00"]
    assert lines[7].split() == ["vllm", "70.00", "65.00", "5.00"]
    assert len(lines) == 9


def test_the_table_says_what_failed_and_why() -> None:
    some = trial(chairlift=[1.0], vllm=[], ov_int8=[])
    some.scores["vllm"].failure = "warm-up: RuntimeError: out of blocks"
    some.scores["ov-int8"].failure = "did not start: it was ended by SIGFPE"
    standings = {
        "chairlift": STANDINGS["chairlift"],
        "vllm": STANDINGS["vllm"],
        "ov-int8": Standing("openvino", failure="did not start: it was ended by SIGFPE"),
    }
    text = table([some], standings, SHAPE)
    assert text.splitlines()[1].split()[3:6] == ["100.0", "failed", "failed"]
    assert text.splitlines()[-2:] == [
        "FAILED ov-int8: did not start: it was ended by SIGFPE",
        "FAILED vllm at 10x3+10, warm-up: RuntimeError: out of blocks",
    ]


def test_a_workload_is_written_as_requests_prompt_and_output() -> None:
    workload = Workload.parse("32x1024+64")
    assert workload == Workload(num_requests=32, prompt_tokens=1024, output_tokens=64)
    assert workload.name == "32x1024+64"


@pytest.mark.parametrize("text", ["", "8", "8x128", "0x128+1", "8x0+1", "8x128+0", "8 x 128 + 1", "8x128+1 ", "-1x2+3"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no workload: write REQUESTSxPROMPT"):
        Workload.parse(text)


def test_output_tokens_count_unless_there_is_only_the_first() -> None:
    assert (Workload(8, 128, 64).num_counted_tokens, Workload(8, 128, 64).unit) == (512, "output tokens/s")
    assert (Workload(2, 1024, 1).num_counted_tokens, Workload(2, 1024, 1).unit) == (2048, "prompt tokens/s")


def test_prompts_are_the_same_for_every_engine_and_others_in_every_round() -> None:
    workload = Workload(4, 16, 8)
    assert workload.prompts("round 1", 1000) == workload.prompts("round 1", 1000)
    prompts = [tuple(ids) for turn in ("warm-up", "round 1", "round 2") for ids in workload.prompts(turn, 1000)]
    assert len(set(prompts)) == 12
    assert {len(ids) for ids in prompts} == {16}


def test_every_model_has_the_tokens() -> None:
    assert max(max(ids) for ids in Workload(32, 128, 1).prompts("x", 128256)) == 199
    assert max(max(ids) for ids in Workload(32, 128, 1).prompts("x", 50)) == 49


def test_the_default_workloads_are_workloads() -> None:
    assert [Workload.parse(text).name for text in DEFAULT_WORKLOADS] == DEFAULT_WORKLOADS


# Per layer q 8x8, k and v 8x4 each, o 8x8, and three of 8x16: 64 + 64 + 64 + 384 = 576 weights. The head: 80.


def test_the_weights_of_all_matrices_are_counted() -> None:
    assert SHAPE.head_dim == 4
    assert SHAPE.num_layer_weights == 2 * 576
    assert SHAPE.num_head_weights == 80
    assert SHAPE.read_bytes == 2 * (1152 + 80)


def test_a_known_shape_has_the_parameters_it_is_named_for() -> None:
    fields = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
    shape = ModelShape.of(fields, weight_bytes=2, cache_bytes=2)
    assert shape.num_layer_weights + shape.num_head_weights == 134_479_872  # without norms
    assert shape.cached_bytes(1) == 23_040


def test_int8_weights_halve_the_bytes_and_not_the_cache() -> None:
    shape = ModelShape.of(FIELDS, weight_bytes=1, cache_bytes=2)
    assert shape.read_bytes == 1232
    assert shape.cached_bytes(1) == SHAPE.cached_bytes(1) == 2 * 2 * 1 * 4 * 2


def test_a_prompt_is_multiplied_by_the_layers_and_its_last_token_by_the_head() -> None:
    # 3 tokens: 2 * 1152 * 3 = 6912; attention 4 * 2 layers * 2 heads * 4 * (1 + 2 + 3) = 384; head 2 * 80 = 160.
    assert prefill(SHAPE, Workload(1, 3, 1)) == Pass(num_flops=7456, num_bytes=2464)
    assert prefill(SHAPE, Workload(5, 3, 1)) == Pass(num_flops=5 * 7456, num_bytes=2464)


def test_a_decode_step_reads_weights_once_and_each_request_s_cache() -> None:
    # The second token out: 3 tokens are cached, attention sees 4. 2 * 1232 = 2464; attention 4 * 2 * 2 * 4 * 4 = 256.
    assert decode_step(SHAPE, Workload(1, 3, 4), 1) == Pass(num_flops=2720, num_bytes=2464 + 3 * 32)
    assert decode_step(SHAPE, Workload(6, 3, 4), 1) == Pass(num_flops=6 * 2720, num_bytes=2464 + 6 * 3 * 32)
    assert decode_step(SHAPE, Workload(1, 3, 4), 3) == Pass(num_flops=2848, num_bytes=2464 + 5 * 32)


def test_a_pass_takes_the_larger_of_its_two_times() -> None:
    assert Pass(num_flops=100, num_bytes=100).seconds(Rates(bytes_per_second=10, flops_per_second=20)) == 10.0
    assert Pass(num_flops=100, num_bytes=100).seconds(Rates(bytes_per_second=20, flops_per_second=4)) == 25.0


def test_passes_add_up_to_the_least_time() -> None:
    slow_products = Rates(bytes_per_second=1e12, flops_per_second=1.0)
    assert least_seconds(SHAPE, Workload(1, 3, 1), slow_products) == 7456
    assert least_seconds(SHAPE, Workload(1, 3, 3), slow_products) == 7456 + 2720 + 2784
    slow_memory = Rates(bytes_per_second=1.0, flops_per_second=1e12)
    assert least_seconds(SHAPE, Workload(1, 3, 3), slow_memory) == 2464 + (2464 + 96) + (2464 + 128)


def test_the_most_tokens_per_second_are_in_the_workload_s_unit() -> None:
    rates = Rates(bytes_per_second=1e12, flops_per_second=7456)
    assert most_tokens_per_second(SHAPE, Workload(1, 3, 1), rates) == 3.0  # prompt tokens in one second
    two = most_tokens_per_second(SHAPE, Workload(1, 3, 2), rates)
    assert two == pytest.approx(2 / (1 + 2720 / 7456))
