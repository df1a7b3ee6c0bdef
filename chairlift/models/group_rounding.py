"""Rounds groups of numbers to integers of 8 or 4 bits, with a scale and perhaps an offset for each group."""

import torch

GROUP_SIZE = 32
_PARTS_OF_RANGE = (1.0, 0.94, 0.88)
_LEAST_SHARE = 1e-3  # of the mean of its group: no input is left out altogether


def shares_in_groups(importance: torch.Tensor) -> torch.Tensor:
    """float32 `[in]` -> `[n, 32]`: the share of each element in its group's importance, which is never 0."""
    groups = importance.view(-1, GROUP_SIZE)
    groups = groups + _LEAST_SHARE * groups.mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny
    return groups / groups.sum(dim=-1, keepdim=True)


def round_to_8_bits(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float32 `[out, n, 32]` -> int8 values and float32 scales `[out, n]`: the largest magnitude is about 127."""
    scales = _with_11_bits(groups.abs().amax(dim=-1) / 127)
    values = groups.mul(inverse(scales)[..., None]).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales


def round_to_4_bits(groups: torch.Tensor, shares: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """float32 `[out, n, 32]`, `[n, 32]` -> uint8 values `[out, n, 16]`, float32 scales and offsets `[out, n]`."""
    if shares is None:
        shares = torch.full((1, GROUP_SIZE), 1 / GROUP_SIZE)
    scales, offsets = _fit_4_bits(groups, shares)
    units = scales.amax(dim=1, keepdim=True) / 255
    scales = (scales * inverse(units)).round_() * units
    offsets = (offsets * inverse(-15 * units)).round_().clamp_(0, 255) * (-15 * units)
    integers = groups.sub(offsets[..., None]).mul_(inverse(scales)[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return integers[..., ::2] | (integers[..., 1::2] << 4), scales, offsets


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def _fit_4_bits(groups: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[out, n, 32]` -> the scales and offsets `[out, n]` with the least error among some candidates.

    The integers are tried on a group's whole range, and on parts of it, with elements beyond clamped to its ends. Each
    time least squares give a scale and an offset, cov(x, v) / var(v) and mean(x) - scale mean(v), where an element
    counts by its share, `[n, 32]`. The pair that explains most of the variance is taken, among those with 0 in their
    range.
    """
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    weighted = groups * shares
    mean = weighted.sum(dim=-1)
    best_explained, best_scales, best_offsets = torch.zeros_like(low), (high - low) / 15, low
    for part in _PARTS_OF_RANGE:
        cut = (high - low) * ((1 - part) / 2)
        values = groups.sub((low + cut)[..., None]).mul_(inverse((high - low) * (part / 15))[..., None])
        values.round_().clamp_(0, 15)
        mean_value = torch.linalg.vecdot(values, shares)
        covariance = torch.linalg.vecdot(weighted, values) - mean * mean_value
        scales = covariance * inverse(torch.linalg.vecdot(values.square(), shares) - mean_value.square())
        offsets, explained = mean - scales * mean_value, covariance * scales
        is_better = (explained > best_explained) & (offsets <= 0) & (offsets >= -15 * scales)
        best_explained = torch.where(is_better, explained, best_explained)
        best_scales = torch.where(is_better, scales, best_scales)
        best_offsets = torch.where(is_better, offsets, best_offsets)
    return best_scales, best_offsets


def _with_11_bits(numbers: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the precision of float16, whatever the exponent."""
    bits = numbers.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
