"""Computes what requests want of their prompts (`chairlift/prompt_work.py`), from last hidden states."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from chairlift.device import bring, to_device
from chairlift.engine.sampling.sampler import LogprobTensors, pick_logprobs
from chairlift.plan import RowPlan
from chairlift.prompt_work import (
    LabelLogits,
    LabelTask,
    PooledStates,
    Pooling,
    PoolTask,
    PromptPart,
    PromptResult,
    PromptScores,
    PromptTask,
    ScoreTask,
)

_BLOCK_SIZE = 64  # positions whose logits, or whose states in 64 bits, are in memory at the same time
# Of sums in 64 bits: finer than what float32 tells apart at 1, with room for a million states of thousands.
_UNIT = 2.0**-30
_MOST_UNITS = 2.0**42

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""`[N, hidden]` -> `[N, vocab]`."""

Finish = Callable[[], list[PromptResult]]
"""Returns the results of some parts, in order, once the copies to the host that were started are complete."""


class _Asked(NamedTuple):
    part: PromptPart
    hidden: torch.Tensor  # [num_tokens, hidden], a view of what may be overwritten after the launch


class PendingResults:
    """Holds what a launch computed of prompts while it is copied to the host."""

    def __init__(self, rows: Sequence[RowPlan], hidden: torch.Tensor, logits_of: LogitsOf) -> None:
        """`hidden`: of all new tokens of the rows, `[T, hidden]`."""
        by_kind: dict[type[PromptTask], dict[int, _Asked]] = defaultdict(dict)
        start = 0
        for index, row in enumerate(rows):
            if (part := row.work.part) is not None:
                first = start + part.first
                by_kind[type(part.task)][index] = _Asked(part, hidden[first : first + part.num_tokens])
            start += row.num_new_tokens
        self._finishes = {
            tuple(asked): _KINDS[kind](list(asked.values()), logits_of) for kind, asked in by_kind.items()
        }

    def to_host(self) -> dict[int, PromptResult]:
        """Returns the results, by row of the plan, once the launch is over."""
        return {
            index: result
            for indices, finish in self._finishes.items()
            for index, result in zip(indices, finish(), strict=True)
        }


def _score(parts: list[_Asked], logits_of: LogitsOf) -> Finish:
    """Scores the tokens that follow, part by part."""
    tensors = [_score_tokens(each, logits_of).bring() for each in parts]
    return lambda: [PromptScores(each.to_host()) for each in tensors]


def _score_tokens(asked: _Asked, logits_of: LogitsOf) -> LogprobTensors:
    """Scores a part, a block of positions at a time."""
    task, hidden = asked.part.task, asked.hidden
    assert isinstance(task, ScoreTask), "the table of kinds says so"
    following = to_device(asked.part.following, torch.int64, hidden.device)
    blocks = zip(torch.split(hidden, _BLOCK_SIZE), torch.split(following, _BLOCK_SIZE), strict=True)
    return LogprobTensors.join(
        [pick_logprobs(logits_of(block).float().log_softmax(dim=-1), own, task.num_top) for block, own in blocks]
    )


def _pool(parts: list[_Asked], _: LogitsOf) -> Finish:
    """Pools the parts: single states all at once, sums of several one after the other."""
    single = [index for index, each in enumerate(parts) if _pooling_of(each) is Pooling.LAST]
    states = bring(torch.cat([parts[index].hidden for index in single]).float()) if single else None
    sums = {index: bring(_sum(each.hidden)) for index, each in enumerate(parts) if index not in set(single)}

    def finish() -> list[PromptResult]:
        results: dict[int, PromptResult] = {}
        for row, index in enumerate(single):
            assert states is not None, "there are some"
            results[index] = PooledStates(_array("f", states[row]), 1, 1.0, bool(states[row].isfinite().all()))
        for index, brought in sums.items():
            num_tokens = parts[index].part.num_tokens
            results[index] = PooledStates(_array("q", brought[:-1]), num_tokens, _UNIT, not brought[-1])
        return [results[index] for index in range(len(parts))]

    return finish


def _pooling_of(asked: _Asked) -> Pooling:
    assert isinstance(asked.part.task, PoolTask), "the table of kinds says so"
    return asked.part.task.pooling


def _sum(hidden: torch.Tensor) -> torch.Tensor:
    """`[N, hidden]` -> int64 `[hidden + 1]`: the sum in units, and how many elements are no number or too large."""
    total = torch.zeros(hidden.shape[1] + 1, dtype=torch.int64, device=hidden.device)
    for block in torch.split(hidden, _BLOCK_SIZE):
        units = block.double() / _UNIT
        is_bad = ~(units.abs() <= _MOST_UNITS)  # also true of what is no number
        total[:-1] += units.masked_fill_(is_bad, 0.0).round_().long().sum(dim=0)
        total[-1] += is_bad.sum()
    return total


def _array(typecode: Literal["f", "q"], tensor: torch.Tensor) -> "array[float] | array[int]":
    """The elements of a tensor on the host, whose type is that of the typecode."""
    elements: array[float] | array[int] = array(typecode)
    elements.frombytes(tensor.contiguous().numpy().tobytes())
    return elements


def _label(parts: list[_Asked], logits_of: LogitsOf) -> Finish:
    """Computes the logits of labels after prompts, a block of prompts at a time."""
    brought: list[torch.Tensor] = []
    for start in range(0, len(parts), _BLOCK_SIZE):
        block = parts[start : start + _BLOCK_SIZE]
        logits = logits_of(torch.cat([each.hidden for each in block])).float()
        for row, each in enumerate(block):
            assert isinstance(each.part.task, LabelTask), "the table of kinds says so"
            labels = to_device(each.part.task.token_ids, torch.int64, logits.device)
            brought.append(bring(logits[row].gather(0, labels)))
    return lambda: [LabelLogits(tuple(each.tolist())) for each in brought]


_KINDS: dict[type[PromptTask], Callable[[list[_Asked], LogitsOf], Finish]] = {
    ScoreTask: _score,
    PoolTask: _pool,
    LabelTask: _label,
}
