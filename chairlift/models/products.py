"""Products with a model's matrices on a GPU: of few rows by kernels of ours, where these are faster, else by cuBLAS.

Matrices in groups are read as they are stored, by kernels; for many rows, the numbers of one matrix at a time are
written to a workspace that all share, or float8 numbers are multiplied as such (`float8_products`). Which kernel a
shape takes is measured at start: over the matrices of that shape, with what a layer folds into the product. The results
depend on the table of these choices, which is logged, and on nothing else of the measurement.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from chairlift.errors import sized
from chairlift.kernels.few_rows import MAX_ROWS, Norm, Tile, multiply
from chairlift.kernels.grouped import GROUP_SIZES, StoredMatrix, dequantize
from chairlift.kernels.timing import measure
from chairlift.models import float8_products
from chairlift.models.blocks import StackedLinear
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import workspace_elements
from chairlift.models.layers import Linear, RMSNorm, Use

logger = logging.getLogger(__name__)

Stopwatch = Callable[[Callable[[], object]], float]
"""Microseconds that the work takes on the device."""

_SIZES = (1, 16, 32, MAX_ROWS)  # of rows: a choice is for as many, and fewer down to the size before
_PLAIN_ROWS = 16  # beyond, cuBLAS is as fast
_SHARE = 0.95  # of cuBLAS's time, that a kernel may take at most
_NUM_TIMED = 16  # matrices of a shape: together more than a cache holds
# By bits: those that won for a shape of 1 B or 8 B on an H200. To try one takes a second of compiling.
_ONE_ROW = {
    16: (Tile(2, 2048), Tile(4, 1024), Tile(8, 1024)),
    8: (Tile(4, 1024), Tile(4, 2048)),
    4: (Tile(8, 2048), Tile(4, 2048)),
}
_MORE_ROWS = {16: (Tile(32, 256), Tile(16, 256)), 8: (Tile(32, 128),), 4: (Tile(32, 128),)}


class ManyRows(Protocol):
    """A way to multiply more rows than kernels of ours take by a matrix in groups."""

    def multiply(self, x: torch.Tensor, matrix: StoredMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`[T, in] -> [T, out]`"""
        ...


