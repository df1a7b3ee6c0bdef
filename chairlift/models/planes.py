"""Integers of 2, 3, 5 or 6 bits in planes, as the kernels read them (`cpu/csrc/grouped/panel.h` draws them).

Each 32 neighbours of a row are 8 words of four bytes, and a value's bits are stored apart: first the lower 4 bits of
all, in 4 words, or of 2 and 3 bits the lower 2 in 2 words; then the others. A stored word holds fields of `width` bits:
the lowest fields of its four bytes are those of one word of values, the next fields those of the next word, and so on.
"""

import torch

GROUP_SIZE = 32
_LOW_HALVES = 0x0F0F0F0F


def joined(planes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 `[n, elements * num_bits / 8] -> [n, elements]`"""
    words = planes.reshape(len(planes), -1, num_bits, 4)
    first = 4 if num_bits > 4 else 2
    values = _fields(words[:, :, :first], first)
    if num_bits > first:
        values = values | _fields(words[:, :, first:], num_bits - first) << first
    return values.flatten(1)


def parted(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 `[n, elements] -> [n, elements * num_bits / 8]`: the inverse of `joined`."""
    words = values.view(len(values), -1, 8, 4)
    first = 4 if num_bits > 4 else 2
    low = _gathered(words & 2**first - 1, first)
    both = low if num_bits == first else torch.cat((low, _gathered(words >> first, num_bits - first)), dim=2)
    return both.flatten(1)


def paired(halves: torch.Tensor) -> torch.Tensor:
    """Lower bits of values as files of ggml have them -> as words.

    int32 `[n, m, 8] -> [n, 2, m, 4]`: low halves of bytes are values of m groups, and high halves those of m others.
    """
    first, second = halves.view(*halves.shape[:-1], 4, 2).unbind(-1)
    low = (first & _LOW_HALVES) | (second & _LOW_HALVES) << 4
    high = (first >> 4 & _LOW_HALVES) | (second & ~_LOW_HALVES)
    return torch.stack((low, high), dim=1)


def exchanged(words: torch.Tensor, width: int) -> torch.Tensor:
    """int32 `[..., 8 / width]`: field j of each byte of word i changes places with field i of word j."""
    for span in (4, 2, 1):
        if span * width > 4:
            continue
        fields = sum((2**width - 1) << place * width for place in range(8 // width) if not place & span)
        mask = int.from_bytes(bytes([fields] * 4), "little", signed=True)
        first, second = words.reshape(*words.shape[:-1], -1, 2, span).unbind(-2)
        moved = ((first >> span * width) ^ second) & mask
        words = torch.stack((first ^ moved << span * width, second ^ moved), dim=-2).flatten(-3)
    return words


def _fields(words: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 `[..., n, 4] -> [..., 8 n / width, 4]`"""
    fields = [words >> place & 2**width - 1 for place in range(0, 8, width)]
    return torch.stack(fields, dim=-2).flatten(-3, -2)


def _gathered(fields: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 `[n, groups, 8, 4] -> [n, groups, width, 4]`"""
    together = fields.view(*fields.shape[:2], width, 8 // width, 4).unbind(3)
    words = together[0]
    for place, each in enumerate(together[1:], 1):
        words = words | each << place * width
    return words
