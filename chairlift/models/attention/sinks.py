"""Adds sinks to the attention of kernels that have none, but return the logarithm of each softmax's sum.

A sink is one more score in the softmax, with a value of zero: e^s / (e^s + e^sink) of the output remains, where s is
that logarithm, which is sigmoid(s - sink).
"""

import torch

from chairlift.device import compiled_on_gpu


@compiled_on_gpu
def join_sinks(output: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """`[T, Hq, D]`, float32 `[Hq, T]` (logarithms of sums), float32 `[Hq]` -> `[T, Hq, D]`"""
    share = torch.sigmoid(sums.T - sinks)
    return (output * share.unsqueeze(-1)).to(output.dtype)
