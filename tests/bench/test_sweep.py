"""Sweeps: what is gone through, what is found."""

import pytest

from chairlift.bench import BenchConfig
from chairlift.bench.records import RequestRecord
from chairlift.bench.summary import summarize
from chairlift.bench.sweep import Sweep, SweepStep, sweep_configs, sweep_step
from chairlift.bench.sweep_values import SweepValues
from chairlift.bench.table import format_sections, sweep_sections

from .samples import BUSY, failed, record, result

RATES = SweepValues("rate", (1.0, 2.0, 4.0))


def step(value: float, *records: RequestRecord) -> SweepStep:
    finished = result(*records, request_rate=value, goodput="ttft:1000")
    return sweep_step(value, finished, summarize(finished))


GOOD = (record(0),)
NINE_OF_TEN = (*(record(n) for n in range(9)), failed(9, BUSY))
BAD = (*(record(n) for n in range(8)), failed(8, BUSY), failed(9, BUSY))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rate=1,2.5,4", SweepValues("rate", (1.0, 2.5, 4.0))),
        ("rate=4,1,4", SweepValues("rate", (1.0, 4.0))),
        ("concurrency=8", SweepValues("concurrency", (8.0,))),
    ],
)
def test_values_are_read_in_ascending_order(text: str, values: SweepValues) -> None:
    assert SweepValues.parse(text) == values


@pytest.mark.parametrize("text", ["", "rate", "rate=", "rate=a", "rate=0", "rate=1,inf", "speed=1", "concurrency=1.5"])
def test_a_sweep_that_cannot_be_read_is_refused_with_one_that_can(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the sweep") as caught:
        SweepValues.parse(text)
    assert str(caught.value) == (
        f"cannot read the sweep {text!r}: it must look like rate=1,2,4,8 or concurrency=1,2,4,8, with numbers above 0 "
        "(whole ones for concurrency)"
    )


def test_each_value_is_a_test_with_a_seed_of_its_own() -> None:
    config = BenchConfig(sweep="rate=1,2", goodput="ttft:5", seed=7)
    first, second = sweep_configs(config, SweepValues.parse("rate=1,2"))
    assert (first.request_rate, first.seed, first.sweep) == (1.0, 7, None)
    assert (second.request_rate, second.seed) == (2.0, 8)


def test_a_sweep_of_concurrency_is_of_closed_loops() -> None:
    config = BenchConfig(sweep="concurrency=3", goodput="ttft:5")
    [only] = sweep_configs(config, SweepValues.parse("concurrency=3"))
    assert (only.concurrency, only.is_open_loop) == (3, False)


def test_a_test_is_good_if_the_wanted_share_of_its_requests_is() -> None:
    assert step(1.0, *GOOD).is_good
    assert step(1.0, *NINE_OF_TEN).is_good
    assert not step(1.0, *BAD).is_good


@pytest.mark.parametrize(
    ("outcomes", "highest"),
    [((GOOD, NINE_OF_TEN, BAD), 2.0), ((BAD, GOOD, BAD), 2.0), ((GOOD, GOOD, GOOD), 4.0), ((BAD, BAD, BAD), None)],
)
def test_the_highest_good_value_is_found(
    outcomes: tuple[tuple[RequestRecord, ...], ...], highest: float | None
) -> None:
    steps = [step(value, *records) for value, records in zip(RATES.values, outcomes, strict=True)]
    assert Sweep(RATES, steps).highest == highest


def test_the_table_of_a_sweep() -> None:
    sweep = Sweep(RATES, [step(1.0, *GOOD), step(2.0, failed(0, BUSY))])
    assert format_sections(sweep_sections(sweep)).splitlines() == [
        "requests/s asked for        requests/s    tokens/s    TTFT p50    TTFT p99    TPOT p50    TPOT p99      failed"
        "        good",
        "1                                 0.25         0.8      1000.0      1000.0       500.0       500.0           0"
        "      100.0%",
        "2                                 0.00         0.0           -           -           -           -           1"
        "        0.0%",
        "",
        "limits                    ttft 1000 ms for 90% of requests",
        "highest rate              1",
    ]
