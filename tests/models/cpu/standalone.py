"""The kernels as a program of their own that makes one call: for another processor, or with a sanitizer."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from chairlift.models.cpu import decoder, structures
from chairlift.models.cpu.build import TOOLCHAIN, InstructionSet, instruction_sets
from chairlift.models.cpu.packing import LANES
from chairlift.models.cpu.processor import usable_instruction_sets
from chairlift.models.cpu.structures import Batch, Model, Piece

ARM_COMPILER = "aarch64-linux-gnu-g++"
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
# gcc 12 warns of its own header for AVX-512: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
_OF_GCC_12 = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")

_PROGRAM = Path(__file__).with_name("program.cpp")
_LINE = 64
_SIZES = (torch.float32.itemsize, torch.bfloat16.itemsize) * 2  # of an element, by the kernels' number of the format


def need(program: str) -> None:
    """Skips the test if there is none."""
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")


def warnings_of(compiler: str) -> tuple[str, ...]:
    """The flags with which that compiler fails where it would warn."""
    version = subprocess.run([*compiler.split(), "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return (*_WARNINGS, *_OF_GCC_12) if "g++" in compiler and version.startswith("12") else _WARNINGS


def compile_program(compiler: str, flags: Sequence[str], path: Path) -> None:
    """With threads of its own, as it has no torch to share them with."""
    sources = (str(TOOLCHAIN.sources / "decoder.cpp"), str(_PROGRAM))
    command = [compiler, *TOOLCHAIN.flags, "-DCHAIRLIFT_OWN_THREADS", "-pthread", *flags, *sources, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def level_of(isa: str) -> InstructionSet:
    """Skips the test if this processor does not have it."""
    if isa not in usable_instruction_sets():
        pytest.skip(f"this processor does not have {isa}")
    (level,) = (each for each in instruction_sets("x86_64") if each.name == isa)
    return level


def compile_sanitized(sanitizers: str, isa: str, path: Path) -> None:
    """With gcc's sanitizers, as `-fsanitize` names them, and the kernels' own checks; each ends the program.

    Not optimised, which takes half as long to compile; but one with checks of threads would run seven times as long.
    """
    level = "-O1" if sanitizers == "thread" else "-O0"
    flags = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", level, "-DCHAIRLIFT_CHECKED")
    compile_program("g++", (*level_of(isa).flags, *flags), path)


@contextmanager
def kernels_of(*command: str) -> Iterator[None]:
    """Meanwhile decoders that are made compute by that command, whatever instruction set they name."""
    extents: dict[int, int] = {}

    def address(tensor: torch.Tensor | None) -> int | None:
        pointer = original(tensor)
        if pointer is not None and tensor is not None:
            extents[pointer] = _extent_of(tensor)
        return pointer

    original = structures.address_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structures, "address_of", address)
        patch.setattr(decoder, "load_library", lambda _isa: _Library(command, extents))
        yield


def _extent_of(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last, which are more than it has if it leaves some out."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


class _Library:
    """Has the two entries that a decoder calls."""

    def __init__(self, command: Sequence[str], extents: dict[int, int]) -> None:
        self._command, self._extents = command, extents
        self.chairlift_forward, self.chairlift_logits = partial(self._forward), partial(self._logits)

    def _forward(
        self, model: Model, batch: Batch, piece: Piece, number_format: int, workspace: int | None, num_threads: int
    ) -> int:
        if not workspace:
            return 1
        image = _Image(self._extents)
        slots = [batch.groups[index].blocks for index in range(batch.num_groups)]
        slots += filter(None, (batch.states.live, batch.states.pending))
        outputs = [(address, self._extents[address]) for address in slots]
        if piece.residual:
            num_rows = max(1, model.streams.count) * batch.num_tokens
            outputs.append((piece.residual, num_rows * (model.hidden + -model.hidden % LANES) * 4))
            image.place(*outputs[-1])
        if piece.hidden:
            outputs.append((piece.hidden, batch.num_tokens * model.hidden * _SIZES[number_format]))
            image.place_blank(*outputs[-1])
        if piece.layer_inputs:
            outputs.append((piece.layer_inputs, self._extents[piece.layer_inputs]))
        places = [image.place_structures(type(each), ctypes.addressof(each)) for each in (model, batch, piece)]
        return self._run(image, (*places, 0, 0, number_format, num_threads), outputs)

    def _logits(
        self,
        model: Model,
        hidden: int,
        num_rows: int,
        number_format: int,
        logits: int,
        workspace: int | None,
        num_threads: int,
    ) -> int:
        if not workspace:
            return 1
        image, outputs = _Image(self._extents), [(logits, num_rows * model.vocab * 4)]
        model_place, output_place = (
            image.place_structures(Model, ctypes.addressof(model)),
            image.place_blank(*outputs[0]),
        )
        call = (model_place, image.place(hidden), 0, num_rows, output_place, number_format, num_threads)
        return self._run(image, call, outputs)

    def _run(self, image: "_Image", call: Sequence[int], outputs: Sequence[tuple[int, int]]) -> int:
        """Its outputs go where they would have gone in this process: addresses and numbers of bytes."""
        numbers = (len(image.sizes), len(image.pointers), len(outputs), *call)
        memory = b"".join(
            struct.pack("<2q", start, size) + image.content[start : start + size] for start, size in image.sizes.items()
        )
        written = [number for address, size in outputs for number in (image.places[address], size)]
        memory = struct.pack(f"<{len(numbers)}q", *numbers) + memory
        memory += struct.pack(f"<{len(image.pointers) + len(written)}q", *image.pointers, *written)
        done = subprocess.run(self._command, input=memory, capture_output=True, timeout=120, check=False)
        assert (done.stderr.decode(), done.returncode) == ("", 0)
        start = 8
        for address, size in outputs:
            ctypes.memmove(address, done.stdout[start : start + size], size)
            start += size
        assert len(done.stdout) == start
        return int.from_bytes(done.stdout[:8], "little", signed=True)


class _Image:
    """Structures and what they point to as another process may have them: each pointer is a place in the content."""

    def __init__(self, extents: dict[int, int]) -> None:
        self._extents = extents  # bytes behind the addresses there are
        self.content = bytearray()
        self.sizes: dict[int, int] = {}  # of the regions that begin at those places
        self.pointers: list[int] = []  # where they are
        self.places: dict[int, int] = {}  # of what was at an address

    def place(self, address: int, num_bytes: int | None = None) -> int:
        if address not in self.places:
            size = self._extents[address] if num_bytes is None else num_bytes
            self._add(address, ctypes.string_at(address, size))
        return self.places[address]

    def place_blank(self, address: int, num_bytes: int) -> int:
        """Fills it with bytes that are no number, until something is written there."""
        self._add(address, b"\xff" * num_bytes)
        return self.places[address]

    def place_structures(self, kind: type[ctypes.Structure], address: int, count: int = 1) -> int:
        """Also places what they point to; `num_things` says how many structures there are at `things`."""
        start, size = self.place(address, count * ctypes.sizeof(kind)), ctypes.sizeof(kind)
        for each in range(start, start + count * size, size):
            self._relocate(kind, each)
        return start

    def _add(self, address: int, content: bytes) -> None:
        self.places[address] = len(self.content)
        self.sizes[len(self.content)] = len(content)
        self.content += content + bytes(-len(content) % _LINE)

    def _relocate(self, kind: type[ctypes.Structure], start: int) -> None:
        places = {name: start + getattr(kind, name).offset for name, *_ in kind._fields_}
        for name, field, *_ in kind._fields_:
            if issubclass(field, ctypes.Structure):
                self._relocate(field, places[name])
            elif issubclass(field, (ctypes.c_void_p, ctypes._Pointer)) and (address := self._read(places[name])):
                if issubclass(field, ctypes._Pointer):
                    count = self._read(places[f"num_{name}"]) if f"num_{name}" in places else 1
                    target = self.place_structures(field._type_, address, count)
                else:
                    target = self.place(address)
                self.content[places[name] : places[name] + 8] = target.to_bytes(8, "little")
                self.pointers.append(places[name])

    def _read(self, place: int) -> int:
        return int.from_bytes(self.content[place : place + 8], "little")
