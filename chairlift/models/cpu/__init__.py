"""The whole forward pass in native code for CPUs: `models/decoder.py` at the speed of memory.

`csrc/` is compiled once per machine (`build`), weights are brought into its layout once (`packing`, `weights`), and
`CpuDecoder` runs it. The torch model is the reference in tests.
"""

from chairlift.models.cpu.build import CpuKernelsUnavailable
from chairlift.models.cpu.decoder import CpuDecoder, find_obstacle
from chairlift.models.cpu.library import load_library, name_kernels
from chairlift.models.cpu.loading import UNPACKER

__all__ = ["UNPACKER", "CpuDecoder", "CpuKernelsUnavailable", "find_obstacle", "load_library", "name_kernels"]
