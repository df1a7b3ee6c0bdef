"""Medians, ratios, shares, and the table of them."""

import pytest
from comparison.ceiling import Rates, Workload
from comparison.contest import Score, Standing, Trial, record
from comparison.report import table

from .fakes import SHAPE

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


def test_a_median_is_over_the_rounds() -> None:
    assert FULL.round_rates("chairlift") == [100.0, 50.0, 100.0]
    assert FULL.median("chairlift") == 100.0


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    assert FULL.ratio("transformers") == 4.0  # of 4, 2.5 and 5
    assert FULL.ratio("vllm") == 2.0  # of 2, 1 and 2


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


def test_columns_stand_below_their_heads() -> None:
    lines = table([FULL], STANDINGS, SHAPE).splitlines()
    for head, value in (("chairlift", "100.0"), ("transformers", "20.0"), ("vllm", "50.0"), ("ov-int8", "80.0")):
        assert lines[0].index(head) + len(head) == lines[1].index(value) + len(value)
    assert lines[0].index("best peer") == lines[2].index("ov-int8")


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
