"""Columns: how a figure of a record is written."""

import statistics
from typing import Any

from .source import short
from .table import Column

OURS = "chairlift"
_WITH_DECIMALS = 30  # tokens a second below this have one decimal
_WHOLE_RATIOS = 10


def value(record: Any, path: str) -> Any:
    """Returns what is at `a/b/0` in nested dictionaries and lists; None if a key is missing or null comes before it."""
    for key in path.split("/"):
        if record is None:
            break
        record = record[int(key)] if isinstance(record, list) else record.get(key)
    return record


def text(head: str, path: str) -> Column:
    """A column of words."""
    return Column(head, lambda record: str(value(record, path)))


def counted(head: str, path: str) -> Column:
    """A column of a number and what it counts, "10000 rows" as "10,000 rows" and "1 rows" as "1 row"."""

    def cell(record: Any) -> str:
        number, _, noun = str(value(record, path)).partition(" ")
        return f"{int(number):,} {noun.removesuffix('s') if number == '1' else noun}"

    return Column(head, cell)


def figures(head: str, paths: str, form: str = ",.0f", factor: float = 1, unit: str = "") -> Column:
    """A column of numbers of one or more paths, which commas separate; empty where there is none."""

    def cell(record: Any) -> str:
        values = [value(record, path) for path in paths.split(",")]
        shown = [f"{number * factor:{form}}" for number in values if number is not None]
        return ", ".join(shown) + (unit if shown else "")

    return Column(head, cell)


def percent(head: str, path: str, form: str = ".1f") -> Column:
    """A column of shares."""
    return figures(head, path, form, factor=100, unit=" %")


def chosen(head: str, path: str, names: dict[str, str]) -> Column:
    """A column of names, which the documents write in another way than the file."""
    return Column(head, lambda record: names[value(record, path)])


def workload(head: str = "requests x prompt + output") -> Column:
    """A column of what an engine was asked, "1x1024+1" as "1 x 1,024 + 1"."""
    return Column(head, lambda trial: _workload(trial["workload"]))


def _workload(name: str) -> str:
    requests, _, lengths = name.partition("x")
    prompt, _, output = lengths.partition("+")
    return f"{requests} x {_lengths(prompt)} + {_lengths(output)}" if output else name


def _lengths(written: str) -> str:
    """A number of tokens, or two with dots between them."""
    return " to ".join(f"{int(number):,}" for number in written.split(".."))


ceiling = Column("of the ceiling", lambda trial: f"{trial['share']:.2f}" if "share" in trial else "")
commit = Column("commit", lambda trial: short(trial["commit"]))


def rate(head: str, engine: str, over: str = "", mark: str = "") -> Column:
    """A column of an engine's tokens per second, and in brackets how many times as fast `over` is."""

    def cell(trial: Any) -> str:
        engines = trial["engines"]
        shown = f"{mark}{speed(engines[engine]['median'])}{mark}"
        return shown + (f" ({_ratio(engines[over], engines[engine])})" if over and "share" in trial else "")

    return Column(head, cell)


def served(head: str, server: str, over: str = "", mark: str = "") -> Column:
    """A column of a server's output tokens per second, and in brackets how many times as fast `over` is."""

    def cell(record: Any) -> str:
        servers = record["servers"]
        if server not in servers:
            return ""
        theirs = servers[server]["output_tokens_per_s"]
        ratio = f" ({servers[over]['output_tokens_per_s'] / theirs:.1f})" if over else ""
        return f"{mark}{speed(theirs)}{mark}{ratio}"

    return Column(head, cell)


def speed(median: float) -> str:
    """Tokens per second, or seconds or gigabytes of an engine."""
    return f"{median:,.0f}" if median >= _WITH_DECIMALS else f"{median:.1f}"


def _ratio(ours: Any, theirs: Any) -> str:
    """The median of the rounds' ratios, as in `comparison/contest.py`."""
    ratio = statistics.median(mine / its for mine, its in zip(ours["rates"], theirs["rates"], strict=True))
    return f"{ratio:.0f}" if ratio >= _WHOLE_RATIOS else f"{ratio:.1f}"
