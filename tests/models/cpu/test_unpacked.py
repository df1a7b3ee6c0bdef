"""Weights in groups as bfloat16 in tiles of AMX: every number is compared with a model of the instructions in torch."""

import pytest
import torch

from chairlift.models import planes
from chairlift.models.cpu.packing import LANES, PackedMatrix, pack_grouped
from tests.models.cpu import conftest, support
from tests.models.cpu.test_products import FORMATS, VOCAB, decoder, random_rows, random_weight
from tests.support.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.slow]

_TILE_DEPTH = 32


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> str:
    """The instruction set with AMX, which is emulated where the processor has none."""
    name = conftest.amx_or_emulated(monkeypatch)
    if name is None:
        pytest.skip("this processor has neither AMX nor what it is emulated with")
    return name


def stored_bytes(matrix: PackedMatrix) -> torch.Tensor:
    """float32 `[padded out, in]`: the bytes that weights are multiplied as; halves stand in the upper half."""
    words = matrix.panels.transpose(1, 2).contiguous().view(torch.uint8)  # [panels, 16, bytes of a row]
    rows = words.reshape(len(words) * LANES, -1)
    if matrix.num_bits == 8:
        return rows.float()
    if matrix.num_bits != 4:
        return planes.joined(rows, matrix.num_bits).float() * (8 if matrix.num_bits == 3 else 1)
    halves = rows.view(len(rows), -1, 1, 4)  # words 2 k, then 2 k + 1
    values = torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
    return (values << 4).float() if matrix.table is None else matrix.table[values.int()].float()


def unpacked(matrix: PackedMatrix) -> torch.Tensor:
    """bfloat16 `[padded out, in]`, without the units: 256 scales times 1 + byte / 256, plus what corrects for that."""
    assert matrix.scales is not None
    scales, offsets = matrix.scales.float(), torch.zeros(1) if matrix.offsets is None else matrix.offsets.float()
    if matrix.scales.dtype is torch.uint8 and matrix.offsets is None and matrix.steps is None:
        scales = (matrix.scales.int() << 23).view(torch.float32)  # powers of two
    if matrix.num_bits == 2:
        scales, offsets = (matrix.scales & 15).float(), (matrix.scales >> 4).float()
    if matrix.steps is not None:
        steps = matrix.steps.float().repeat_interleave(matrix.scales_per_step, dim=1)
        num_steps = 1 if offsets.dim() == 1 else 2
        both = steps.view(len(steps), -1, num_steps, matrix.scales_per_step, LANES).transpose(2, 3).flatten(1, 2)
        scales, offsets = scales * both[:, :, 0], offsets * ((16 if matrix.num_bits == 4 else 1) * both[:, :, -1])
    is_around_zero = matrix.num_bits == 8 or (matrix.offsets is None and matrix.num_bits != 2)
    offsets = offsets + scales * -(256.0 + (32 if matrix.num_bits in (3, 6) else 128) * is_around_zero)

    def by_element(each: torch.Tensor) -> torch.Tensor:
        return each.transpose(1, 2).flatten(0, 1).repeat_interleave(matrix.group_size, dim=1)

    # In float64, since products are added before they are rounded.
    products = by_element(256 * scales).double() * (1 + stored_bytes(matrix) / 256)
    return (products + by_element(offsets)).float().bfloat16()


def multiplied_in_tiles(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float32 `[n, out]` of bfloat16 `[n, in]` and `[out, in]`: even and odd elements of 32 are summed up apart."""
    sums = torch.zeros(len(rows), len(weights))
    for start in range(0, rows.shape[1], _TILE_DEPTH):
        parts = torch.zeros(2, len(rows), len(weights))
        for k in range(start, start + _TILE_DEPTH):
            parts[k % 2] += rows[:, k].float()[:, None] * weights[:, k].float()
        sums += parts[0] + parts[1]
    return sums


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("depth", [192, 576, 768])  # 1.5, 4.5 and 6 blocks of weights
def test_any_number_of_rows_gets_the_bits_of_the_model(name: str, depth: int, amx: str) -> None:
    weight, rows = random_weight(name, depth), random_rows(70, depth, torch.bfloat16)
    matrix = pack_grouped(weight)
    assert matrix.units is not None
    expected = (multiplied_in_tiles(rows, unpacked(matrix)) * matrix.units)[:, :VOCAB]
    forward = decoder(weight, torch.bfloat16, amx)
    for count in (1, 2, 16, 17, 32, 33, 70):
        assert torch.equal(forward.logits(rows[:count]), expected[:count])
    with support.threads(3):
        assert torch.equal(forward.logits(rows), expected)


def test_a_weight_is_off_by_a_rounding_to_bfloat16_at_most() -> None:
    for name in FORMATS:
        weight = random_weight(name, 576)
        matrix = pack_grouped(weight)
        assert matrix.units is not None
        ours = (unpacked(matrix).float() * matrix.units[:, None])[:VOCAB]
        exact = weight.dequantize()
        largest = (
            exact.view(VOCAB, -1, weight.group_size).abs().amax(dim=-1).repeat_interleave(weight.group_size, dim=1)
        )
        assert ((ours - exact).abs() <= exact.abs() * 2**-8 + largest * 2**-16).all()
