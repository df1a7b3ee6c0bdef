"""Everything that is to be known of Chairlift on a GPU: its GPU tests, and its speed beside what the device allows.

    python benchmarks/gpu.py                                  (or: make gpu)
    python benchmarks/gpu.py --device cpu --shape tiny        (the same way through, in three minutes)

Weights are random, of the true shapes of Llama 3.1 8B (large, also in groups of 4 bits), Llama 3.2 1B (small), Qwen3.5
0.8B (recurrent) and a mixture of experts as large as OLMoE; no checkpoint is needed. The floor of a decode step is
counted from the bytes of weights and cache that it reads and from its FLOPs, over the rates that are measured in the
same run (comparison/ceiling.py); its share is floor over measured. A prefill's share is that of the matrix rate, a
first token's floor is its prompt's prefill, a peer's share is how many times as long it takes, an idle device's that
of the time between steps.

Each part runs in a process of its own: one that fails is reported, and the others still run. The exit code is 1 if one
failed; a target that is missed is only said. The last line is JSON, which goes to benchmarks/results/ with the device's
name, or where `--json` says. docs/speed.md tells what was taken.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import parser_of, print_report
from on_gpu.measurements import PARTS
from on_gpu.report import Line, make_lines, table
from on_gpu.scale import SCALES, model_shape
from on_gpu.setup import Setup

import chairlift

_REPOSITORY = Path(__file__).parents[1]
_CHECKS = "checks"
_IS_ON_GPU = "from tests.support.gpu import"  # in files whose tests need one; others need packages that may be lacking


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here; --device cpu --shape tiny tries the way through", file=sys.stderr)
        return 2
    if arguments.part is not None:
        setup = Setup(arguments.shape, arguments.device, arguments.dtype, arguments.scratch, arguments.attention)
        print(json.dumps(PARTS[arguments.part](setup)))
        return 0
    arguments.json = arguments.json or _default_path(arguments)
    report = measure(arguments)
    print_report(arguments, **report)
    return 1 if report["failures"] else 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all parts, prints the table; returns the JSON. After each part it is also written to its file."""
    start = time.monotonic()
    measurements: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.parts:
            print(f"{time.monotonic() - start:6.0f} s  {name}", file=sys.stderr, flush=True)
            try:
                measurements += _run_checks(arguments) if name == _CHECKS else _run_part(name, scratch, arguments)
            except PartError as error:
                failures[name] = str(error)
            if arguments.json is not None:  # a later part may never end
                so_far = _report(arguments, measurements, failures, start)
                arguments.json.write_text(json.dumps(so_far) + "\n", encoding="utf-8")
    print(table(_lines(arguments, measurements), failures))
    return _report(arguments, measurements, failures, start)


def _report(
    arguments: argparse.Namespace, measurements: list[dict[str, Any]], failures: dict[str, str], start: float
) -> dict[str, Any]:
    return {
        "device": _device_name(arguments.device),
        "versions": {each.__name__: each.__version__ for each in (chairlift, torch, transformers)},
        "seconds": round(time.monotonic() - start, 1),
        "measurements": measurements,
        "table": [asdict(line) | {"verdict": line.verdict} for line in _lines(arguments, measurements)],
        "failures": failures,
    }


def _lines(arguments: argparse.Namespace, measurements: list[dict[str, Any]]) -> list[Line]:
    scale = SCALES[arguments.shape]
    shapes = {"large": model_shape(scale.large, arguments.dtype), "small": model_shape(scale.small, arguments.dtype)}
    return make_lines(measurements, shapes)


class PartError(Exception):
    """A part did not come to its end. One line."""


def _run_part(name: str, scratch: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Its measurements, the last line that it prints."""
    options = ["--device", arguments.device, "--shape", arguments.shape, "--dtype", arguments.dtype]
    options += ["--attention", arguments.attention]
    output = _run([sys.executable, __file__, "--part", name, "--scratch", scratch, *options], arguments.limit)
    line = output.splitlines()[-1]
    print(line, file=sys.stderr, flush=True)
    measurements: list[dict[str, Any]] = json.loads(line)
    return measurements


def _run_checks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The tests that need a GPU. There is nothing to measure in them."""
    tests = sorted(_REPOSITORY.glob("tests/**/test_*.py"))
    files = [str(each) for each in tests if _IS_ON_GPU in each.read_text(encoding="utf-8")]
    # Other plugins that are installed may warn, and warnings are errors.
    plugins = "pytest_asyncio.plugin,pytest_timeout,xdist.plugin"
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugins}
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "6", "-p", "no:cacheprovider"]
    _run([*pytest, *files], arguments.limit, environment)
    return []


def _run(command: list[str], limit: float, environment: dict[str, str] | None = None) -> str:
    """Returns what the command prints. `PartError` if it fails or takes longer than that, in seconds."""
    try:
        done = subprocess.run(
            command,
            cwd=_REPOSITORY,
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as late:
        sys.stderr.write(_text(late.stdout) + _text(late.stderr))
        raise PartError(f"took longer than {limit:g} s") from None
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.stderr.write(done.stdout)
        lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
        *_, last = ["it said nothing", *filter(str.strip, lines)]
        raise PartError(f"exit code {done.returncode}: {last}")
    return done.stdout


def _text(output: bytes | str | None) -> str:
    """Decodes the output of a process that was stopped, which is bytes whatever was asked for."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _default_path(arguments: argparse.Namespace) -> Path | None:
    """Results of a real device are kept."""
    if arguments.device == "cpu":
        return None
    name = re.sub(r"[^a-z0-9]+", "-", _device_name(arguments.device).lower()).strip("-")
    return _REPOSITORY / "benchmarks" / "results" / f"gpu-{name}.json"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    every = [_CHECKS, *PARTS]
    parser.add_argument("--device", default="cuda:0", help="cuda:0, ..., or cpu")
    parser.add_argument("--shape", choices=SCALES, default="full")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--attention", default="auto", help="attention_backend of the engines")
    parser.add_argument("--parts", choices=every, nargs="+", default=every, metavar="PART", help=" ".join(every))
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a part may take")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
