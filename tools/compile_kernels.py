"""Compile the kernels of this machine's processor into the cache, where a start looks for them.

It runs before torch and all else is installed, beside pip: compiling takes a core for some seconds. Where it fails, the
first start tries again and says why, so this exits with 0.
"""

import platform
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("chairlift.models", "chairlift.models.cpu")


def main() -> int:
    """Compiles the best instruction set."""
    sys.path.insert(0, str(ROOT))
    for name in PACKAGES:  # without their doors, which import torch
        package = ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package
    from chairlift.models.cpu.build import CpuKernelsUnavailable, instruction_sets, prepare_library
    from chairlift.models.cpu.processor import usable_instruction_sets

    sets = {each.name: each for each in instruction_sets(platform.machine())}
    for name in usable_instruction_sets()[:1]:
        try:
            prepare_library(sets[name])
        except CpuKernelsUnavailable as error:
            print(f"the kernels are not compiled yet: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
