"""Computes what requests want of their prompts (`chairlift/prompt_work.py`), from last hidden states."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from chairlift.device import to_device
from chairlift.engine.sampling.sampler import LogprobTensors, pick_logprobs
from chairlift.plan import RowPlan
from chairlift.prompt_work import PromptPart, PromptResult, PromptScores, PromptTask, ScoreTask

_BLOCK_SIZE = 64  # positions whose logits are in memory at the same time

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


_KINDS: dict[type[PromptTask], Callable[[list[_Asked], LogitsOf], Finish]] = {
    ScoreTask: _score,
}
