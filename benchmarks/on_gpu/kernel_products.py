"""Products of one row and of 16 with a model's matrices: our kernels in several divisions, and cuBLAS."""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from chairlift.kernels.few_rows import Norm, Tile, multiply
from chairlift.kernels.grouped import StoredMatrix, dequantize
from chairlift.models.grouped import GroupedWeight
from on_gpu.kernel_bench import Bench

_BYTES_TOGETHER = 200 << 20  # of the copies of a matrix: more than a cache holds
_MOST_COPIES = 8
_GROUP = 128
_EPS = 1e-5

_TILES: Mapping[tuple[int, int], Sequence[Tile]] = {  # by bits and rows
    (16, 1): tuple(Tile(*each, is_for_one_row=True) for each in ((4, 1024), (8, 512), (8, 1024), (2, 2048))),
    (8, 1): tuple(Tile(*each, is_for_one_row=True) for each in ((4, 1024), (8, 1024), (4, 2048))),
    (4, 1): tuple(Tile(*each, is_for_one_row=True) for each in ((4, 2048), (8, 1024), (8, 2048))),
    (16, 16): tuple(Tile(*each) for each in ((16, 256), (32, 128), (16, 128), (32, 256))),
    (8, 16): tuple(Tile(*each) for each in ((16, 128), (32, 128), (16, 256))),
    (4, 16): tuple(Tile(*each) for each in ((16, 128), (32, 128), (16, 256))),
}
_EARLY = (Tile(4, 1024, is_for_one_row=True, is_early=True), Tile(16, 256, is_early=True))


def measure(bench: Bench, *, is_tiny: bool) -> None:
    """Plain matrices of 8 B and 1 B shapes, then those of 8 B in 8 and 4 bits, then what a layer folds in."""
    dtype = torch.float16 if is_tiny else torch.bfloat16  # Triton's interpreter multiplies bfloat16's bits
    tiny = {"tiny": (48, 256)}
    large = {"8 B qkv": (6144, 4096), "8 B o": (4096, 4096), "8 B down": (4096, 14336), "8 B gate_up": (28672, 4096)}
    small = {"1 B qkv": (3072, 2048), "1 B o": (2048, 2048), "1 B down": (2048, 8192), "1 B gate_up": (16384, 2048)}
    for num_bits, shapes in ((16, large | small), (8, large), (4, large)):
        for name, shape in (tiny if is_tiny else shapes).items():
            matrices = _matrices(num_bits, *shape, dtype, bench.device)
            for num_rows in (1, 16):
                _measure(bench, f"{name}, {num_bits} bits, {num_rows} rows", matrices, num_rows, dtype)
            if name in ("8 B gate_up", "tiny"):
                _measure_folded(bench, f"{name}, {num_bits} bits", matrices[0], dtype)


def _matrices(
    num_bits: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device
) -> list[StoredMatrix]:
    """As many copies as it takes to leave the cache, with random numbers that keep the scale of what goes in."""
    count = min(_MOST_COPIES, _BYTES_TOGETHER // (num_outputs * num_inputs * num_bits // 8) + 1)
    return [_matrix(num_bits, num_outputs, num_inputs, dtype, device) for _ in range(count)]


def _matrix(num_bits: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> StoredMatrix:
    if num_bits == 16:
        numbers = torch.randn(num_outputs, num_inputs, device=device).mul_(num_inputs**-0.5)
        return StoredMatrix(16, numbers.to(dtype))
    width, limits, kind = (1, (-127, 128), torch.int8) if num_bits == 8 else (2, (0, 256), torch.uint8)
    values = torch.randint(*limits, (num_outputs, num_inputs // width), dtype=kind, device=device)
    deviation = 73.6 if num_bits == 8 else 4.6  # of the integers
    scales = torch.full((num_outputs, num_inputs // _GROUP), num_inputs**-0.5 / deviation, dtype=dtype, device=device)
    return StoredMatrix(num_bits, values, scales, None if num_bits == 8 else -7.5 * scales)


def _numbers(matrix: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The dense matrix `[out, in]`, by operators."""
    if matrix.num_bits == 16:
        return matrix.values
    assert matrix.scales is not None, "it has groups"
    return GroupedWeight(matrix.num_bits, matrix.values, matrix.scales, matrix.offsets).dequantize(dtype)


def _dequantized(matrix: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The same, written by the kernel that prompts use."""
    output = torch.empty(matrix.num_outputs, matrix.num_inputs, dtype=dtype, device=matrix.values.device)
    dequantize(matrix, output)
    return output


def _measure(bench: Bench, case: str, matrices: list[StoredMatrix], num_rows: int, dtype: torch.dtype) -> None:
    count, first = len(matrices), matrices[0]
    x = torch.randn(num_rows, first.num_inputs, dtype=dtype, device=bench.device)
    dense = _numbers(first, dtype)
    wanted = F.linear(x.float(), dense.float())
    if first.num_bits == 16:
        bench.run(case, "cuBLAS", lambda index: F.linear(x, matrices[index % count].values), wanted, first.num_bytes)
    else:  # what a prompt pays beside its product
        bench.run(case, "dequantize", lambda index: _dequantized(matrices[index % count], dtype), dense, dense.nbytes)
    early = [tile for tile in _EARLY if tile.is_for_one_row == (num_rows == 1) and bench.device.type == "cuda"]
    for tile in (*_TILES[first.num_bits, num_rows], *early):

        def work(index: int, tile: Tile = tile) -> torch.Tensor:
            return multiply(x, matrices[index % count], tile)

        bench.run(case, _name(tile), work, wanted, first.num_bytes)


def _measure_folded(bench: Bench, case: str, matrix: StoredMatrix, dtype: torch.dtype) -> None:
    """With the norm before it, of 16 rows and of one."""
    factors = torch.rand(matrix.num_inputs, device=bench.device).to(dtype)
    dense = _numbers(matrix, dtype).float()
    for num_rows in (1, 16):
        x = torch.randn(num_rows, matrix.num_inputs, dtype=dtype, device=bench.device)
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + _EPS) * factors.float()
        wanted = F.linear(normed, dense)
        tile = _TILES[matrix.num_bits, num_rows][0]

        def work(_index: int, x: torch.Tensor = x, tile: Tile = tile) -> torch.Tensor:
            return multiply(x, matrix, tile, norm=Norm(factors, _EPS))

        bench.run(f"{case}, {num_rows} rows", f"{_name(tile)}, norm", work, wanted, matrix.num_bytes)


def _name(tile: Tile) -> str:
    return f"triton {tile.num_outputs} x {tile.num_inputs}" + (", early" if tile.is_early else "")
