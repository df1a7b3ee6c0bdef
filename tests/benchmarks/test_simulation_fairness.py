"""Jain's index, max-min fair shares, and the books of tenants over windows of time."""

import pytest
from simulation.meter import Shares, fair_shares, jain


@pytest.mark.parametrize(
    ("values", "index"),
    [
        ([], 1.0),
        ([0.0, 0.0], 1.0),
        ([3.0, 3.0, 3.0], 1.0),
        ([1.0, 0.0, 0.0, 0.0], 0.25),
        ([1.0, 3.0], 0.8),  # 16 / (2 x 10)
    ],
)
def test_jains_index(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index)


@pytest.mark.parametrize(
    ("demands", "total", "shares"),
    [
        ([5.0, 5.0], 6.0, [3.0, 3.0]),
        ([100.0, 1.0, 2.0], 33.0, [30.0, 1.0, 2.0]),  # who asks for little gets it, and the rest is the other's
        ([10.0, 4.0, 10.0], 15.0, [5.5, 4.0, 5.5]),
        ([1.0, 2.0], 9.0, [1.0, 2.0]),
        ([], 9.0, []),
    ],
)
def test_shares_are_max_min_fair(demands: list[float], total: float, shares: list[float]) -> None:
    assert fair_shares(demands, total) == pytest.approx(shares)


def test_a_tenant_that_gets_less_than_its_share_lowers_the_index() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 100, now=0.0)
    shares.arrive("b", 100, now=0.0)
    shares.serve([("a", 30), ("b", 10)], now=5.0)  # fair were 20 each: ratios 1.5 and 0.5
    shares.serve([("a", 35), ("b", 35)], now=10.0)  # the first window is over
    assert shares.jain == pytest.approx(0.8)  # 2^2 / (2 x 2.5)


def test_windows_count_by_the_tokens_served_in_them() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 1000, now=0.0)
    shares.arrive("b", 1000, now=0.0)
    shares.serve([("a", 30), ("b", 10)], now=0.0)
    shares.serve([("a", 60), ("b", 60)], now=10.0)
    shares.serve([("a", 1)], now=20.0)
    assert shares.jain == pytest.approx((0.8 * 40 + 1.0 * 120) / 160)


def test_who_asks_for_little_and_gets_it_is_served_fairly() -> None:
    shares = Shares(window=10.0)
    shares.arrive("flood", 1000, now=0.0)
    shares.arrive("small", 5, now=0.0)
    shares.serve([("flood", 95), ("small", 5)], now=0.0)
    shares.serve([("flood", 100)], now=10.0)
    assert shares.jain == pytest.approx(1.0)


def test_tokens_that_need_not_be_computed_are_no_demand() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 1000, now=0.0)
    shares.arrive("b", 1000, now=0.0)
    shares.admit("b", 990, now=0.0)  # all but 10 of its tokens were in the cache
    shares.arrive("c", 1000, now=0.0)
    shares.leave("c", 1000, was_admitted=False)  # went away at once
    shares.serve([("a", 90), ("b", 10)], now=1.0)
    shares.serve([("a", 1)], now=10.0)
    assert shares.jain == pytest.approx(1.0)


def test_windows_in_which_nobody_lacks_anything_do_not_count() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 30, now=0.0)
    shares.arrive("b", 10, now=0.0)
    shares.serve([("a", 30), ("b", 10)], now=0.0)
    shares.serve([], now=10.0)
    assert shares.jain == 1.0


def test_the_longest_that_a_tenant_waits_for_a_slot() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 1, now=0.0)
    shares.arrive("a", 1, now=1.0)
    shares.admit("a", 0, now=2.0)  # 2 s after its first request came
    shares.admit("a", 0, now=5.0)  # 3 s after it last got one
    shares.arrive("a", 1, now=50.0)  # nobody waited in between
    shares.admit("a", 0, now=51.0)
    assert shares.longest_gap == 3.0


def test_a_window_has_a_length() -> None:
    with pytest.raises(ValueError, match="the window must be above 0 seconds, not 0"):
        Shares(window=0.0)