class Workspace:
    """Is a `ManyRows`: holds the numbers of one matrix at a time.

    Products come one after the other, so all share it.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._elements = torch.empty(num_elements, dtype=dtype, device=device)

    def multiply(self, x: torch.Tensor, matrix: StoredMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`[T, in] -> [T, out]`, some outputs at a time if the matrix is larger than the workspace."""
        step = len(self._elements) // matrix.num_inputs
        products = []
        for start in range(0, matrix.num_outputs, step):
            some = slice(start, start + step)
            part = matrix.rows(some)
            numbers = self._elements[: part.num_outputs * part.num_inputs].view(part.num_outputs, part.num_inputs)
            dequantize(part, numbers)
            products.append(F.linear(x, numbers, None if bias is None else bias[some]))
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class ChosenProduct:
    """A `Product`: the one with a certain matrix. `tiles`: the choice for each of `_SIZES`; None: no kernel."""

    def __init__(
        self,
        matrix: StoredMatrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        tiles: tuple[Tile | None, ...],
        many_rows: ManyRows | None,
    ) -> None:
        self._matrix, self._bias, self._dtype, self._tiles, self._many_rows = matrix, bias, dtype, tiles, many_rows

    def folds(self, num_rows: int) -> bool:
        """See `Product`."""
        return self._tile(num_rows) is not None

    def folds_norm(self, num_rows: int) -> bool:
        """See `Product`. A row that is not divided by its rms yet may be beyond float16."""
        tile = self._tile(num_rows)
        return tile is not None and (tile.is_for_one_row or self._dtype == torch.bfloat16)

    def __call__(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product`."""
        if (tile := self._tile(len(x))) is not None:
            return _multiply(x, self._matrix, self._bias, tile, norm, addend)
        assert norm is None, "only kernels fold these in"
        assert addend is None, "only kernels fold these in"
        if self._many_rows is None:
            return F.linear(x, self._matrix.values, self._bias)
        return self._many_rows.multiply(x, self._matrix, self._bias)

    def _tile(self, num_rows: int) -> Tile | None:
        if num_rows == 0:  # a step of prompts that go on has no row whose logits anyone wants
            return None
        return next((tile for size, tile in zip(_SIZES, self._tiles, strict=True) if num_rows <= size), None)


@dataclass(frozen=True, slots=True)
class _Site:
    """A matrix of the model, and what its layer folds into the product."""

    linear: Linear
    matrix: StoredMatrix
    use: Use

    @property
    def shape(self) -> tuple[object, ...]:
        """Sites that are equal in this take the same time."""
        matrix, use = self.matrix, self.use
        groups = matrix.group_size, *(None if each is None else each.dtype for each in (matrix.scales, matrix.offsets))
        what = use.norm is not None, use.adds, self.linear.bias is None
        return matrix.values.dtype, matrix.num_outputs, matrix.num_inputs, groups, what

    @property
    def is_float(self) -> bool:
        """Tells if the matrix holds float8 numbers, or their bytes."""
        grouped = self.linear.grouped
        return grouped is not None and grouped.is_float

    def describe(self) -> str:
        """Names the shape, for the log."""
        matrix, use = self.matrix, self.use
        number = "float8" if self.is_float else f"{matrix.num_bits} bits"
        kind = "" if matrix.num_bits == 16 else f" of {number} in groups of {matrix.group_size}"
        folded = {"norm": use.norm is not None, "residual": use.adds}
        names = [name for name, is_folded in folded.items() if is_folded]
        return f"{matrix.num_outputs} x {matrix.num_inputs}{kind} with {' and '.join(names) or 'nothing'}"

    def by_kernel(self, x: torch.Tensor, addend: torch.Tensor | None, tile: Tile) -> torch.Tensor:
        """The product with all that is folded in."""
        norm = self.use.norm if tile.is_for_one_row or x.dtype == torch.bfloat16 else None
        return _multiply(x, self.matrix, self.linear.bias, tile, norm, addend)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """The same without kernels of ours. The residual is added by the norm that follows, in no time."""
        norm = self.use.norm
        x = x if norm is None else norm.add(x, x)[1]
        return F.linear(x, self.matrix.values, self.linear.bias)


def install_products(
    model: Decoder, stopwatch: Stopwatch = measure, *, can_start_early: bool = False, reads_float8: bool = True
) -> dict[str, tuple[Tile | None, ...]]:
    """Chooses a way for every product of the model, whose matrices are on the device. Returns the table, for the log.

    `can_start_early`: the device has programmatic dependent launch; `reads_float8`: it has instructions for float8.
    """
    start = time.perf_counter()
    for module in model.modules():
        if isinstance(module, StackedLinear) and module.grouped is not None:
            module.stored = _stored(module, model.dtype, reads_float8=reads_float8)
    by_shape: dict[tuple[object, ...], list[_Site]] = {}
    for site in _find_sites(model, reads_float8=reads_float8):
        by_shape.setdefault(site.shape, []).append(site)
    many_rows, table = _choose_for_many_rows(model, by_shape), {}
    for sites in by_shape.values():
        first = sites[0]
        tiles = tuple(_choose(sites, size, model, stopwatch, can_start_early=can_start_early) for size in _SIZES)
        table[first.describe()] = tiles
        for site in sites:
            own = many_rows.get(site.shape)
            site.linear.product = ChosenProduct(site.matrix, site.linear.bias, model.dtype, tiles, own)
    logger.info("products of few rows were timed in %.1f s", time.perf_counter() - start)
    return table


def _find_sites(model: Decoder, *, reads_float8: bool) -> Iterator[_Site]:
    uses: dict[Linear, Use] = {}
    for layer in model.layers:
        uses |= layer.uses()
    for module in model.modules():
        if isinstance(module, Linear) and module.is_whole:
            matrix = _stored(module, model.dtype, reads_float8=reads_float8)
            if matrix is not None:
                yield _Site(module, matrix, uses.get(module, Use()))


def _stored(linear: Linear, dtype: torch.dtype, *, reads_float8: bool) -> StoredMatrix | None:
    """The matrix as kernels take it. None: plain numbers of 32 bits stay with cuBLAS."""
    grouped = linear.grouped
    if grouped is None:
        return StoredMatrix(16, linear.weight.detach()) if dtype.itemsize == 2 else None
    grouped = grouped.without_table()
    has_row_scales = grouped.is_float and grouped.scales.shape[1] == 1
    if grouped.group_size not in GROUP_SIZES and not has_row_scales:
        grouped = grouped.regrouped(GROUP_SIZES[0])
    values = grouped.values if reads_float8 or not grouped.is_float else grouped.values.view(torch.uint8)
    scales = grouped.scales.float() if has_row_scales else grouped.scales
    return StoredMatrix(grouped.num_bits, values, scales, grouped.offsets)


def _choose_for_many_rows(
    model: Decoder, by_shape: Mapping[tuple[object, ...], list[_Site]]
) -> dict[tuple[object, ...], ManyRows]:
    """By shape; plain numbers have no entry."""
    grouped = {shape: sites[0].matrix for shape, sites in by_shape.items() if sites[0].matrix.num_bits < 16}
    chosen: dict[tuple[object, ...], ManyRows] = {}
    for shape, matrix in grouped.items():
        if float8_products.suits(matrix, model.dtype) and float8_products.is_available(model.device):
            chosen[shape] = float8_products.Float8Products()
    others = [shape for shape in grouped if shape not in chosen]
    if others:
        chosen |= dict.fromkeys(others, _make_workspace(model, [grouped[shape] for shape in others]))
    return chosen


def _make_workspace(model: Decoder, matrices: list[StoredMatrix]) -> Workspace:
    num_elements = max(workspace_elements(each.num_outputs, each.num_inputs) for each in matrices)
    logger.info(
        "matrices in groups are read as they are stored; with more than %d rows, through a workspace of %s",
        MAX_ROWS,
        sized(num_elements * model.dtype.itemsize),
    )
    return Workspace(num_elements, model.dtype, model.device)


def _choose(
    sites: list[_Site], num_rows: int, model: Decoder, stopwatch: Stopwatch, *, can_start_early: bool
) -> Tile | None:
    """The fastest tile for so many rows; None: cuBLAS's way takes little more, or less."""
    is_plain = sites[0].matrix.num_bits == 16
    if is_plain and num_rows > _PLAIN_ROWS:
        return None
    timed = sites[:_NUM_TIMED]
    x = torch.randn(num_rows, sites[0].matrix.num_inputs, dtype=model.dtype, device=model.device)
    width = sites[0].matrix.num_outputs
    addend = torch.zeros(num_rows, width, dtype=model.dtype, device=model.device) if sites[0].use.adds else None

    def clock(tile: Tile) -> float:
        try:
            return stopwatch(lambda: [site.by_kernel(x, addend, tile) for site in timed]) / len(timed)
        except OutOfResources as error:  # of a smaller device than these tiles are for
            logger.info("%s: %s does not fit: %s", sites[0].describe(), tile, error)
            return float("inf")

    candidates = _candidates(sites[0].matrix, num_rows)
    times = {tile: clock(tile) for tile in candidates}
    best = min(candidates, key=times.__getitem__)
    if can_start_early:
        early = replace(best, is_early=True)
        times[early] = clock(early)
        best = min(best, early, key=times.__getitem__)
    limit = float("inf")
    if is_plain:
        library = stopwatch(lambda: [site.by_library(x) for site in timed]) / len(timed)
        limit = _SHARE * library
        logger.info("%s, %d rows: cuBLAS takes %.1f us", sites[0].describe(), num_rows, library)
    is_chosen = times[best] < limit
    verdict = "is chosen" if is_chosen else "is not faster"
    logger.info("%s, %d rows: %s takes %.1f us and %s", sites[0].describe(), num_rows, best, times[best], verdict)
    return best if is_chosen else None


def _candidates(matrix: StoredMatrix, num_rows: int) -> tuple[Tile, ...]:
    alone = tuple(replace(tile, is_for_one_row=True) for tile in _ONE_ROW[matrix.num_bits])
    return (*alone, *_MORE_ROWS[matrix.num_bits]) if num_rows == 1 else _MORE_ROWS[matrix.num_bits]


def _multiply(
    x: torch.Tensor,
    matrix: StoredMatrix,
    bias: torch.Tensor | None,
    tile: Tile,
    norm: RMSNorm | None,
    addend: torch.Tensor | None,
) -> torch.Tensor:
    folded = None if norm is None else Norm(norm.weight, norm.eps, norm.is_offset)
    return multiply(x, matrix, tile, norm=folded, bias=bias, addend=addend)
