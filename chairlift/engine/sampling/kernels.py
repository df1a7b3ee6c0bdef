"""Chooses what samples all rows of a launch together: kernels in Triton on a CUDA device, else torch's operators."""

import functools
import importlib.util
import logging
from typing import Protocol

import torch

from chairlift.device import on_device
from chairlift.engine.sampling.drawing import DrawKind
from chairlift.kernels.changes import NO_CHANGES, Changes

logger = logging.getLogger(__name__)


class SampleRows(Protocol):
    """Samples rows together; see `drawing.sample_in_graph`, which is one."""

    def __call__(
        self, logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, step: torch.Tensor, /
    ) -> torch.Tensor: ...


class SampleChanged(Protocol):
    """Samples rows together, which may ask for changes of their logits."""

    def __call__(
        self,
        logits: torch.Tensor,
        kind: DrawKind,
        table: torch.Tensor,
        step: torch.Tensor,
        changes: Changes = NO_CHANGES,
        /,
    ) -> torch.Tensor: ...


def sample_by_kernels(
    logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, step: torch.Tensor, changes: Changes = NO_CHANGES, /
) -> torch.Tensor:
    """Samples as `drawing.sample_in_graph` does, in a few launches that read the logits as they are.

    The first one makes the changes that rows ask for, so that these do not cost the others theirs.
    """
    from chairlift.kernels.draw import draw_tokens

    if kind is DrawKind.GREEDY:
        return draw_tokens(logits, changes=changes)
    return draw_tokens(logits, table, step, changes, has_cutoffs=kind is DrawKind.TOP)


@functools.cache
def find_kernels(device: torch.device) -> SampleChanged | None:
    """Returns the kernels if they run on that device, which takes Triton and a C compiler; else None."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        with on_device(device):
            sample_by_kernels(
                torch.zeros(1, 16, device=device), DrawKind.GREEDY, torch.empty(0), torch.empty(0)
            ).tolist()
    except Exception as error:  # of the compiler, or due to a missing program or library: all have the same effect
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logger.warning("tokens are sampled operator by operator, which is slower: %s", reason)
        return None
    return sample_by_kernels
