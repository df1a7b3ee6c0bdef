"""Puts compiled kernels into a wheel, where CHAIRLIFT_WHEEL_KERNELS says which: "all", or names of instruction sets.

Without it, as when pip installs from the sources, a wheel has none, and they are compiled at their first use.
"""

import importlib.util
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "CHAIRLIFT_WHEEL_KERNELS"
ROOM = Path("chairlift/models/cpu")


def _platform_tag() -> str:
    """https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/"""
    if platform.system() == "Darwin":
        return f"macosx_11_0_{platform.machine()}"  # the first for Apple's processors
    return f"manylinux_2_17_{platform.machine()}"  # the kernels ask for nothing newer of the C library


class KernelsHook(BuildHookInterface[Any]):
    """Makes a wheel for one platform of a package that is otherwise plain Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - as hatchling calls it
        """Before the wheel is put together."""
        wanted = os.environ.get(VARIABLE, "").split()
        if not wanted:
            return
        build = self._load_build()
        available = build.instruction_sets(platform.machine())
        names = {each.name for each in available}
        if wanted != ["all"] and (unknown := set(wanted) - names):
            raise ValueError(f"${VARIABLE} names {min(unknown)!r}; it takes all, or any of {', '.join(sorted(names))}")
        command, libraries = build.find_compiler(), Path(self.directory) / "libraries"
        # What is compiled on a newer macOS runs on the tag's, too; elsewhere nobody reads this.
        os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "11.0")
        libraries.mkdir(parents=True, exist_ok=True)
        chosen = [each for each in available if wanted == ["all"] or each.name in wanted]
        paths = [libraries / build.file_name(each) for each in chosen]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            list(compilers.map(partial(build.compile_library, command), chosen, paths))
        build_data["force_include"] |= {str(path): str(ROOM / "libraries" / path.name) for path in paths}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _load_build(self) -> Any:
        """By its path: the package itself would import torch, which is not there."""
        spec = importlib.util.spec_from_file_location("build", Path(self.root) / ROOM / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
