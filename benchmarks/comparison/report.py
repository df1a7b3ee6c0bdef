"""The table of a comparison."""

from collections.abc import Mapping, Sequence

from machine import format_table
from peers.engines import OURS

from comparison.ceiling import ModelShape
from comparison.contest import Standing, Trial


def table(trials: Sequence[Trial], standings: Mapping[str, Standing], shape: ModelShape) -> str:
    """Medians of tokens per second, and below them how many times as fast as each engine Chairlift is.

    Then start-up and memory, and what failed.
    """
    rows = [["workload", "", *standings, "ceiling", "share", "best peer"]]
    for trial in trials:
        medians = [_cell(trial.median(name), 1) for name in standings]
        ratios = [_cell(None if name == OURS else trial.ratio(name), 2, "") for name in standings]
        ends = [_cell(trial.ceiling(shape), 1, ""), _cell(trial.share(shape), 2, "")]
        rows.append([trial.workload.name, trial.workload.unit, *medians, *ends])
        rows.append(["", "ratio", *ratios, "", "", _best(trial, standings)])
    starts = [["engine", "first token, s", "after imports, s", "peak memory, GB"]]
    for name, each in standings.items():
        figures = (each.first_token_s, each.after_imports_s, each.peak_bytes / 1e9 or None)
        starts.append([name, *(_cell(figure, 2) for figure in figures)])
    return "\n".join([format_table(rows), "", format_table(starts), *_failures(trials, standings)])


def _best(trial: Trial, standings: Mapping[str, Standing]) -> str:
    best = trial.best_peer(standings)
    ratio = None if best is None else trial.ratio(best)
    return f"{best or ''} {_cell(ratio, 2, '')}".strip()


def _failures(trials: Sequence[Trial], standings: Mapping[str, Standing]) -> list[str]:
    absent = [f"{name}: {standing.failure}" for name, standing in standings.items() if standing.failure]
    failed = [
        f"{name} at {trial.workload.name}, {score.failure}"
        for trial in trials
        for name, score in trial.scores.items()
        if score.failure and not standings[name].failure
    ]
    return [f"FAILED {line}" for line in [*absent, *failed]]


def _cell(value: float | None, decimals: int, missing: str = "failed") -> str:
    return missing if value is None else f"{value:.{decimals}f}"
