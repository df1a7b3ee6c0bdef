"""Matrices of float8 checkpoints as a GPU keeps them, from the files to the products, beside what they stand for."""

from pathlib import Path

import pytest
import torch

from chairlift.config import DType
from chairlift.models import load_model, open_checkpoint
from chairlift.models.decoder import Decoder
from chairlift.models.products import install_products
from tests.models.support import linear
from tests.models.test_float8 import CASES, DOWN, write
from tests.support.gpu import needs_gpu

# Only "cpu" by itself is the device that keeps no float8: by its number it stands for a GPU, in Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu:0"


def make(directory: Path, case: str, dtype: DType) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """The model with its products, and by its name what each of two matrices stands for."""
    expected = write(directory, case)
    model = load_model(open_checkpoint(str(directory)), dtype, DEVICE, 128, keeps_groups=True)
    install_products(model, lambda _: 1.0)
    stacked = torch.cat([expected[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    return model, {"0.self_attn.qkv_proj": stacked, "0.mlp.down_proj": expected[f"{DOWN}.weight"]}


@torch.inference_mode()
def error(model: Decoder, name: str, weight: torch.Tensor, num_rows: int) -> float:
    """The product's distance from the exact one, as a share of that."""
    x = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(num_rows)).to(model.dtype)
    exact = x.double() @ weight.double().T
    return float((linear(model, name)(x.to(DEVICE)).cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("case", CASES)
def test_stored_float8_is_multiplied_as_the_numbers_that_it_is(tmp_path: Path, case: str) -> None:
    model, matrices = make(tmp_path, case, DType.FLOAT16)
    for name, weight in matrices.items():
        grouped = linear(model, name).grouped
        assert grouped is not None
        assert grouped.is_float
        assert torch.equal(grouped.dequantize().cpu(), weight)
        assert max(error(model, name, weight, num_rows) for num_rows in (1, 3, 66)) < 2e-3


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_so_it_is_in_bfloat16_where_many_rows_become_float8_beside_row_scales(tmp_path: Path, case: str) -> None:
    model, matrices = make(tmp_path, case, DType.BFLOAT16)
    for name, weight in matrices.items():
        assert max(error(model, name, weight, num_rows) for num_rows in (1, 3)) < 1e-2
        grouped = linear(model, name).grouped
        assert grouped is not None
        assert error(model, name, weight, 66) < (6e-2 if grouped.scales.shape[1] == 1 else 1e-2)
