"""Computes how long a step takes: a formula in the place of a model.

Two forms. `LinearCost` is fitted to measured steps: a fixed part (weights are read once), and so much for each token of
a prompt, each row that decodes, each token of context that such a row looks at, and each token copied between slots.
`RooflineCost` knows no measurement, only the hardware: a step takes as long as its bytes or its multiplications,
whichever is longer.
"""

from dataclasses import dataclass

_FLOPS_PER_PARAMETER = 2  # and token: a multiplication and an addition
_TRAFFIC_OF_COPY = 2  # a byte copied is read and written


@dataclass(frozen=True, slots=True)
class StepShape:
    """Holds what decides how long a step takes; all are numbers of tokens, but for `num_decode_rows`."""

    num_prompt_tokens: int
    num_decode_rows: int
    num_context_tokens: int  # held by the slots of the decode rows
    num_copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step, and of each of its parts."""

    step: float
    prompt_token: float
    decode_row: float
    context_token: float
    copied_token: float

    def seconds(self, shape: StepShape) -> float:
        """Returns how long this step takes."""
        return (
            self.step
            + self.prompt_token * shape.num_prompt_tokens
            + self.decode_row * shape.num_decode_rows
            + self.context_token * shape.num_context_tokens
            + self.copied_token * shape.num_copied_tokens
        )


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Two ceilings: bytes over memory bandwidth, and multiplications over their rate."""

    overhead: float  # seconds of a step that nothing hides
    num_parameters: float
    parameter_bytes: float
    bytes_per_token: float  # keys and values of all layers
    bandwidth: float  # bytes a second
    rate: float  # floating point operations a second

    def seconds(self, shape: StepShape) -> float:
        """Returns how long this step takes."""
        num_tokens = shape.num_prompt_tokens + shape.num_decode_rows
        num_read = self.num_parameters * self.parameter_bytes + self.bytes_per_token * shape.num_context_tokens
        computing = _FLOPS_PER_PARAMETER * self.num_parameters * num_tokens / self.rate
        copying = _TRAFFIC_OF_COPY * self.bytes_per_token * shape.num_copied_tokens / self.bandwidth
        return self.overhead + max(num_read / self.bandwidth, computing) + copying


# Least squares by hand over five workloads of benchmarks/results/compare-135m-bf16-xeon-amx-2-cores.json. A copied
# token is 23,040 bytes read and written at 26 GB/s.
CPU_135M = LinearCost(step=8.4e-3, prompt_token=131e-6, decode_row=174e-6, context_token=1.09e-6, copied_token=1.8e-6)
# 32 layers of 8 heads of 128, keys and values in two bytes; 4.3 TB/s and 790 TFLOP/s were measured on an H200.
GPU_8B = RooflineCost(
    overhead=0.2e-3, num_parameters=8.0e9, parameter_bytes=2.0, bytes_per_token=131_072, bandwidth=4.3e12, rate=790e12
)

CostModel = LinearCost | RooflineCost
COSTS: dict[str, CostModel] = {"135m-cpu": CPU_135M, "8b-h200": GPU_8B}
"""By the name that is given on the command line."""
