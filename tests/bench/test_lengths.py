"""Distributions of lengths: what is read, what is refused, and what is drawn."""

import statistics

import numpy as np
import pytest

from chairlift.bench.lengths import Lengths


def draw(text: int | str, count: int = 20_000, seed: int = 0) -> list[int]:
    return Lengths.parse(text).draw(count, np.random.default_rng(seed))


@pytest.mark.parametrize("text", [7, "7", " 7 "])
def test_a_number_is_the_length_of_all(text: int | str) -> None:
    assert draw(text, count=3) == [7, 7, 7]


def test_uniform_reaches_both_ends() -> None:
    lengths = draw("uniform:3,6")
    assert set(lengths) == {3, 4, 5, 6}
    assert lengths.count(3) == pytest.approx(5000, rel=0.1)


def test_normal_has_its_mean_and_deviation() -> None:
    lengths = draw("normal:500,50")
    assert statistics.mean(lengths) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(lengths) == pytest.approx(50, rel=0.03)


def test_lognormal_has_its_median_and_a_heavy_tail() -> None:
    lengths = draw("lognormal:300,0.8")
    assert statistics.median(lengths) == pytest.approx(300, rel=0.03)
    # The mean of a lognormal is median * exp(sigma^2 / 2).
    assert statistics.mean(lengths) == pytest.approx(300 * np.exp(0.32), rel=0.03)


@pytest.mark.parametrize("text", ["normal:10,50,40", "lognormal:10,2,40"])
def test_no_length_is_below_one_or_above_the_most(text: str) -> None:
    lengths = draw(text)
    assert (min(lengths), max(lengths)) == (1, 40)


def test_lengths_are_plain_integers_fit_for_json() -> None:
    assert {type(length) for length in draw("normal:10,5", count=5)} == {int}


@pytest.mark.parametrize("text", ["uniform:1,1000", "normal:500,50", "lognormal:300,0.8"])
def test_asking_for_more_keeps_the_first_ones(text: str) -> None:
    assert draw(text, count=50)[:20] == draw(text, count=20)


@pytest.mark.parametrize(
    "text",
    [
        0,
        -3,
        "",
        "1.5",
        "many",
        "128,256",
        "uniform",
        "uniform:5",
        "uniform:6,5",
        "uniform:0,5",
        "uniform:1,2,3",
        "normal:5",
        "normal:5,1,0.5",
        "normal:nan,1",
        "lognormal:inf,1",
        "poisson:5",
        "1e300",
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(text: int | str) -> None:
    with pytest.raises(ValueError, match="cannot read the length") as caught:
        Lengths.parse(text)
    assert str(caught.value) == (
        f"cannot read the length {text!r}: it must be N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or "
        "lognormal:MEDIAN,SIGMA[,MAX], in numbers above 0"
    )
