"""Tables of what formats with fewer bits cost, which `chairlift compare` measures."""

from .cells import chosen, figures, percent
from .source import Source
from .table import Column, Table

DIVERGENCE = Source(
    "divergence-smollm2-bundled",
    where="The built-in text; int4 at the commit named here, all other rows at 35b1f99 with changes",
)
ROUNDING = Source(
    "rounding-small-models", where="The built-in text; int4 at the commit named here, all other rows at a087755"
)
_ROUNDED = {"gemma": "Gemma 3 270M", "qwen": "Qwen2.5-0.5B", "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M"}
_ROUNDINGS = {
    "int8": "int8",
    "int4": "int4",
    "int4 of large models": "int4, in the bits of large models",
    "Q4_0": "llama.cpp's Q4_0",
    "Q4_1": "llama.cpp's Q4_1",
    "Q4_K_M": "llama.cpp's Q4_K_M",
}
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
    Table(
        "docs/speed.md",
        "rounding",
        ROUNDING,
        lambda data: data["results"],
        (
            chosen("model", "model", _ROUNDED),
            chosen("format", "format", _ROUNDINGS),
            figures("bits", "bits", ".2f"),
            _with_error("perplexity beside bfloat16's", "perplexity_ratio", ".4f"),
            _with_error("mean KL divergence, nats", "mean_divergence", ".5f"),
            figures("99th percentile", "p99_divergence", ".4f"),
        ),
    ),
)
