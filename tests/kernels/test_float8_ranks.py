"""Matrices in float8 that are divided over ranks: together they compute what one rank does."""

from pathlib import Path
from threading import Lock

import pytest
import torch

from chairlift.config import DType
from chairlift.models import load_model, open_checkpoint
from chairlift.models.decoder import Decoder
from chairlift.models.layers import Linear, Product, RMSNorm
from chairlift.models.parallel import CheckpointPart, Group
from chairlift.models.products import install_products
from tests.models.test_parallel import on_ranks
from tests.support.checkpoints import make_checkpoint

TOKENS = torch.tensor([3, 14, 15, 9, 26])


class OneAtATime:
    """A `Product` for ranks that are threads: Triton's interpreter runs one kernel at a time."""

    def __init__(self, product: Product, lock: Lock) -> None:
        self.product, self.lock = product, lock
        self.folds, self.folds_norm = product.folds, product.folds_norm

    def __call__(
        self, x: torch.Tensor, norm: RMSNorm | None = None, addend: torch.Tensor | None = None
    ) -> torch.Tensor:
        with self.lock:
            return self.product(x, norm, addend)


@torch.inference_mode()
def logits(model: Decoder) -> torch.Tensor:
    """Returns the logits of tokens that attend to nothing but themselves."""
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), lambda _, new: new.query))


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of one GPU have no way to communicate")
def test_ranks_in_float8_compute_together_what_one_computes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, seed=3, num_hidden_layers=2, vocab_size=64, model_type="llama", attention_bias=True)
    opened, lock = open_checkpoint(str(tmp_path)), Lock()

    def load(group: Group | None) -> Decoder:
        part = opened if group is None else CheckpointPart.of(opened, group)
        model = load_model(part, DType.FLOAT16, "cpu", 32, is_float8=True)
        if isinstance(part, CheckpointPart):
            part.connect(model)
        with lock:
            install_products(model, lambda _: 1.0)
        for module in model.modules():
            if isinstance(module, Linear) and module.product is not None:
                module.product = OneAtATime(module.product, lock)
        return model

    first, second = on_ranks(2, lambda group: logits(load(group)))
    plain = logits(load_model(opened, DType.FLOAT16, "cpu", 32))
    assert torch.equal(first, second)
    alone = logits(load(None))
    assert float((first - alone).norm() / alone.norm()) < 3e-2  # half a row of o_proj and down_proj has its own scale
    assert float((first - plain).norm() / plain.norm()) < 5e-2
