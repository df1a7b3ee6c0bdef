"""What a step's token budget costs and brings: a table, JSON, and the figure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from chairlift.bench.records import MS_PER_S
from serving.streams import Mix, MixFigures

_BLUE, _LIGHT_BLUE, _ORANGE, _GREY = "#2a6f97", "#8fb8d0", "#d97706", "#6b7280"


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """What one round comes to. Times in ms, rates per second; of all streams together where they are tokens.

    `tpot_ms` is the time per output token of a stream while long prompts come in: all streams move on together, so it
    is every stream's. `quiet_itl_p50_ms` is the median gap before.
    """

    tpot_ms: float
    itl_p99_ms: float
    quiet_itl_p50_ms: float
    ttft_p50_ms: float
    prompt_tokens_per_s: float
    stream_tokens_per_s: float

    @classmethod
    def of(cls, seen: MixFigures, mix: Mix) -> Self:
        return cls(
            tpot_ms=seen.busy_s * MS_PER_S * mix.num_streams / seen.streamed_tokens,
            itl_p99_ms=float(np.percentile(seen.gaps_ms, 99)),
            quiet_itl_p50_ms=statistics.median(seen.quiet_gaps_ms),
            ttft_p50_ms=statistics.median(seen.ttft_ms),
            prompt_tokens_per_s=len(seen.ttft_ms) * mix.long_prompt_tokens / seen.busy_s,
            stream_tokens_per_s=seen.streamed_tokens / seen.busy_s,
        )


@dataclass(slots=True)
class Trial:
    """All rounds of one budget."""

    budget: int
    rounds: list[RoundFigures] = field(default_factory=list)

    @property
    def medians(self) -> RoundFigures:
        """Each figure's median over the rounds."""
        names = [each.name for each in fields(RoundFigures)]
        return RoundFigures(**{name: statistics.median(getattr(each, name) for each in self.rounds) for name in names})


def record(trial: Trial) -> dict[str, Any]:
    """A trial as JSON: medians over its rounds, and the rounds."""
    return {
        "budget": trial.budget,
        "medians": asdict(trial.medians),
        "rounds": [asdict(each) for each in trial.rounds],
    }


def table(trials: Sequence[Trial]) -> str:
    """A line for each budget."""
    heads = ("budget", "TPOT, ms", "ITL p99, ms", "alone, ms", "long TTFT, ms", "prompt tok/s", "stream tok/s")
    lines = ["".join(f"{head:>15}" for head in heads)]
    for trial in trials:
        of = trial.medians
        times = [of.tpot_ms, of.itl_p99_ms, of.quiet_itl_p50_ms, of.ttft_p50_ms]
        rates = [of.prompt_tokens_per_s, of.stream_tokens_per_s]
        cells = [f"{time:>15.1f}" for time in times] + [f"{rate:>15,.0f}" for rate in rates]
        lines.append(f"{trial.budget:>15}" + "".join(cells))
    return "\n".join(lines)


def draw(report: Mapping[str, Any], file: Path) -> None:
    """The figure of a report. Needs matplotlib (the extra `[bench]`)."""
    from matplotlib.figure import Figure

    settings = report["settings"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    streams, prompts = figure.subplots(1, 2)
    _draw_streams(streams, report["results"])
    streams.set_title(f"Time between tokens of {settings['mix']['num_streams']} streams")
    _draw_prompts(prompts, report["results"])
    prompts.set_title(f"Meanwhile: prompts of {settings['mix']['long_prompt_tokens']:,} tokens, one after another")
    figure.suptitle(f"{settings['shape']} {settings['dtype']}, {report['machine']['cpu']}")
    figure.savefig(file, dpi=150)


def _draw_streams(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    for name, label, colour in (("itl_p99_ms", "p99 of the gaps", _BLUE), ("tpot_ms", "mean (TPOT)", _LIGHT_BLUE)):
        axes.plot(_budgets(results), _medians(results, name), marker="o", color=colour, label=label)
    alone = statistics.median(_medians(results, "quiet_itl_p50_ms"))
    axes.axhline(alone, color=_GREY, linestyle=":", label="median with no long prompt")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("ms")
    axes.legend(frameon=False)
    _dress(axes, results)


def _draw_prompts(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    axes.plot(_budgets(results), _medians(results, "prompt_tokens_per_s"), marker="o", color=_BLUE)
    axes.set_ylabel("prompt tokens/s", color=_BLUE)
    waiting = axes.twinx()
    waiting.plot(_budgets(results), _medians(results, "ttft_p50_ms"), marker="s", color=_ORANGE)
    waiting.set_ylabel("median time to first token, ms", color=_ORANGE)
    for each in (axes, waiting):
        each.set_ylim(bottom=0)
        _dress(each, results)


def _dress(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(_budgets(results), [str(budget) for budget in _budgets(results)])
    axes.set_xlabel("max_num_batched_tokens")
    axes.spines["top"].set_visible(False)


def _budgets(results: Sequence[Mapping[str, Any]]) -> list[int]:
    return [each["budget"] for each in results]


def _medians(results: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [each["medians"][name] for each in results]
