"""Writes numbers in bfloat16 that a quantized GGUF file could have been made of.

    python benchmarks/peers/unrounded.py FILE.gguf NUMBERS.gguf

Each number of the file moves by a random part of its step, half of one at most, as far as rounding may have moved it.
Everything else of the file stays as it is.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_Kind = gguf.GGMLQuantizationType
_PLAIN = (_Kind.F32, _Kind.F16, _Kind.BF16)
_SYMMETRIC = {_Kind.Q4_0: 8, _Kind.Q5_0: 16, _Kind.Q6_K: 32, _Kind.Q8_0: 127}
"""Steps in the largest magnitude of a group."""
_WITH_OFFSETS = {_Kind.Q4_1: 15, _Kind.Q4_K: 15, _Kind.Q5_1: 31, _Kind.Q5_K: 31}
"""Steps in the range of a group."""
_NOT_COPIED = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE, gguf.Keys.General.QUANTIZATION_VERSION)


def write_unrounded(source: Path, target: Path) -> None:
    """Writes the numbers. ValueError for formats whose steps are not known here."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field in reader.fields.values():
        if field.name not in _NOT_COPIED and not field.name.startswith("GGUF."):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    generator = torch.Generator().manual_seed(1)
    for tensor in reader.tensors:
        numbers = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if numbers.dim() == 1:
            writer.add_tensor(tensor.name, numbers.numpy())
            continue
        moved = numbers if tensor.tensor_type in _PLAIN else _moved(numbers, tensor.tensor_type, generator)
        writer.add_tensor(tensor.name, _as_bytes(moved.to(torch.bfloat16)), raw_dtype=_Kind.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _moved(numbers: torch.Tensor, kind: gguf.GGMLQuantizationType, generator: torch.Generator) -> torch.Tensor:
    if kind not in _SYMMETRIC and kind not in _WITH_OFFSETS:
        raise ValueError(f"numbers of {kind.name} cannot be moved here")
    groups = numbers.reshape(*numbers.shape[:-1], -1, 16 if kind is _Kind.Q6_K else 32)
    if kind in _SYMMETRIC:
        steps = groups.abs().amax(dim=-1, keepdim=True) / _SYMMETRIC[kind]
    else:
        steps = (groups.amax(dim=-1, keepdim=True) - groups.amin(dim=-1, keepdim=True)) / _WITH_OFFSETS[kind]
    moved = groups + steps * (torch.rand(groups.shape, generator=generator) - 0.5)
    return moved.view(numbers.shape)


def _as_bytes(numbers: torch.Tensor) -> Any:
    return numbers.contiguous().view(torch.uint8).numpy()


if __name__ == "__main__":
    write_unrounded(Path(sys.argv[1]), Path(sys.argv[2]))
