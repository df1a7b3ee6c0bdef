"""The short causal convolution of recurrent blocks: each feature of a token, weighted with the same of the last few.

A slot keeps the inputs of the last `kernel_size - 1` tokens, the oldest first, as the first elements of a state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from chairlift.kernels.ragged import LayerStates, RaggedRows

MOST_TAPS = 4
"""The largest kernel of the native code."""


class CausalConv(nn.Module):
    """The weights, in the shape that checkpoints give them."""

    def __init__(self, num_features: int, kernel_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(num_features)) if bias else None

    def taps(self) -> "Taps":
        """Returns them as a token's step uses them."""
        weights = self.weight.float().squeeze(1).T.contiguous()
        return Taps(weights, None if self.bias is None else self.bias.float())

    def advance(
        self,
        rows: "RaggedRows",
        states: "LayerStates",
        inputs: torch.Tensor,
        move_others: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Convolves a batch by kernels, and moves windows and pending inputs; see `recurrence.Recurrent`.

        `move_others` moves the other states: it gets what is convolved, after SiLU, of new and of replayed tokens, and
        its outputs are returned. None: there are no others, and the convolution of new tokens is the output.
        """
        from chairlift.kernels import causal_conv

        has_others = move_others is not None
        convolved = causal_conv.convolve(
            rows, states, inputs, self.weight, self.bias, is_gated=has_others, is_replayed=has_others
        )
        outputs = convolved if move_others is None else move_others(convolved)
        causal_conv.settle(rows, states, inputs, self.weight)  # last, as the others read what it overwrites
        return outputs


@dataclass(frozen=True, slots=True)
class Taps:
    """The weights in float32, by age: the oldest token's first."""

    weights: torch.Tensor  # [kernel_size, features]
    bias: torch.Tensor | None  # [features]

    def advance(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Convolves a token of each row, `[n, features]`, with the window in `state`, and takes it in, in place.

        `state`: `[n, at least (kernel_size - 1) * features]`.
        """
        num_kept, num_features = len(self.weights) - 1, x.shape[1]
        window = state[:, : num_kept * num_features].view(-1, num_kept, num_features)
        weighed = [*(window * self.weights[:-1]).unbind(1), x * self.weights[-1]]
        convolved: torch.Tensor = weighed[0]
        for each in weighed[1:]:
            convolved = convolved + each
        window.copy_(torch.cat((window[:, 1:], x.unsqueeze(1)), dim=1))
        return convolved if self.bias is None else convolved + self.bias


def unsqueeze_kernels(kernels: torch.Tensor) -> torch.Tensor:
    """`[features, kernel_size] -> [features, 1, kernel_size]`, as Hugging Face has them; biases stay as they are."""
    return kernels.unsqueeze(1) if kernels.dim() > 1 else kernels


def log_of_rates(rates: torch.Tensor) -> torch.Tensor:
    """Turns rates of decay below 0, as llama.cpp has them, `[heads]` or `[heads, 1]`, into the `A_log` they are of.

    ValueError if one is not below 0.
    """
    if not rates.is_meta and not bool((rates < 0).all()):
        raise ValueError("rates of decay must be below 0")
    return torch.log(-rates.float()).flatten()
