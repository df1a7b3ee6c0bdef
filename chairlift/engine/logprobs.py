"""Log-probabilities: picked on the device, brought to the host when a launch is over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from chairlift.engine.transfers import bring, to_device
from chairlift.params import Logprob, TokenLogprobs

_BLOCK_SIZE = 64  # positions whose logits are in memory at the same time


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Of some positions: the token that stands there, its log-probability and rank, and the likeliest tokens."""

    tokens: torch.Tensor  # int64 [L]
    values: torch.Tensor  # float32 [L]
    ranks: torch.Tensor  # int64 [L], from 1
    top_tokens: torch.Tensor  # int64 [L, k]
    top_values: torch.Tensor  # float32 [L, k]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All positions of the parts, which have the same k, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            tokens=torch.cat([part.tokens for part in parts]),
            values=torch.cat([part.values for part in parts]),
            ranks=torch.cat([part.ranks for part in parts]),
            top_tokens=torch.cat([part.top_tokens for part in parts]),
            top_values=torch.cat([part.top_values for part in parts]),
        )

    def bring(self) -> Self:
        """A copy on its way to the host."""
        return type(self)(
            bring(self.tokens), bring(self.values), bring(self.ranks), bring(self.top_tokens), bring(self.top_values)
        )

    def to_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """By position, once it is there; `num_top[i]` of the likeliest tokens for position i."""
        columns = (self.tokens, self.values, self.ranks, self.top_tokens, self.top_values)
        rows = zip(*(column.tolist() for column in columns), num_top, strict=True)
        return [
            {token: Logprob(value, rank)} | _top(top_tokens[:count], top_values[:count], token)
            for token, value, rank, top_tokens, top_values, count in rows
        ]


def pick_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogprobTensors:
    """float32 `[L, vocab]` and int64 `[L]` -> what is reported of them."""
    values = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > values).sum(dim=-1) + 1
    top_values, top_tokens = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return LogprobTensors(tokens, values.squeeze(1), ranks, top_tokens, top_values)


def score_tokens(
    hidden: torch.Tensor, tokens: Sequence[int], num_top: int, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> LogprobTensors:
    """Log-probabilities of the tokens that follow hidden states `[L, hidden]`, a block of positions at a time."""
    following = to_device(tokens, torch.int64, hidden.device)
    parts = [
        pick_logprobs(logits_of(block).log_softmax(dim=-1), block_tokens, num_top)
        for block, block_tokens in zip(
            torch.split(hidden, _BLOCK_SIZE), torch.split(following, _BLOCK_SIZE), strict=True
        )
    ]
    return LogprobTensors.join(parts)


def _top(tokens: list[int], values: list[float], first: int) -> dict[int, Logprob]:
    pairs = zip(tokens, values, strict=True)
    return {token: Logprob(value, rank) for rank, (token, value) in enumerate(pairs, 1) if token != first}
