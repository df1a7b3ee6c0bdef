"""Norms and rotation of queries and keys in one kernel, beside the operators that they stand for."""

import pytest
import torch

from chairlift.kernels.head_rotation import HeadNorms, rotate
from chairlift.models.layers import RMSNorm
from chairlift.models.rotary import apply_rope
from tests.support.gpu import needs_gpu
from tests.support.triton_compiler import Compilation, assert_fits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 3, 9, 3


def by_operators(
    heads: torch.Tensor, num_heads: int, angles: torch.Tensor | None, norms: HeadNorms | None
) -> torch.Tensor:
    """In the dtype of the heads, as on a CPU."""
    heads = heads.cpu()
    if norms is not None:
        parts = []
        for factors, part in ((norms.query_factors, heads[:, :num_heads]), (norms.key_factors, heads[:, num_heads:])):
            norm = RMSNorm(len(factors), norms.eps, is_offset=norms.is_offset)
            norm.weight.data = factors.cpu()
            parts.append(norm(part))
        heads = torch.cat(parts, dim=1)
    return heads if angles is None else apply_rope(heads, *angles.cpu())


def assert_equal(head_dim: int, num_rotated: int, norm: str, dtype: torch.dtype, num_tokens: int = NUM_TOKENS) -> None:
    torch.manual_seed(head_dim)
    fused = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim).to(DEVICE, dtype)
    heads = fused[:, : NUM_HEADS + NUM_KV_HEADS]
    angles = None
    if num_rotated:
        steps = torch.randn(num_tokens, 1, num_rotated // 2).repeat(1, 1, 2)
        angles = torch.stack((steps.cos(), steps.sin())).to(DEVICE, dtype)
    factors = torch.rand(2, head_dim).to(DEVICE, dtype)
    norms = HeadNorms(factors[0], factors[1], 1e-6, norm == "offset") if norm else None
    cosines, sines = (None, None) if angles is None else angles
    output = rotate(heads, NUM_HEADS, cosines, sines, norms).cpu()
    wanted, tolerance = by_operators(heads, NUM_HEADS, angles, norms), TOLERANCES[dtype]
    torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "num_rotated", "norm"),
    [(32, 32, ""), (80, 80, "plain"), (64, 16, "plain"), (64, 64, "offset"), (32, 0, "plain"), (96, 72, "")],
)
@torch.inference_mode()
def test_heads_are_normalised_and_rotated(head_dim: int, num_rotated: int, norm: str, dtype: torch.dtype) -> None:
    assert_equal(head_dim, num_rotated, norm, dtype)


@needs_gpu
@pytest.mark.parametrize(("head_dim", "norm"), [(128, ""), (128, "plain"), (256, "offset")])
@torch.inference_mode()
def test_heads_of_the_sizes_that_are_served(head_dim: int, norm: str) -> None:
    assert_equal(head_dim, head_dim, norm, torch.bfloat16, num_tokens=500)


_TENSORS = "heads", "output", "cosines", "sines", "query_factors", "key_factors"
_STRIDES = "token_stride", "head_stride", "angle_stride"


def _compilation(name: str, **changed: object) -> Compilation:
    constants = {"HQ": 16, "HALL": 24, "D": 128, "DP": 128, "R": 128, "NORMS": True, "IS_OFFSET": False, "H": 8}
    return Compilation(
        name,
        "chairlift.kernels.head_rotation",
        "_rotate",
        {**dict.fromkeys(_TENSORS, "*bf16"), **dict.fromkeys(_STRIDES, "i32"), "eps": "fp32"},
        constants | changed,
        (*_TENSORS[1:], *_STRIDES),
        {"num_warps": 4},
        max_registers=80,
    )


COMPILATIONS = (
    _compilation("rotate"),
    _compilation("rotate a part", D=256, DP=256, R=64, IS_OFFSET=True),
    _compilation("rotate without norms", NORMS=False),
    _compilation("rotate a part without norms", D=80, R=32, NORMS=False),
    _compilation("norms alone", R=0),
)


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_it_compiles_for_a_gpu_without_spills(case: Compilation) -> None:
    assert_fits(case, __name__)
