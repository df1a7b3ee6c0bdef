"""Weights on their way into native code: the same bits as torch makes of blocks, and rows that become panels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.models.cpu.loading import UNPACKER, Change, write_panels
from chairlift.models.gguf import Unpacker, open_gguf, read_tensor
from chairlift.models.grouped import GroupedWeight
from tests.models.test_gguf import random_blocks
from tests.support.gguf_files import Kind, finish, new_writer
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

EXTREMES = (0.0, -0.0, 6e-8, -3e-6, 3e-5, 65504.0, -60000.0, 7000.0, 8190.0)


def with_extremes(kind: Kind, num_rows: int, num_blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks, the first of which have scales at the ends of what float16 holds."""
    blocks = random_blocks(kind, num_rows, num_blocks).reshape(num_rows * num_blocks, -1)
    halves = np.array(EXTREMES, np.float16).view(np.uint8).reshape(-1, 2)
    place = slice(-2, None) if kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q6_K) else slice(0, 2)
    blocks[: len(halves), place] = halves
    return blocks.reshape(num_rows, -1)


def read(path: Path, unpacker: Unpacker | None) -> list[torch.Tensor | None]:
    """The bits of all parts of the file's matrix."""
    weight = read_tensor(open_gguf(path).tensors["matrix"], unpacker)
    assert isinstance(weight, GroupedWeight)
    parts = (weight.values, weight.scales, weight.offsets, weight.scale_steps, weight.offset_steps)
    return [None if part is None else part.view(torch.uint8) for part in parts]


def are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


SEVERAL_PARTS = [(Kind.Q4_K, 5000, 2), (Kind.Q5_1, 5000, 16)]  # of which native code unpacks some rows at a time


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_blocks"), [*((kind, 33, 2) for kind in sorted(UNPACKER.kinds)), *SEVERAL_PARTS]
)
def test_blocks_become_the_bits_that_torch_makes_of_them(
    tmp_path: Path, kind: int, num_rows: int, num_blocks: int
) -> None:
    writer = new_writer(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("matrix", with_extremes(Kind(kind), num_rows, num_blocks), raw_dtype=Kind(kind))
    finish(writer)
    natively, in_torch = (read(tmp_path / "blocks.gguf", each) for each in (UNPACKER, None))
    assert [are_same(*parts) for parts in zip(natively, in_torch, strict=True)] == [True] * 5


def folded(row: list[int]) -> list[int]:
    """Eight values of 4 bits in four bytes: the second four in the high halves."""
    values = [half for byte in row for half in (byte & 15, byte >> 4)]
    return [low | high << 4 for low, high in zip(values[:4], values[4:], strict=True)]


@pytest.mark.parametrize(
    ("change", "made_of"),
    [(Change.NONE, list), (Change.TO_UNSIGNED, lambda row: [byte ^ 128 for byte in row]), (Change.FOLD_HALVES, folded)],
)
def test_words_of_sixteen_rows_stand_side_by_side(change: Change, made_of: Callable[[list[int]], list[int]]) -> None:
    num_words = 21
    rows = torch.randint(0, 256, (19, 4 * num_words), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    panels = torch.empty(2, num_words, 16, dtype=torch.int32)
    write_panels(rows, panels, change)
    places = panels.view(torch.uint8).view(2, num_words, 16, 4)
    for row, word in ((0, 0), (3, 20), (15, 7), (16, 1), (18, 20)):
        assert places[row // 16, word, row % 16].tolist() == made_of(rows[row, 4 * word : 4 * word + 4].tolist())
    assert not places[1, :, 3:].any()
