"""The packed product equals the plain one."""

import pytest
import torch
from torch.nn import functional as F

from chairlift.models.linear import Linear, can_pack

needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(1, dtype=torch.bfloat16)), reason="torch was built without oneDNN"
)


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_weight_gives_the_same_product(num_rows: int, bias: bool) -> None:
    torch.manual_seed(num_rows)
    layer = Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(num_rows, 48, dtype=torch.bfloat16)
    exact = F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
    layer.pack()
    torch.testing.assert_close(layer(x).float(), exact, atol=2e-2, rtol=2e-2)


@needs_packing
def test_packing_lets_go_of_the_plain_weight() -> None:
    layer = Linear(8, 8, bias=False, dtype=torch.bfloat16)
    layer.pack()
    assert list(layer.parameters()) == []


def test_float32_stays_plain() -> None:
    assert not can_pack(torch.empty(1))
