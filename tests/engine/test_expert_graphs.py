"""Steps of a mixture of experts from recorded graphs, against the same steps operator by operator; see `test_mixed`."""

from pathlib import Path

import pytest
import torch

from chairlift.models import grouped_experts
from tests.engine.support import GREEDY, Recorder, core_of, tokens_of
from tests.engine.test_mixed import HEADS, MANY, SHAPE, engine, kernels, never_eager
from tests.support.checkpoints import make_checkpoint

__all__ = ["kernels"]  # for each test


def multiply_by_tensors(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Stands for the kernel of `grouped_experts`: no number comes to the host."""
    experts = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    return torch.einsum("ni,noi->no", x, weights[experts])


def test_steps_with_prompts_of_a_mixture_of_experts_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 32}
    make_checkpoint(tmp_path, model_type="qwen3_moe", seed=2, **{**SHAPE, **HEADS, **sizes})
    params = GREEDY.model_copy(update={"temperature": 1.0, "seed": 3})
    with engine(str(tmp_path), Recorder()) as plain:
        assert core_of(plain).executor.recordings is None  # of this type and device there is no kernel
        expected = tokens_of(plain.generate(MANY, params))
    for name, stand_in in {"suits": lambda *_: True, "is_available": lambda _: True}.items():
        monkeypatch.setattr(grouped_experts, name, stand_in)
    monkeypatch.setattr(grouped_experts, "multiply", multiply_by_tensors)
    recorder = Recorder()
    with engine(str(tmp_path), recorder, never_eager) as graphed:
        assert tokens_of(graphed.generate(MANY, params)) == expected
    assert recorder.num_replayed > len(MANY)
