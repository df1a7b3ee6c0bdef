"""The table and the picture of a comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.engines import OURS

from comparison.ceiling import ModelShape
from comparison.contest import Standing, Trial

_WIDTH = 11


def table(trials: Sequence[Trial], standings: Mapping[str, Standing], shape: ModelShape) -> str:
    """Medians of tokens per second, and below them how many times as fast as each engine Chairlift is."""
    names = list(standings)
    width = max(_WIDTH, *map(len, names))
    heads = [*(f"{name:>{width}}" for name in names), f"{'ceiling':>8}  {'share':>5}  best peer"]
    lines = [f"{'workload':<12}  {'':<16}" + "  ".join(heads)]
    for trial in trials:
        medians = [_cell(trial.median(name), width, 1) for name in names]
        ratios = [_cell(None if name == OURS else trial.ratio(name), width, 2, "") for name in names]
        end = f"{_cell(trial.ceiling(shape), 8, 1, '')}  {_cell(trial.share(shape), 5, 2, '')}"
        lines.append(f"{trial.workload.name:<12}  {trial.workload.unit:<16}" + "  ".join([*medians, end]))
        lines.append(f"{'':<12}  {'ratio':<16}" + "  ".join([*ratios, f"{'':15}  {_best(trial, standings)}"]).rstrip())
    return "\n".join([*lines, "", start_table(standings), *_failures(trials, standings)])


def start_table(standings: Mapping[str, Standing]) -> str:
    """Start-up and memory."""
    lines = [f"{'engine':<20}  {'first token, s':>14}  {'after imports, s':>16}  {'peak memory, GB':>15}"]
    for name, standing in standings.items():
        gigabytes = standing.peak_bytes / 1e9 if standing.peak_bytes else None
        cells = [_cell(standing.first_token_s, 14, 2), _cell(standing.after_imports_s, 16, 2), _cell(gigabytes, 15, 2)]
        lines.append(f"{name:<20}  " + "  ".join(cells))
    return "\n".join(lines)


def _best(trial: Trial, standings: Mapping[str, Standing]) -> str:
    if (best := trial.best_peer(standings)) is None:
        return ""
    ratio = trial.ratio(best)
    return best if ratio is None else f"{best} {ratio:.2f}"


def _failures(trials: Sequence[Trial], standings: Mapping[str, Standing]) -> list[str]:
    absent = [f"{name}: {standing.failure}" for name, standing in standings.items() if standing.failure]
    failed = [
        f"{name} at {trial.workload.name}, {score.failure}"
        for trial in trials
        for name, score in trial.scores.items()
        if score.failure and not standings[name].failure
    ]
    return [f"FAILED {line}" for line in [*absent, *failed]]


def _cell(value: float | None, width: int, decimals: int, missing: str = "failed") -> str:
    return f"{missing:>{width}}" if value is None else f"{value:{width}.{decimals}f}"


_OUR_COLOUR, _THEIR_COLOUR, _CEILING_COLOUR = "#2a6f97", "#b8c4cc", "#c1121f"


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
    colours = [_OUR_COLOUR if name == OURS else _THEIR_COLOUR for name in engines]
    axes.bar(list(engines), [each["median"] for each in engines.values()], color=colours)
    for position, each in enumerate(engines.values()):
        axes.plot([position] * len(each["rates"]), each["rates"], ".", color="black", markersize=3)
    if result["ceiling"] is not None:
        axes.axhline(result["ceiling"], color=_CEILING_COLOUR, linestyle="--", linewidth=1, label="ceiling")
        axes.legend(frameon=False, fontsize=7)
    axes.set_title(result["workload"], fontsize=10)
    axes.set_ylabel(result["unit"], fontsize=8)
    axes.tick_params(axis="x", rotation=60, labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
