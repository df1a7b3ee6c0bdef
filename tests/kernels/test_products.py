"""Products with kernels in the layers of a model: what they fold in, which are chosen, and matrices in groups."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import DType
from chairlift.kernels.few_rows import Tile
from chairlift.kernels.grouped import StoredMatrix
from chairlift.models import load_model, open_checkpoint
from chairlift.models.blocks.experts import StackedLinear
from chairlift.models.decoder import Decoder
from chairlift.models.float8_products import round_rows
from chairlift.models.grouped import GroupedWeight, round_to_float8
from chairlift.models.products import Stopwatch, Workspace, install_products
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Kind, write_model
from tests.support.gpu import needs_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
ROUNDS = 5, 2  # kernels that are timed for one row, and for more; cuBLAS comes after them


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, seed=1, **SHAPE)
    return path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in Q4_0."""
    path = tmp_path_factory.mktemp("quantized")
    return write_model(make_checkpoint(path, seed=1, **SHAPE), path / "model.gguf", Kind.Q4_0)


def load(path: Path, dtype: DType, *, keeps_groups: bool = False) -> Decoder:
    return load_model(open_checkpoint(str(path)), dtype, DEVICE, 128, keeps_groups=keeps_groups)


def stopwatch(*, share: float) -> Stopwatch:
    """Kernels take that share of cuBLAS's time."""
    times: Iterator[float] = itertools.cycle([*[share] * ROUNDS[0], 1.0, *[share] * ROUNDS[1], 1.0])
    return lambda _: next(times)


@torch.inference_mode()
def logits(model: Decoder, num_rows: int) -> torch.Tensor:
    """Returns the logits of tokens that attend to nothing but themselves."""
    tokens = torch.arange(num_rows, device=DEVICE) % SHAPE["vocab_size"]
    return model.logits(model(tokens, torch.arange(num_rows, device=DEVICE), lambda _, new: new.query)).cpu()


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_values_that_stand_for_numbers_become_these(tmp_path: Path) -> None:
    path = write_model(make_checkpoint(tmp_path, seed=1, **SHAPE), tmp_path / "model.gguf", Kind.MXFP4)
    kept, plain = (load(path, DType.FLOAT16, keeps_groups=each) for each in (True, False))
    install_products(kept, lambda _: 1.0)
    assert error(logits(kept, 3), logits(plain, 3)) < 5e-3


@pytest.mark.parametrize("num_rows", [1, 5, 66])  # one row, few, and more than kernels take
def test_groups_are_multiplied_as_the_numbers_that_they_are(quantized: Path, num_rows: int) -> None:
    kept, plain = (load(quantized, DType.FLOAT16, keeps_groups=each) for each in (True, False))
    install_products(kept, lambda _: 1.0)
    assert isinstance(kept.layers[0].get_submodule("mlp.down_proj").grouped, GroupedWeight)
    assert error(logits(kept, num_rows), logits(plain, num_rows)) < 5e-3


@pytest.mark.parametrize("num_rows", [1, 3])
def test_kernels_fold_in_norms_and_residuals(checkpoint: Path, num_rows: int) -> None:
    folding, plain = load(checkpoint, DType.FLOAT16), load(checkpoint, DType.FLOAT16)
    install_products(folding, stopwatch(share=0.5))
    assert all(edge.folds(num_rows) for layer in folding.layers for edge in layer.uses())
    assert error(logits(folding, num_rows), logits(plain, num_rows)) < 5e-3


def test_a_kernel_must_be_faster_by_a_twentieth(checkpoint: Path) -> None:
    faster, slower = load(checkpoint, DType.FLOAT16), load(checkpoint, DType.FLOAT16)
    chosen = install_products(faster, stopwatch(share=0.94))
    assert all(isinstance(tile, Tile) for tiles in chosen.values() for tile in tiles[:2])
    refused = install_products(slower, stopwatch(share=0.96))
    assert chosen.keys() == refused.keys()
    assert {tile for tiles in refused.values() for tile in tiles} == {None}
    assert torch.equal(logits(slower, 3), logits(load(checkpoint, DType.FLOAT16), 3))


def test_no_rows_are_multiplied_too(quantized: Path) -> None:
    model = load(quantized, DType.FLOAT16, keeps_groups=True)
    install_products(model, lambda _: 1.0)
    assert logits(model, 0).shape == (0, SHAPE["vocab_size"])


def test_many_rows_have_the_bits_of_torch_whatever_is_chosen(checkpoint: Path) -> None:
    model = load(checkpoint, DType.FLOAT16)
    install_products(model, stopwatch(share=0.5))
    assert torch.equal(logits(model, 17), logits(load(checkpoint, DType.FLOAT16), 17))


def test_a_large_matrix_goes_through_the_workspace_in_parts() -> None:
    values = torch.randint(-127, 128, (10, 64), dtype=torch.int8)
    scales = torch.rand(10, 2).half()
    x, bias = torch.randn(3, 64), torch.randn(10)
    workspace = Workspace(4 * 64, torch.float32, torch.device(DEVICE))
    got = workspace.multiply(x.to(DEVICE), StoredMatrix(8, values.to(DEVICE), scales.to(DEVICE)), bias.to(DEVICE))
    wanted = torch.nn.functional.linear(x, GroupedWeight(8, values, scales).dequantize(), bias)
    assert error(got.cpu(), wanted) < 1e-6  # sums of float32 in another order


