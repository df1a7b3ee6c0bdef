"""The table of a comparison."""

from collections.abc import Mapping, Sequence

from comparison.ceiling import ModelShape
from comparison.results import OURS, Standing, Trial

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
