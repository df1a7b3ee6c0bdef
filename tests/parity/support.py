"""Holds what comparisons of families with transformers' own classes share: random checkpoints, and forwards of
these.
"""

from functools import cache
from pathlib import Path
from typing import Any

from chairlift.config import DType
from chairlift.models import InvariantForward, PiecewiseForward, load_model, open_checkpoint
from chairlift.models.attention import Forward
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.cpu import CpuDecoder
from tests.support.checkpoints import make_checkpoint
from tests.support.forward_bench import SLOT_LEN, Bench

Families = dict[str, dict[str, Any]]
"""Fields of a config by name, which begins with the model type."""


class Checkpoints:
    """Random checkpoints of families, each made when it is first asked for."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self.get = cache(self._make)
        """The checkpoint of a family in a directory, and transformers' model of it."""

    def _make(self, directory: Path, family: str) -> tuple[Path, Any]:
        fields = {"model_type": family.partition(",")[0], "max_position_embeddings": 512, **self._families[family]}
        return directory / family, make_checkpoint(directory / family, seed=3, **fields)


def bench(path: Path, *, is_invariant: bool = False) -> Bench:
    """A forward in torch, layer by layer, in float32."""
    model = load_model(open_checkpoint(str(path)), DType.FLOAT32, "cpu", SLOT_LEN)
    forward: Forward = PiecewiseForward(model, TorchBackend(model.config.attention))
    return Bench(model.config, model.dtype, InvariantForward(model) if is_invariant else forward)


def native_bench(path: Path) -> Bench:
    """The forward in native code, in float32."""
    model = load_model(open_checkpoint(str(path)), DType.FLOAT32, "cpu", SLOT_LEN)
    return Bench(model.config, model.dtype, CpuDecoder(model, SLOT_LEN))
