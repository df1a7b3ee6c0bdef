"""The model card: `card_template.md` filled in with what was measured."""

import os
from dataclasses import dataclass
from pathlib import Path

from bundled_model.evaluation import Result, overall
from bundled_model.exchange import HELD_OUT_PERCENT
from bundled_model.fact_skills import OPPOSITES
from bundled_model.saving import WEIGHTS_FILE
from bundled_model.training import Budget, Progress, model_config


@dataclass(frozen=True)
class Run:
    """What is known of a finished training run."""

    budget: Budget
    progress: Progress
    parameters: int
    threads: int
    command: str


_TEMPLATE = Path(__file__).with_name("card_template.md")


def _table(results: list[Result]) -> str:
    rows = [f"| {result.skill} | {result.accuracy:.1f} % |" for result in results]
    return "\n".join([*rows, f"| **overall** | **{overall(results).accuracy:.1f} %** |"])


def model_card(run: Run, results: list[Result], directory: Path) -> str:
    """The text of the card for the model in a directory."""
    config = model_config()
    return _TEMPLATE.read_text().format(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv=config.num_key_value_heads,
        head_dim=config.head_dim,
        positions=config.max_position_embeddings,
        parameters=run.parameters,
        weights_file=WEIGHTS_FILE,
        size=(directory / WEIGHTS_FILE).stat().st_size,
        held_out=HELD_OUT_PERCENT,
        samples=results[0].total,
        table=_table(results),
        command=run.command,
        minutes=run.progress.seconds / 60,
        steps=run.progress.step,
        tokens=run.progress.tokens / 1e6,
        speed=run.progress.tokens / run.progress.seconds,
        cores=os.cpu_count(),
        threads=run.threads,
        opposites=len(OPPOSITES),
        batch=run.budget.tokens_per_batch,
        rate=run.budget.learning_rate,
    )
