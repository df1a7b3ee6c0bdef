"""The figures of several settings as a picture. Imports matplotlib, which comes with the package's extra `bench`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulation.figures import Figures, Spread

_QUANTILES = ("p50", "p90", "p99")


def write_plot(figures: Sequence[Figures], path: Path) -> None:
    """TTFT of the largest tenant and of the others, TPOT, and fairness beside slot use; one group for each setting."""
    picture = Figure(figsize=(12, 8), layout="constrained")
    (largest, others), (tpot, shares) = picture.subplots(2, 2)
    _bars(largest, "TTFT of the largest tenant, s", figures, [each.largest_tenant.ttft for each in figures], 1)
    tenants = [each.other_tenants for each in figures]
    _bars(others, "TTFT of the other tenants, s", figures, [t.ttft if t else None for t in tenants], 1)
    _bars(tpot, "TPOT, ms", figures, [each.tpot for each in figures], 1000)
    _grouped(
        shares,
        "shares of 1",
        figures,
        {
            "Jain, tokens": [each.jain_served for each in figures],
            "slots in use": [each.slot_use or np.nan for each in figures],
            "prefix hit rate": [each.prefix_hit_rate for each in figures],
        },
    )
    picture.savefig(path, dpi=120)


def _bars(axes: Axes, title: str, figures: Sequence[Figures], spreads: Sequence[Spread | None], factor: float) -> None:
    values = {
        name: [np.nan if spread is None else factor * getattr(spread, name) for spread in spreads]
        for name in _QUANTILES
    }
    _grouped(axes, title, figures, values)


def _grouped(axes: Axes, title: str, figures: Sequence[Figures], values: dict[str, list[float]]) -> None:
    positions, width = np.arange(len(figures)), 0.8 / len(values)
    for index, (name, heights) in enumerate(values.items()):
        axes.bar(positions + width * (index - (len(values) - 1) / 2), heights, width, label=name)
    axes.set_title(title)
    axes.set_xticks(positions, [each.setting for each in figures])
    axes.legend()
