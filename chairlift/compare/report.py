"""The results of a comparison: a table for people, JSON for programs, a drawing of the distribution."""

import json
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import __version__
from chairlift.compare.config import CompareConfig
from chairlift.compare.divergence import Estimate, Positions, Summary


@dataclass(frozen=True)
class Report:
    """A comparison's results, and how they were measured."""

    config: CompareConfig
    reference: str
    candidate: str
    num_tokens: int  # of the text
    num_windows: int
    is_reduced: bool  # distributions were reduced to the tokens that a server told
    positions: Positions

    @cached_property
    def summary(self) -> Summary:
        return Summary.of(self.positions)

    @property
    def document(self) -> dict[str, Any]:
        """All results as JSON has them."""
        return {
            "chairlift": __version__,
            "reference": self.reference,
            "candidate": self.candidate,
            "text": "built in" if self.config.text is None else str(self.config.text),
            "context": self.config.context,
            "num_tokens": self.num_tokens,
            "num_windows": self.num_windows,
            "is_reduced": self.is_reduced,
            "summary": asdict(self.summary),
            "positions": asdict(self.positions),
        }


def print_report(report: Report) -> None:
    """Prints the table to standard output."""
    sys.stdout.write("\n".join(lines_of(report)) + "\n")


def lines_of(report: Report) -> list[str]:
    """The lines of the table."""
    summary, config = report.summary, report.config
    text = "built in" if config.text is None else str(config.text)
    lines = [
        f"reference  {report.reference}",
        f"candidate  {report.candidate}",
        f"text       {text}: {report.num_tokens} tokens, of which {report.num_windows} windows of {config.context} were"
        f" read and {summary.num_positions} tokens scored",
        "",
        f"perplexity of the reference  {_shown(summary.reference_perplexity, 4)}",
        f"perplexity of the candidate  {_shown(summary.candidate_perplexity, 4)}",
        f"ratio                        {_shown(summary.perplexity_ratio, 6)}",
        f"KL divergence, mean          {_shown(summary.mean_divergence, 6)} nats",
        f"               median        {summary.median_divergence:.6f}",
        f"               99 % below    {summary.p99_divergence:.6f}",
        f"               largest       {summary.max_divergence:.6f}",
        f"same likeliest token         {_shown(summary.top_agreement, 2, 100)} %",
    ]
    if report.is_reduced:
        lines.append("Divergences are over the tokens that both sides told, all others as one: at most the whole ones.")
    return lines


def _shown(estimate: Estimate, num_digits: int, factor: float = 1.0) -> str:
    return f"{factor * estimate.value:.{num_digits}f} ± {factor * estimate.error:.{num_digits}f}"


def write_json(report: Report, path: Path) -> None:
    """Writes all results to a file."""
    path.write_text(json.dumps(report.document) + "\n", encoding="utf-8")


def draw(report: Report, path: Path) -> None:
    """Draws the share of positions above each divergence, with both axes logarithmic."""
    from matplotlib.figure import Figure

    divergence = np.sort(np.array(report.positions.divergence))[::-1]
    shares = np.arange(1, len(divergence) + 1) / len(divergence)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.clip(divergence, 1e-9, None), shares)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvline(report.summary.mean_divergence.value, linestyle=":", label="mean")
    axes.set_title(f"{report.candidate} beside {report.reference}")
    axes.set_xlabel("KL divergence, nats")
    axes.set_ylabel("share of positions above")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
