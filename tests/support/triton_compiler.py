"""Compiles Triton kernels for an H100 without one, and tells what the compiler made of them.

Tests run kernels in Triton's interpreter, which has to be chosen before a kernel's module is imported, and which cannot
compile. So the compiler works in a process of its own: `python -m tests.support.triton_compiler MODULE` compiles the
`COMPILATIONS` of that module, and writes the results as JSON.
"""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_HOPPER = ("cuda", 90, 32)
_SHARED_BYTES = 227 * 1024  # that a block may have
_LIMIT_S = 280


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel with the types and constants that it is compiled for.

    `types` of its arguments are Triton's, such as "*bf16", "i32" and "fp32"; `aligned` names pointers and numbers that
    are multiples of 16; `options` are Triton's, such as num_warps. `max_registers` and `stack_bytes` say what a thread
    may take: with 128 registers a multiprocessor has room for 512 threads.
    """

    name: str
    module: str
    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, int] = field(default_factory=dict)
    max_registers: int = 128
    stack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """Holds what a compiled kernel takes: registers of a thread, bytes of its stack (spills), bytes of shared
    memory.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int


@functools.cache
def compile_all(module: str) -> dict[str, Compiled]:
    """Compiles the `COMPILATIONS` of that module for an H100, by name. AssertionError if one does not compile."""
    command = [sys.executable, "-m", "tests.support.triton_compiler", module]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Compiled(**each) for name, each in json.loads(done.stdout.splitlines()[-1]).items()}


def assert_fits(case: Compilation, module: str) -> None:
    """Compiles that module's `COMPILATIONS`, and fails if this one takes more of an H100 than it may."""
    compiled = compile_all(module)[case.name]
    assert compiled.registers <= case.max_registers, compiled
    assert compiled.stack_bytes <= case.stack_bytes, compiled
    assert compiled.shared_bytes <= _SHARED_BYTES, compiled


def _compile(case: Compilation) -> Compiled:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(case.module), case.kernel)
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in case.constants else case.types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget(*_HOPPER), options=dict(case.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Compiled(int(found[1]), int(found[2]), compiled.metadata.shared)


def main() -> None:
    """Compiles, and writes JSON to stdout."""
    cases: tuple[Compilation, ...] = importlib.import_module(sys.argv[1]).COMPILATIONS
    json.dump({case.name: asdict(_compile(case)) for case in cases}, sys.stdout)


if __name__ == "__main__":
    main()
