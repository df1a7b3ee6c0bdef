"""A picture of a comparison's JSON: per workload the engines' medians, their rounds as dots, and the ceiling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OURS, _OTHERS, _CEILING = "#2a6f97", "#b8c4cc", "#c1121f"


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Needs matplotlib (the extra `[bench]`)."""
    from matplotlib.figure import Figure

    results = report["results"]
    figure = Figure(figsize=(3.2 * len(results), 3.6), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        _draw_workload(axes, result)
    machine, settings = report["machine"], report["settings"]
    figure.suptitle(f"{settings['shape']} {settings['precision']}, {machine['cpu']}, {settings['threads']} threads")
    figure.savefig(file, dpi=150)


def _draw_workload(axes: Any, result: Mapping[str, Any]) -> None:
    engines = {name: each for name, each in result["engines"].items() if each["median"] is not None}
    colours = [_OURS if name == "chairlift" else _OTHERS for name in engines]
    axes.bar(list(engines), [each["median"] for each in engines.values()], color=colours)
    for position, each in enumerate(engines.values()):
        axes.plot([position] * len(each["rates"]), each["rates"], ".", color="black", markersize=3)
    if result["ceiling"] is not None:
        axes.axhline(result["ceiling"], color=_CEILING, linestyle="--", linewidth=1, label="ceiling")
        axes.legend(frameon=False, fontsize=7)
    axes.set_title(result["workload"], fontsize=10)
    axes.set_ylabel(result["unit"], fontsize=8)
    axes.tick_params(axis="x", rotation=60, labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
