"""The whole forward pass in native code, for CPUs: what `models/llama.py` says in torch, at the speed of memory.

`csrc/` is compiled once per machine (`build`), weights are brought into its layout once (`packing`), and `CpuLlama`
runs it. The torch model is the reference that tests hold it to.
"""

from chairlift.models.cpu.build import CpuKernelsUnavailable, are_kernels_fast, load_library
from chairlift.models.cpu.llama import CpuLlama

__all__ = ["CpuKernelsUnavailable", "CpuLlama", "are_kernels_fast", "load_library"]
