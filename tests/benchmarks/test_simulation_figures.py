"""Fair shares, tenants over windows of time, and the formulas that stand for a model."""

import pytest
from simulation.costs import CPU_135M, GPU_8B, LinearCost, RooflineCost, StepShape
from simulation.meter import Shares, fair_shares, jain


def test_jains_index() -> None:
    for values, index in [([], 1.0), ([0.0, 0.0], 1.0), ([3.0, 3.0, 3.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25)]:
        assert jain(values) == pytest.approx(index)
    assert jain([1.0, 3.0]) == pytest.approx(16 / (2 * 10))


def test_shares_are_max_min_fair() -> None:
    for demands, total, shares in [
        ([5.0, 5.0], 6.0, [3.0, 3.0]),
        ([100.0, 1.0, 2.0], 33.0, [30.0, 1.0, 2.0]),  # who asks for little gets it, and the rest is the other's
        ([10.0, 4.0, 10.0], 15.0, [5.5, 4.0, 5.5]),
        ([1.0, 2.0], 9.0, [1.0, 2.0]),
        ([], 9.0, []),
    ]:
        assert fair_shares(demands, total) == pytest.approx(shares)


def index_of(demands: dict[str, int], *served: dict[str, int]) -> float:
    """Jain's index of windows of 10 s, in each of which tenants that came at the start got so many tokens."""
    shares = Shares(window=10.0)
    for tenant, demand in demands.items():
        shares.arrive(tenant, demand, now=0.0)
    for number, tokens in enumerate(served):
        shares.serve(tokens.items(), now=10.0 * number)
    return shares.jain


def test_a_tenant_that_gets_less_than_its_share_lowers_the_index() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 100, now=0.0)
    shares.arrive("b", 100, now=0.0)
    shares.serve([("a", 30), ("b", 10)], now=5.0)  # fair were 20 each: ratios 1.5 and 0.5
    shares.serve([("a", 35), ("b", 35)], now=10.0)  # the first window is over
    assert shares.jain == pytest.approx(0.8)  # 2^2 / (2 x 2.5)


def test_windows_count_by_the_tokens_served_in_them_unless_nobody_lacks_anything() -> None:
    both = {"a": 1000, "b": 1000}
    assert index_of(both, {"a": 30, "b": 10}, {"a": 60, "b": 60}, {"a": 1}) == pytest.approx((0.8 * 40 + 120) / 160)
    assert index_of({"a": 30, "b": 10}, {"a": 30, "b": 10}, {}) == 1.0
    # Who asks for little and gets it is served fairly.
    assert index_of({"flood": 1000, "small": 5}, {"flood": 95, "small": 5}, {"flood": 100}) == pytest.approx(1.0)


def test_tokens_that_need_not_be_computed_are_no_demand() -> None:
    shares = Shares(window=10.0)
    for tenant in ("a", "b", "c"):
        shares.arrive(tenant, 1000, now=0.0)
    shares.admit("b", 990, now=0.0)  # all but 10 of its tokens were in the cache
    shares.leave("c", 1000, was_admitted=False)  # went away at once
    shares.serve([("a", 90), ("b", 10)], now=1.0)
    shares.serve([("a", 1)], now=10.0)
    assert shares.jain == pytest.approx(1.0)


def test_the_longest_that_a_tenant_waits_for_a_slot() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 1, now=0.0)
    shares.arrive("a", 1, now=1.0)
    shares.admit("a", 0, now=2.0)  # 2 s after its first request came
    shares.admit("a", 0, now=5.0)  # 3 s after it last got one
    shares.arrive("a", 1, now=50.0)  # nobody waited in between
    shares.admit("a", 0, now=51.0)
    shares.arrive("b", 1, now=51.0)
    shares.admit("b", 0, now=52.0)
    assert shares.longest_gap == 3.0


def test_a_linear_cost_adds_up_its_parts() -> None:
    cost = LinearCost(step=1.0, prompt_token=0.1, decode_row=0.01, context_token=0.001, copied_token=0.0001)
    shape = StepShape(num_prompt_tokens=2, num_decode_rows=3, num_context_tokens=4, num_copied_tokens=5)
    assert cost.seconds(shape) == pytest.approx(1.2345)


ROOFLINE = RooflineCost(overhead=0.5, num_parameters=10, parameter_bytes=2, bytes_per_token=4, bandwidth=20, rate=100)


def test_a_roofline_takes_the_longer_of_reading_and_computing() -> None:
    for shape, seconds in [
        (StepShape(0, 1, 0), 0.5 + 1.0),  # 20 bytes of weights; 20 operations take but 0.2 s
        (StepShape(0, 1, 5), 0.5 + 2.0),  # and 20 bytes of the cache
        (StepShape(9, 1, 5), 0.5 + 2.0),  # 200 operations just hide behind them
        (StepShape(19, 1, 5), 0.5 + 4.0),  # 400 do not
        (StepShape(0, 1, 0, num_copied_tokens=5), 0.5 + 1.0 + 2.0),  # 20 bytes are read and written
    ]:
        assert ROOFLINE.seconds(shape) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("num_requests", "num_prompt", "num_output", "measured"),
    [(1, 128, 128, 1.146), (8, 128, 128, 1.604), (32, 128, 128, 3.223), (1, 1024, 1, 0.142), (32, 1024, 64, 7.81)],
)
def test_the_fitted_cost_gives_the_times_it_was_fitted_to(
    num_requests: int, num_prompt: int, num_output: int, measured: float
) -> None:
    """benchmarks/results/compare-135m-bf16-xeon-amx-2-cores.json; prompts in steps of 1,024 tokens, then all decode."""
    num_prefill_steps = -(-num_requests * num_prompt // 1024)
    prefill = num_prefill_steps * CPU_135M.seconds(StepShape(num_requests * num_prompt // num_prefill_steps, 0, 0))
    context = num_requests * (num_prompt + num_output // 2)
    decode = (num_output - 1) * CPU_135M.seconds(StepShape(0, num_requests, context))
    assert prefill + decode == pytest.approx(measured, rel=0.03)


def test_an_8b_on_a_gpu_decodes_one_row_at_the_floor_of_reading_its_weights() -> None:
    assert GPU_8B.seconds(StepShape(0, 1, 0)) - GPU_8B.overhead == pytest.approx(3.7e-3, rel=0.01)
