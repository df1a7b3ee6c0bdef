"""benchmarks/gpu_kernels.py: what becomes of a kernel that is right, wrong or fails, and the way through on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_gpu.kernel_bench import Bench, Finding, table

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"
WANTED = torch.tensor([3.0, 4.0])


def test_a_kernel_that_is_right_is_timed() -> None:
    bench = Bench(torch.device("cpu"))
    bench.run("case", "kernel", lambda _index: WANTED + 0.01, WANTED, num_bytes=8)
    (finding,) = bench.findings
    assert finding.error == pytest.approx(0.01 * 2**0.5 / 5, rel=1e-3)
    assert finding.microseconds is not None
    assert finding.failure == ""


def test_one_that_is_wrong_or_gives_nan_or_raises_is_named_instead() -> None:
    bench = Bench(torch.device("cpu"))

    def fail(_index: int) -> torch.Tensor:
        raise ValueError("no such tile\nand more")

    bench.run("case", "wrong", lambda _index: 2 * WANTED, WANTED)
    bench.run("case", "nan", lambda _index: torch.full((2,), torch.nan), WANTED)
    bench.run("case", "raises", fail, WANTED)
    assert [each.failure for each in bench.findings] == ["wrong", "wrong", "ValueError: no such tile"]
    assert [each.microseconds for each in bench.findings] == [None, None, None]


def test_some_rows_may_be_compared_alone() -> None:
    bench = Bench(torch.device("cpu"), is_timed=False)
    bench.run("case", "kernel", lambda _index: torch.tensor([3.0, 99.0, 4.0]), WANTED, rows=slice(None, None, 2))
    assert bench.findings == [Finding("case", "kernel", 0.0)]


def test_the_table_has_errors_times_and_bytes_a_second() -> None:
    right = Finding("32 x 8", "triton", 0.001, 100.0, 300_000_000)
    wrong = Finding("32 x 8", "other", 0.5, failure="wrong")
    assert table([right, wrong]).splitlines() == [
        "                  error     us  TB/s",
        "32 x 8  triton  1.0e-03  100.0  3.00",
        "32 x 8   other  5.0e-01               wrong",
    ]


@pytest.mark.parametrize(
    "parts", [("attention", "draws"), pytest.param(("products", "float8"), marks=pytest.mark.slow)]
)
def test_the_interpreter_goes_through_every_kernel(parts: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--no-times", "--parts", *parts]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout.splitlines()[-1])["findings"]
    assert tuple(findings) == parts
    kernels = {each["kernel"].split()[0].rstrip(",") for part in findings.values() for each in part}
    of_products = {"cuBLAS", "dequantize", "triton", "rounding", "float8"}
    assert kernels == (of_products if "products" in parts else {"operators", "triton"})