@torch.inference_mode()
def rounded(model: Decoder) -> Decoder:
    """The same with the numbers that float8 matrices of its layers stand for."""
    for name, weight in list(model.named_parameters()):
        if model.can_round(name):
            weight.copy_(round_to_float8(weight).dequantize(weight.dtype))
    return model


@pytest.mark.parametrize("reads_float8", [True, False])
@pytest.mark.parametrize("num_rows", [1, 5, 66])
def test_float8_matrices_are_multiplied_as_they_are(checkpoint: Path, num_rows: int, reads_float8: bool) -> None:
    opened = open_checkpoint(str(checkpoint))
    kept = load_model(opened, DType.FLOAT16, DEVICE, 128, is_float8=True)
    chosen = install_products(kept, lambda _: 1.0, reads_float8=reads_float8)
    assert "96 x 64 with nothing" in chosen  # the head stays as it is
    assert "64 x 96 of float8 in groups of 96 with residual" in chosen
    assert error(logits(kept, num_rows), logits(rounded(load(checkpoint, DType.FLOAT16)), num_rows)) < 5e-3


def test_many_rows_are_rounded_to_float8_beside_bfloat16(checkpoint: Path) -> None:
    opened = open_checkpoint(str(checkpoint))
    kept = load_model(opened, DType.BFLOAT16, DEVICE, 128, is_float8=True)
    install_products(kept, lambda _: 1.0)
    exact = logits(rounded(load(checkpoint, DType.BFLOAT16)), 66)
    assert 1e-3 < error(logits(kept, 66), exact) < 6e-2
    assert kept.layers[0].get_submodule("mlp.down_proj")(
        torch.empty(0, 96, dtype=torch.bfloat16, device=DEVICE)
    ).shape == (0, 64)


def test_a_row_is_rounded_by_itself() -> None:
    x = torch.randn(5, 64) * torch.tensor([[1e-3], [1.0], [1e4], [0.0], [7.0]])
    together, scales = round_rows(x.bfloat16())
    for index, row in enumerate(x.bfloat16()):
        alone, scale = round_rows(row[None])
        assert torch.equal(alone[0].view(torch.uint8), together[index].view(torch.uint8))
        assert torch.equal(scale[0], scales[index])
    assert torch.equal(together.float().abs().amax(1), torch.tensor([448.0, 448.0, 448.0, 0.0, 448.0]))


@pytest.mark.parametrize("num_rows", [1, 66])
def test_experts_in_groups_are_multiplied_as_the_numbers_that_they_are(tmp_path: Path, num_rows: int) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    model = make_checkpoint(tmp_path, model_type="qwen3_moe", seed=1, **SHAPE, **sizes)
    path = write_model(model, tmp_path / "model.gguf", Kind.Q4_0)
    kept, plain = (load(path, DType.FLOAT16, keeps_groups=each) for each in (True, False))
    install_products(kept, lambda _: 1.0)
    experts = [module for module in kept.modules() if isinstance(module, StackedLinear)]
    assert all(module.is_grouped for module in experts)
    assert error(logits(kept, num_rows), logits(plain, num_rows)) < 5e-3


def test_plain_matrices_of_experts_stay_with_torch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="mixtral", num_local_experts=4, **SHAPE)
    model = load(tmp_path, DType.FLOAT16)
    install_products(model, stopwatch(share=0.5))
    experts = [module for module in model.modules() if isinstance(module, StackedLinear)]
    assert len(experts) == 6
    assert {module.product for module in experts} == {None}


@needs_gpu
@pytest.mark.parametrize("make", ["quantized", "checkpoint"])
def test_a_model_with_measured_products_is_right(make: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(make)
    kept, plain = load(path, DType.BFLOAT16, keeps_groups=True), load(path, DType.BFLOAT16)
    install_products(kept, can_start_early=torch.cuda.get_device_capability() >= (9, 0))
    for num_rows in (1, 2, 16, 17, 64, 65):
        assert error(logits(kept, num_rows), logits(plain, num_rows)) < 3e-2


@needs_gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("reads_float8", [True, False])
def test_so_is_one_in_float8(checkpoint: Path, dtype: DType, reads_float8: bool) -> None:
    capability = torch.cuda.get_device_capability()
    if reads_float8 and capability < (8, 9):
        pytest.skip("this GPU has no instructions for float8")
    kept = load_model(open_checkpoint(str(checkpoint)), dtype, DEVICE, 128, is_float8=True)
    exact = rounded(load(checkpoint, dtype))
    install_products(kept, can_start_early=capability >= (9, 0), reads_float8=reads_float8)
    for num_rows in (1, 2, 16, 64):
        assert error(logits(kept, num_rows), logits(exact, num_rows)) < 3e-2
    assert error(logits(kept, 65), logits(exact, 65)) < 6e-2  # perhaps with rounded inputs
