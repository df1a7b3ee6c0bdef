"""The report file: one HTML page that needs nothing from elsewhere, or the plots alone as PNG."""

from base64 import b64encode
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.bench.failures import BenchError
from chairlift.bench.page import page
from chairlift.bench.summary import BenchResult, Summary
from chairlift.bench.sweep import Sweep
from chairlift.bench.table import Section, fell_behind, result_sections, sweep_sections

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 144


def require_matplotlib() -> None:
    """Raises `BenchError` if it is absent: better before a run than after it."""
    if find_spec("matplotlib") is None:
        raise BenchError("--report needs matplotlib: pip install 'chairlift[bench]', or leave --report out")


def write_test_report(path: Path, result: BenchResult, summary: Summary) -> None:
    """The report of one test."""
    from chairlift.bench.plots import result_figure

    notes = [fell_behind(summary.client)] if summary.client.has_fallen_behind else []
    sections = result_sections(result.config, summary)
    _write(path, f"Load test of {result.config.model}", sections, notes, result_figure(result, summary))


def write_sweep_report(path: Path, sweep: Sweep) -> None:
    """The report of a sweep."""
    from chairlift.bench.plots import sweep_figure

    notes = [
        f"{sweep.values.name} {step.value:g}: {fell_behind(step.summary.client)}"
        for step in sweep.steps
        if step.summary.client.has_fallen_behind
    ]
    title = f"Load test of {sweep.steps[0].result.config.model}: sweep of {sweep.values.name}"
    _write(path, title, sweep_sections(sweep), notes, sweep_figure(sweep))


def _write(path: Path, title: str, sections: list[Section], notes: list[str], figure: "Figure") -> None:
    image = BytesIO()
    figure.savefig(image, format="png", dpi=DOTS_PER_INCH)
    if path.suffix == ".png":
        path.write_bytes(image.getvalue())
        return
    source = f"data:image/png;base64,{b64encode(image.getvalue()).decode()}"
    path.write_text(page(title, sections, notes, source), encoding="utf-8")
