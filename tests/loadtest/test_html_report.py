"""The report file: an HTML page that needs nothing else, or a PNG; and what is drawn in it."""

import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chairlift.loadtest.config import SweepValues
from chairlift.loadtest.html_report import (
    require_matplotlib,
    result_figure,
    sweep_figure,
    write_sweep_report,
    write_test_report,
)
from chairlift.loadtest.records import BenchError
from chairlift.loadtest.summary import BenchResult, Sweep, summarize

from .samples import BUSY, failed, record, result, sweep_step

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Collects the text, what is referred to, and tags left open."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def sweep(*shares_good: bool) -> Sweep:
    values = SweepValues("rate", tuple(float(2**n) for n in range(len(shares_good))))
    steps = []
    for value, is_good in zip(values.values, shares_good, strict=True):
        steps.append(sweep_step(value, record(0) if is_good else failed(0, BUSY)))
    return Sweep(values, steps)


def page_of(bench: BenchResult, path: Path) -> Page:
    write_test_report(path, bench, summarize(bench))
    return Page(path.read_text(encoding="utf-8"))


def plot(figure: Figure, title: str) -> Axes:
    [axes] = [axes for axes in figure.axes if axes.get_title(loc="left") == title]
    return axes


def legend(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(result(record(0), record(1)), tmp_path / "r.html")
    [source] = page.sources
    assert source.startswith("data:image/png;base64,")
    assert b64decode(source.partition(",")[2]).startswith(PNG_MAGIC)
    assert page.open == []


def test_the_page_has_the_figures_of_the_table(tmp_path: Path) -> None:
    page = page_of(result(record(0), failed(1, BUSY), goodput="ttft:1000"), tmp_path / "r.html")
    for text in ("Load test of tiny", "TTFT, first token", "p99", "1000.00", "1 of 2", "failed: HTTP 503"):
        assert text in page.texts


def test_what_a_server_said_cannot_become_markup(tmp_path: Path) -> None:
    page = page_of(
        result(record(0), failed(1, replace(BUSY, message="<script>alert(1)</script>"))), tmp_path / "r.html"
    )
    assert "1 (<script>alert(1)</script>)" in page.texts


def test_the_page_says_when_the_client_fell_behind(tmp_path: Path) -> None:
    notes = [text for text in page_of(result(record(0), lag=0.05), tmp_path / "r.html").texts if "behind" in text]
    assert [note.split(":")[0] for note in notes] == ["the load test itself fell behind"]
    assert not [text for text in page_of(result(record(0)), tmp_path / "r.html").texts if "behind" in text]


def test_six_plots_of_a_test() -> None:
    bench = result(record(0), record(1), failed(2, BUSY), goodput="ttft:1100,e2el:9000")
    figure = result_figure(bench, summarize(bench))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == [
        "Time to first token (TTFT)",
        "Time per output token (TPOT)",
        "Inter-token latency (ITL)",
        "Whole request (E2EL)",
        "Throughput over time",
        "TTFT against arrival",
    ]
    ttft = plot(figure, "Time to first token (TTFT)")
    assert legend(ttft) == ["limit 1100 ms"]
    assert list(ttft.lines[0].get_xdata())[1:] == [1000.0, 1000.0]  # type: ignore[arg-type]
    assert legend(plot(figure, "TTFT against arrival")) == ["succeeded", "failed", "limit 1100 ms"]


def test_throughput_over_time_is_what_the_timeline_says() -> None:
    bench = result(record(0), duration_s=6.0)
    figure = result_figure(bench, summarize(bench))
    [running] = [axes for axes in figure.axes if axes.get_ylabel() == "requests in flight"]
    [line] = running.lines
    # In flight for 2 of 6 seconds: the first 20 of 60 bins.
    assert list(line.get_ydata()) == [1.0] * 20 + [0.0] * 40  # type: ignore[arg-type]


def test_four_plots_of_a_sweep_with_the_highest_value_marked() -> None:
    figure = sweep_figure(sweep(True, True, False))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Time to first token (TTFT)",
        "Time per output token (TPOT)",
        "Output throughput",
        "Requests within the limits",
    ]
    share = plot(figure, "Requests within the limits")
    assert list(share.lines[0].get_ydata()) == [100.0, 100.0, 0.0]  # type: ignore[arg-type]
    assert list(share.lines[-1].get_xdata()) == [2.0, 2.0]  # type: ignore[arg-type]
    assert figure.get_suptitle() == "tiny: sweep of rate, 2 is the highest within the limits"


def test_a_sweep_that_found_nothing_is_reported_too(tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    write_sweep_report(path, sweep(False, False))
    page = Page(path.read_text(encoding="utf-8"))
    assert "Load test of tiny: sweep of rate" in page.texts
    assert re.search(r"highest rate\s+none", " ".join(page.texts))


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr("chairlift.loadtest.html_report.find_spec", lambda _name: None)
    with pytest.raises(BenchError) as caught:
        require_matplotlib()
    assert str(caught.value) == "--report needs matplotlib: pip install 'chairlift[bench]', or leave --report out"
