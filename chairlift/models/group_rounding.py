"""Rounds groups of numbers to integers of 4, 5, 6 or 8 bits, with a scale and perhaps an offset for each group."""

import torch

from chairlift.models import planes

GROUP_SIZE = 32
HALF_GROUP_SIZE = 16  # of 6 bits
_CANDIDATES = {
    4: ((0.0, 1 / 15), (0.03, 0.94 / 15), (0.06, 0.88 / 15)),
    5: ((0.0, 1 / 31), (0.0, 1 / 30), (0.03, 0.94 / 31)),
}
"""By bits, where in a group's range the integers begin, and how far apart they are, as shares of it."""
_LEAST_SHARE = 1e-3  # of the mean of its group: no input is left out altogether
_ZERO_OF_6_BITS = 32
_FULL_BYTE, _FULL_SIGNED_BYTE = 255, 127


def shares_in_groups(importance: torch.Tensor, group_size: int = GROUP_SIZE) -> torch.Tensor:
    """float32 `[in]` -> `[n, group_size]`: the share of each element in its group's importance, which is never 0."""
    groups = importance.view(-1, group_size)
    groups = groups + _LEAST_SHARE * groups.mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny
    return groups / groups.sum(dim=-1, keepdim=True)


def round_to_8_bits(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float32 `[out, n, 32]` -> int8 values and float32 scales `[out, n]`: the largest magnitude is about 127."""
    scales = _with_11_bits(groups.abs().amax(dim=-1) / 127)
    values = groups.mul(inverse(scales)[..., None]).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales


def round_to_6_bits(groups: torch.Tensor, shares: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """float32 `[out, n, 16]`, `[n, 16]` -> uint8 values in planes, int8 counts `[out, n]`, float32 steps `[out, 1]`.

    A scale is so many times its row's step. Their number of groups is even, as planes are of 32 elements.
    """
    if shares is None:
        shares = torch.full((1, HALF_GROUP_SIZE), 1 / HALF_GROUP_SIZE)
    scales = _fit_6_bits(groups, shares)
    steps = _with_11_bits(scales.abs().amax(dim=1, keepdim=True) / _FULL_SIGNED_BYTE)
    counts = (scales * inverse(steps)).round_().nan_to_num_().clamp_(-_FULL_SIGNED_BYTE, _FULL_SIGNED_BYTE)
    values = _values_of_6_bits(groups, counts * steps) + _ZERO_OF_6_BITS
    return planes.parted(values.nan_to_num_().to(torch.uint8).flatten(1), 6), counts.to(torch.int8), steps


def round_to_5_bits(groups: torch.Tensor, shares: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """float32 `[out, n, 32]`, `[n, 32]` -> uint8 values in planes, uint8 counts of scales and of offsets `[out, n]`,
    and the float32 steps of both, `[out, 1]`.

    A scale or an offset is so many times its row's step, and the steps of offsets are negative.
    """
    scales, offsets = _fit_with_offsets(groups, shares, 5)
    scale_counts, scale_steps = _counted(scales)
    offset_counts, offset_steps = _counted(offsets)
    values = groups.sub((offset_counts * offset_steps)[..., None])
    values = values.mul_(inverse(scale_counts * scale_steps)[..., None]).round_().nan_to_num_().clamp_(0, 31)
    integers = planes.parted(values.to(torch.uint8).flatten(1), 5)
    return integers, scale_counts.to(torch.uint8), offset_counts.to(torch.uint8), scale_steps, offset_steps


def round_to_4_bits(groups: torch.Tensor, shares: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """float32 `[out, n, 32]`, `[n, 32]` -> uint8 values `[out, n, 16]`, float32 scales and offsets `[out, n]`."""
    scales, offsets = _fit_with_offsets(groups, shares, 4)
    units = scales.amax(dim=1, keepdim=True) / _FULL_BYTE
    scales = (scales * inverse(units)).round_() * units
    offsets = (offsets * inverse(-15 * units)).round_().clamp_(0, 255) * (-15 * units)
    integers = groups.sub(offsets[..., None]).mul_(inverse(scales)[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return integers[..., ::2] | (integers[..., 1::2] << 4), scales, offsets


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def _fit_with_offsets(
    groups: torch.Tensor, shares: torch.Tensor | None, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[out, n, 32]` -> the scales and offsets `[out, n]` with the least error among some candidates.

    The integers are tried on a group's whole range, and on parts of it, with elements beyond clamped to its ends; 5
    bits also at half the distance of 4 bits, to which weights may have been rounded or trained before. Each time least
    squares give a scale and an offset, cov(x, v) / var(v) and mean(x) - scale mean(v), where an element counts by its
    share, `[n, 32]`; None: all are alike. The pair that explains most of the variance is taken, among those with 0 in
    their range.
    """
    if shares is None:
        shares = torch.full((1, GROUP_SIZE), 1 / GROUP_SIZE)
    largest = 2**num_bits - 1
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    weighted = groups * shares
    mean = weighted.sum(dim=-1)
    best_explained, best_scales, best_offsets = torch.zeros_like(low), (high - low) / largest, low
    for first, distance in _CANDIDATES[num_bits]:
        start = low + (high - low) * first
        values = groups.sub(start[..., None]).mul_(inverse((high - low) * distance)[..., None])
        values.round_().clamp_(0, largest)
        mean_value = torch.linalg.vecdot(values, shares)
        covariance = torch.linalg.vecdot(weighted, values) - mean * mean_value
        scales = covariance * inverse(torch.linalg.vecdot(values.square(), shares) - mean_value.square())
        offsets, explained = mean - scales * mean_value, covariance * scales
        is_better = (explained > best_explained) & (offsets <= 0) & (offsets >= -largest * scales)
        best_explained = torch.where(is_better, explained, best_explained)
        best_scales = torch.where(is_better, scales, best_scales)
        best_offsets = torch.where(is_better, offsets, best_offsets)
    return best_scales, best_offsets


def _fit_6_bits(groups: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """float32 `[out, n, 16]` -> the scales `[out, n]` with the least error among some candidates.

    The integers, from -32 to 31, are tried with the element of the largest magnitude at -32 and, as most of a group
    then has more room, at -31. Each time least squares give the scale, mean(x v) / mean(v^2), where an element counts
    by its share, `[n, 16]`. The scale that explains most is taken.
    """
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    extreme = torch.where(-low > high, low, high)
    weighted = groups * shares
    best_explained, best_scales = torch.zeros_like(extreme), extreme / -_ZERO_OF_6_BITS
    for divisor in (-_ZERO_OF_6_BITS, -_ZERO_OF_6_BITS + 1):
        values = _values_of_6_bits(groups, extreme / divisor)
        product = torch.linalg.vecdot(weighted, values)
        scales = product * inverse(torch.linalg.vecdot(values.square(), shares))
        is_better = product * scales > best_explained
        best_explained = torch.where(is_better, product * scales, best_explained)
        best_scales = torch.where(is_better, scales, best_scales)
    return best_scales


def _values_of_6_bits(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 `[out, n, 16]`: the nearest of -32 to 31 times the scales `[out, n]`."""
    return groups.mul(inverse(scales)[..., None]).round_().clamp_(-_ZERO_OF_6_BITS, _ZERO_OF_6_BITS - 1)


def _counted(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[out, n]` of one sign -> counts from 0 to 255, and the steps `[out, 1]` that they count.

    A NaN makes its row's step NaN.
    """
    furthest = numbers.amax(dim=1, keepdim=True).clamp(min=0) + numbers.amin(dim=1, keepdim=True).clamp(max=0)
    steps = _with_11_bits(furthest / _FULL_BYTE)
    return (numbers * inverse(steps)).round_().nan_to_num_().clamp_(0, _FULL_BYTE), steps


def _with_11_bits(numbers: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the precision of float16, whatever the exponent."""
    bits = numbers.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
