"""The formulas that stand for a model."""

import pytest
from simulation.costs import CPU_135M, GPU_8B, LinearCost, RooflineCost, StepShape


def test_a_linear_cost_adds_up_its_parts() -> None:
    cost = LinearCost(step=1.0, prompt_token=0.1, decode_row=0.01, context_token=0.001, copied_token=0.0001)
    shape = StepShape(num_prompt_tokens=2, num_decode_rows=3, num_context_tokens=4, num_copied_tokens=5)
    assert cost.seconds(shape) == pytest.approx(1.2345)


ROOFLINE = RooflineCost(overhead=0.5, num_parameters=10, parameter_bytes=2, bytes_per_token=4, bandwidth=20, rate=100)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (StepShape(0, 1, 0), 0.5 + 1.0),  # 20 bytes of weights; 20 operations take but 0.2 s
        (StepShape(0, 1, 5), 0.5 + 2.0),  # and 20 bytes of the cache
        (StepShape(9, 1, 5), 0.5 + 2.0),  # 200 operations just hide behind them
        (StepShape(19, 1, 5), 0.5 + 4.0),  # 400 do not
        (StepShape(0, 1, 0, num_copied_tokens=5), 0.5 + 1.0 + 2.0),  # 20 bytes are read and written
    ],
)
def test_a_roofline_takes_the_longer_of_reading_and_computing(shape: StepShape, seconds: float) -> None:
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
