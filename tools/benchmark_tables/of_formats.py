"""README's table of what formats with fewer bits cost, which `chairlift compare` measures."""

from .cells import chosen, figures, percent
from .source import Source
from .table import Column, Table

DIVERGENCE = Source("divergence-smollm2-bundled", where="The built-in text")
_MODELS = {"smollm2": "SmolLM2-135M", "bundled": "the bundled model"}
_FORMATS = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int4", "file": "its own GGUF file, Q4_1"}


def _with_error(head: str, path: str, form: str) -> Column:
    shown, error = (figures(head, f"{path}/{part}", form) for part in ("value", "error"))
    return Column(head, lambda record: f"{shown.cell(record)} ± {error.cell(record)}")


TABLES = (
    Table(
        "README.md",
        "divergence",
        DIVERGENCE,
        lambda data: data["results"],
        (
            chosen("model", "model", _MODELS),
            chosen("format", "format", _FORMATS),
            _with_error("perplexity beside float32's", "perplexity_ratio", ".4f"),
            _with_error("mean KL divergence, nats", "mean_divergence", ".5f"),
            figures("99th percentile", "p99_divergence", ".4f"),
            percent("same likeliest token", "top_agreement/value"),
        ),
    ),
)
