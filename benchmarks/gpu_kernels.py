"""Kernels alone, on a GPU: first the error of each beside a reference in float32, then microseconds and bytes a second.

    python benchmarks/gpu_kernels.py                                      (a minute on an H200)
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --device cpu --tiny      (the same way through, without a GPU)

Attention of decode steps and of prompts beside flash-attn 2 and 3, where these are installed, in two orders of a slot's
layers and tokens; products of few rows beside cuBLAS, plain and in groups of 8 and 4 bits; products with float8
matrices and with those of experts beside torch's; draws of tokens beside torch's operators. Calls of a graph use other
data each time, or so much that it leaves the cache. A kernel that fails is named, and the others still run. The last
line is JSON.
"""

import argparse
import importlib
import sys
from dataclasses import asdict
from time import monotonic
from typing import Any

import torch
from machine import parser_of, print_report
from on_gpu.kernel_bench import Bench, table

_PARTS = ("attention", "products", "float8", "draws")  # `measure` of on_gpu/kernel_<part>.py


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns 1 if a kernel failed."""
    arguments = _parse_arguments()
    findings: dict[str, list[dict[str, Any]]] = {}
    num_failures = 0
    for name in arguments.parts:
        start = monotonic()
        torch.manual_seed(0)
        bench = Bench(torch.device(arguments.device), not arguments.no_times)
        importlib.import_module(f"on_gpu.kernel_{name}").measure(bench, is_tiny=arguments.tiny)
        print(f"{name}, {monotonic() - start:.0f} s\n{table(bench.findings)}", flush=True)
        findings[name] = [asdict(each) for each in bench.findings]
        num_failures += sum(bool(each.failure) for each in bench.findings)
    device = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else "cpu"
    print_report(arguments, device=device, torch=torch.__version__, findings=findings)
    return 1 if num_failures else 0


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, ..., or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes that Triton's interpreter can run")
    parser.add_argument("--no-times", action="store_true", help="only compile and compare")
    parser.add_argument(
        "--parts", choices=_PARTS, nargs="+", default=list(_PARTS), metavar="PART", help=" ".join(_PARTS)
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
