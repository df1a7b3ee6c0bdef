"""Writes tensors of random weights into GGUF files, for scripts that describe a model's layers.

Blocks of each type are drawn once and repeated, in a size that makes outputs about as large as inputs. Speed depends on
neither. Needs gguf and numpy.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Kind = gguf.GGMLQuantizationType
Blocks = npt.NDArray[Any]
Tensor = tuple[str, tuple[int, ...], Kind]
Tensors = Iterator[Tensor]

MAX_POSITIONS = 8192
_NUM_DISTINCT = 2**22  # bytes of blocks that are drawn once and repeated, since drawing takes longer than writing


def make_parser(description: str | None, shapes: Iterable[str]) -> argparse.ArgumentParser:
    """Makes the parser of a script's command line, with the shape and the folder, to which the caller adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(shapes))
    parser.add_argument("folder", type=Path, help="for model.gguf, and a config.json with the sizes that ceilings need")
    return parser


def open_writer(folder: Path, architecture: str, vocab: int) -> Any:
    """Begins the folder's model.gguf: the architecture and a vocabulary, to which the caller adds sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    _add_vocabulary(writer, vocab)
    return writer


def write_tensors(writer: Any, tensors: Iterable[Tensor], given: dict[str, Blocks] | None = None) -> None:
    """Completes the file tensor by tensor, so that it may be larger than memory. `given`: what is not drawn."""
    tensors, given = list(tensors), given or {}
    for name, dims, kind in tensors:
        writer.add_tensor_info(name, dims, np.dtype(np.float32), _num_bytes(dims, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    drawn: dict[tuple[Kind, int], Blocks] = {}
    for name, dims, kind in tensors:
        key = kind, dims[-1]
        if len(dims) > 1 and key not in drawn:
            drawn[key] = _MAKERS[kind](generator, dims[-1])
        if name in given:
            writer.write_tensor_data(given[name])
        else:
            writer.write_tensor_data(
                _vector(generator, name, dims) if len(dims) == 1 else _filled(drawn[key], dims, kind)
            )
    writer.close()


def bytes_per_weight(tensors: Iterable[Tensor]) -> float:
    """The mean over all tensors."""
    sizes = [(_num_bytes(dims, kind), int(np.prod(dims))) for _, dims, kind in tensors]
    return sum(num_bytes for num_bytes, _ in sizes) / sum(count for _, count in sizes)


def _num_bytes(dims: tuple[int, ...], kind: Kind) -> int:
    num_elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(dims)) // num_elements * num_bytes


def _filled(blocks: Blocks, dims: tuple[int, ...], kind: Kind) -> Blocks:
    """The blocks again and again, from another one on for each tensor's neighbour, up to the tensor's size."""
    num_elements, _ = gguf.GGML_QUANT_SIZES[kind]
    return np.resize(blocks, (int(np.prod(dims)) // num_elements, blocks.shape[1]))


def _vector(generator: np.random.Generator, name: str, dims: tuple[int, ...]) -> Blocks:
    is_factor = "norm" in name or "scale" in name
    return np.ones(dims, np.float32) if is_factor else generator.normal(0, 0.02, dims).astype(np.float32)


def _halves(number: float, count: int) -> Blocks:
    return np.full((count, 1), number, np.float16).view(np.uint8)


def _count(kind: Kind) -> int:
    return _NUM_DISTINCT // gguf.GGML_QUANT_SIZES[kind][1] | 1  # odd: no row begins like the one before it


def _make_q4_k(generator: np.random.Generator, num_inputs: int) -> Blocks:
    """Scales of 6 bits times codes of 4, which the minima bring around zero."""
    unit, count = num_inputs**-0.5 / 170, _count(Kind.Q4_K)
    random = generator.integers(256, size=(count, 140), dtype=np.uint8)
    return np.concatenate((_halves(unit, count), _halves(7.5 * unit, count), random), axis=1)


def _make_q6_k(generator: np.random.Generator, num_inputs: int) -> Blocks:
    unit, count = num_inputs**-0.5 / 1350, _count(Kind.Q6_K)
    random = generator.integers(256, size=(count, 208), dtype=np.uint8)
    return np.concatenate((random, _halves(unit, count)), axis=1)


def _make_q4_0(generator: np.random.Generator, num_inputs: int) -> Blocks:
    unit, count = num_inputs**-0.5 / 4.6, _count(Kind.Q4_0)
    random = generator.integers(256, size=(count, 16), dtype=np.uint8)
    return np.concatenate((_halves(unit, count), random), axis=1)


def _make_q8_0(generator: np.random.Generator, num_inputs: int) -> Blocks:
    unit, count = num_inputs**-0.5 / 74, _count(Kind.Q8_0)
    random = generator.integers(256, size=(count, 32), dtype=np.uint8)
    return np.concatenate((_halves(unit, count), random), axis=1)


def _make_mxfp4(generator: np.random.Generator, num_inputs: int) -> Blocks:
    exponent = 127 + int(np.round(np.log2(num_inputs**-0.5 / 3)))
    random = generator.integers(256, size=(_count(Kind.MXFP4), 17), dtype=np.uint8)
    random[:, 0] = exponent
    return random


def _make_bf16(generator: np.random.Generator, num_inputs: int) -> Blocks:
    numbers = generator.normal(0, num_inputs**-0.5, (_count(Kind.BF16), 1)).astype(np.float32)
    return numbers.view(np.uint8)[:, 2:]  # the upper half, in the order of bytes that files have


def _make_f32(generator: np.random.Generator, num_inputs: int) -> Blocks:
    return generator.normal(0, num_inputs**-0.5, (_NUM_DISTINCT // 4 | 1, 1)).astype(np.float32)


_MAKERS: dict[Kind, Callable[[np.random.Generator, int], Blocks]] = {
    Kind.Q4_0: _make_q4_0,
    Kind.Q4_K: _make_q4_k,
    Kind.Q6_K: _make_q6_k,
    Kind.Q8_0: _make_q8_0,
    Kind.MXFP4: _make_mxfp4,
    Kind.BF16: _make_bf16,
    Kind.F32: _make_f32,
}


def _add_vocabulary(writer: Any, size: int) -> None:
    """Bytes as tokens, then tokens that no text becomes; a merge makes the last, since one there must be."""
    symbols = _bytes()
    tokens = [*symbols, *(f"[unused{index}]" for index in range(len(symbols), size))]
    tokens[-1] = tokens[-3] + tokens[-2]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL if len(each) == 1 else gguf.TokenType.UNUSED for each in tokens])
    writer.add_token_merges([f"{tokens[-3]} {tokens[-2]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _bytes() -> list[str]:
    """The characters that stand for bytes in the vocabulary of a GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(each) for each in printable] + [chr(256 + index) for index in range(256 - len(printable))]
