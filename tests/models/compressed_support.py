"""Writes matrices as compressed-tensors, AWQ, GPTQ and the tools for float8 do: element by element, as documented."""

from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that is written into each nibble of a word, the lowest first


@dataclass(frozen=True)
class Quantized:
    """A matrix whose elements are (values - zeros) * scales, group by group."""

    values: torch.Tensor  # int64 [out, in], unsigned
    zeros: torch.Tensor  # int64 [out, groups], unsigned
    scales: torch.Tensor  # float16 [out, groups]

    @property
    def exact(self) -> torch.Tensor:
        """float32 `[out, in]`"""
        size = self.values.shape[1] // self.zeros.shape[1]
        zeros, scales = (each.repeat_interleave(size, dim=1) for each in (self.zeros, self.scales.float()))
        return (self.values - zeros) * scales


def quantized(seed: int, shape: torch.Size, num_bits: int, group_size: int, is_symmetric: bool) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    num_groups = 1 if group_size == -1 else shape[1] // group_size
    values = torch.randint(0, 2**num_bits, tuple(shape), generator=generator)
    zeros = torch.randint(0, 2**num_bits, (shape[0], num_groups), generator=generator)
    if is_symmetric:
        zeros.fill_(2 ** (num_bits - 1))
    scales = 0.01 * torch.rand(shape[0], num_groups, generator=generator) + 0.001
    return Quantized(values, zeros, scales.half())


def words(unsigned: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int64 `[n, m]` -> int32 `[n, m * bits / 32]`: neighbours along the last dimension, the lowest bits first."""
    per_word = 32 // num_bits
    parts = unsigned.view(len(unsigned), -1, per_word)
    packed = torch.zeros(parts.shape[:2], dtype=torch.int64)
    for place in range(per_word):
        packed |= parts[:, :, place] << (num_bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def pack_quantized(name: str, matrix: Quantized, num_bits: int, is_symmetric: bool) -> Tensors:
    """compressed-tensors: zero points are packed along the outputs."""
    tensors = {
        f"{name}.weight_packed": words(matrix.values, num_bits),
        f"{name}.weight_scale": matrix.scales,
        f"{name}.weight_shape": torch.tensor(matrix.values.shape),
    }
    if not is_symmetric:
        tensors[f"{name}.weight_zero_point"] = words(matrix.zeros.T.contiguous(), num_bits).T.contiguous()
    return tensors


def pack_awq(name: str, matrix: Quantized) -> Tensors:
    """Inputs first; outputs are packed by eight in an order of their own."""

    def shuffled(unsigned: torch.Tensor) -> torch.Tensor:
        columns = unsigned.T.reshape(unsigned.shape[1], -1, 8)
        return words(columns[:, :, AWQ_ORDER].flatten(1), 4)

    parts = {
        "qweight": shuffled(matrix.values),
        "qzeros": shuffled(matrix.zeros),
        "scales": matrix.scales.T.contiguous(),
    }
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


def pack_gptq(name: str, matrix: Quantized, num_bits: int, zero_shift: int) -> Tensors:
    """Inputs first, and packed; of zero points the outputs are packed, less one in the first version."""
    num_inputs, num_groups = matrix.values.shape[1], matrix.zeros.shape[1]
    zeros = (matrix.zeros - zero_shift) % 2**num_bits
    return {
        f"{name}.qweight": words(matrix.values, num_bits).T.contiguous(),
        f"{name}.qzeros": words(zeros.T.contiguous(), num_bits),
        f"{name}.scales": matrix.scales.T.contiguous(),
        f"{name}.g_idx": (torch.arange(num_inputs) // (num_inputs // num_groups)).int(),
    }


def compressed_tensors(num_bits: int, group_size: int, is_symmetric: bool, **weights: Any) -> dict[str, Any]:
    stated = {
        "num_bits": num_bits,
        "type": "int",
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "symmetric": is_symmetric,
        **weights,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": stated, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def gptq(num_bits: int = 4, group_size: int = 64, **stated: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": num_bits, "group_size": group_size, "desc_act": False, **stated}


def awq(**stated: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", **stated}


def float8(
    name: str,
    seed: int,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    ending: str,
    exponents: torch.dtype | None = None,
) -> tuple[Tensors, torch.Tensor]:
    """float8 numbers `[out, in]` with a scale for each block (None: one for all), and the matrix that they are.

    `exponents`: scales are powers of 2, of which the exponents are stored in that type.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    high, wide = block or shape
    scales = 1e-3 * torch.rand(-(-shape[0] // high), -(-shape[1] // wide), generator=generator) + 1e-4
    if exponents is not None:
        scales = torch.exp2(torch.randint(-16, -8, scales.shape, generator=generator))
    exact = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(0, shape[1], wide):
            exact[row, column : column + wide] = numbers[row, column : column + wide].float()
            exact[row, column : column + wide] *= scales[row // high, column // wide]
    stored = scales.squeeze() if block is None else scales
    if exponents is not None:
        stored = (stored.log2() + 127).to(torch.uint8).view(exponents)
    return {f"{name}.weight": numbers, f"{name}.{ending}": stored}, exact


def fine_grained(block: tuple[int, int] | None, **stated: Any) -> dict[str, Any]:
    """As Qwen's and DeepSeek's checkpoints state float8."""
    size = None if block is None else list(block)
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size, **stated}


def float_quantized(strategy: str, **stated: Any) -> dict[str, Any]:
    """As compressed-tensors states float8, with a static scale of activations."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights | stated, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
