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

from chairlift.models import cpu
from chairlift.models.cpu.build import _COMPILE_FLAGS, _SOURCES
from chairlift.models.cpu.structures import Batch, Layer, Model

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
    sources = (str(_SOURCES / "decoder.cpp"), str(_PROGRAM))
    command = [compiler, *_COMPILE_FLAGS, "-DCHAIRLIFT_OWN_THREADS", "-pthread", *flags, *sources, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def kernels_of(*command: str) -> Iterator[None]:
    """Meanwhile decoders that are made compute by that command, whatever instruction set they name."""
    extents: dict[int, int] = {}

    def address(tensor: torch.Tensor | None) -> int | None:
        pointer = original(tensor)
        if pointer is not None and tensor is not None:
            extents[pointer] = tensor.nbytes
        return pointer

    original = cpu._address
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_address", address)
        patch.setattr(cpu, "load_library", lambda _isa: _Library(command, extents))
        yield


class _Library:
    """Has the two entries that a decoder calls."""

    def __init__(self, command: Sequence[str], extents: dict[int, int]) -> None:
        self._command, self._extents = command, extents
        self.chairlift_forward, self.chairlift_logits = partial(self._forward), partial(self._logits)

    def _forward(
        self, model: Model, batch: Batch, number_format: int, hidden: int, workspace: int | None, num_threads: int
    ) -> int:
        image, model_place = self._image_of(model)
        batch_place = image.place_structures(Batch, ctypes.addressof(batch))
        size = batch.num_tokens * model.hidden * _SIZES[number_format]
        slots = (batch.blocks, self._extents[batch.blocks])
        call = (model_place, batch_place, 0, number_format, size, num_threads, image.places[batch.blocks], slots[1])
        return self._run(image, call, ((hidden, size), slots)) if workspace else 1

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
        image, model_place = self._image_of(model)
        size = num_rows * model.vocab * 4
        call = (model_place, image.place(hidden), num_rows, number_format, size, num_threads, 0, 0)
        return self._run(image, call, ((logits, size),)) if workspace else 1

    def _image_of(self, model: Model) -> tuple["_Image", int]:
        image = _Image(self._extents)
        image.place_structures(Layer, ctypes.addressof(model.layers.contents), model.num_layers)
        return image, image.place_structures(Model, ctypes.addressof(model))

    def _run(self, image: "_Image", call: Sequence[int], outputs: Sequence[tuple[int, int]]) -> int:
        """Its outputs go where they would have gone in this process: addresses and numbers of bytes."""
        numbers = (len(image.sizes), len(image.pointers), *call)
        memory = b"".join(
            struct.pack("<2q", start, size) + image.content[start : start + size] for start, size in image.sizes.items()
        )
        memory = struct.pack(f"<{len(numbers)}q", *numbers) + memory
        memory += struct.pack(f"<{len(image.pointers)}q", *image.pointers)
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
            self.places[address] = len(self.content)
            content = ctypes.string_at(address, self._extents[address] if num_bytes is None else num_bytes)
            self.sizes[len(self.content)] = len(content)
            self.content += content + bytes(-len(content) % _LINE)
        return self.places[address]

    def place_structures(self, kind: type[ctypes.Structure], address: int, count: int = 1) -> int:
        start, size = self.place(address, count * ctypes.sizeof(kind)), ctypes.sizeof(kind)
        for each in range(start, start + count * size, size):
            self._relocate(kind, each)
        return start

    def _relocate(self, kind: type[ctypes.Structure], start: int) -> None:
        for name, field, *_ in kind._fields_:
            place = start + getattr(kind, name).offset
            if issubclass(field, ctypes.Structure):
                self._relocate(field, place)
            elif issubclass(field, (ctypes.c_void_p, ctypes._Pointer)):
                address = int.from_bytes(self.content[place : place + 8], "little")
                if address:
                    target = self.place(address)
                    self.content[place : place + 8] = target.to_bytes(8, "little")
                    self.pointers.append(place)
