"""The tables of a GPU: decode steps beside their floors, peers, and kernels alone."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .cells import chosen, figures, percent, text, workload
from .records import Records, of_kind, with_target
from .source import Source
from .table import Column, Table

README, SPEED, PERFORMANCE = "README.md", "docs/speed.md", "docs/performance.md"
H200 = Source("gpu-nvidia-h200")
_WHERE = "NVIDIA H200, torch 2.11.0+cu130"
QUICK = Source("gpu-nvidia-h200-quick", recorded="fbe37cf")
NANO = Source("gpu-nvidia-h200-nano-vllm", where=_WHERE, recorded="fbe37cf")
ATTENTION = Source("gpu-nvidia-h200-kernels-attention", where=_WHERE, recorded="57d22bc")
PRODUCTS = Source("gpu-nvidia-h200-kernels-products", where=_WHERE, recorded="57d22bc")
DRAWS = Source("gpu-nvidia-h200-kernels-draws", where=_WHERE, recorded="57d22bc")

_floors = {
    "decode large, 1 x 128, triton, graphs, 8 a launch": "1 row of 128 tokens",
    "decode large, 32 x 1024, triton, graphs, 8 a launch": "32 rows of 1,024",
    "decode large, 256 x 1024, triton, graphs, 8 a launch": "256 rows of 1,024",
}
_callers = {
    "chairlift": "Chairlift",
    "transformers generate": "transformers `generate`",
    "transformers generate_batch": "transformers `generate_batch`",
}
_beside_nano_vllm = (
    workload(),
    figures("Chairlift, tokens/s", "chairlift"),
    figures("nano-vllm", "nano-vllm"),
    figures("times", "times", ".2f"),
)
_draws = {"greedy": "greedy", "random": "temperature", "top": "temperature, top-k and top-p"}


def _by_case(part: str, ending: str = "") -> Records:
    """The cases of `gpu_kernels.py` whose name ends like that, each with the microseconds of each kernel."""

    def records(data: Any) -> Sequence[Any]:
        cases: dict[str, dict[str, Any]] = defaultdict(dict)
        for each in data["findings"][part]:
            if each["case"].endswith(ending):
                cases[each["case"].removesuffix(ending)][each["kernel"]] = each["microseconds"]
        return [{"case": case, **kernels} for case, kernels in cases.items()]

    return records


def _products(data: Any) -> Sequence[Any]:
    """The products of the 8 B shape: microseconds of cuBLAS, and of the fastest kernel by bits of a weight."""
    cases: dict[str, dict[str, Any]] = defaultdict(dict)
    for each in data["findings"]["products"]:
        matrix, bits, rows = each["case"].split(", ")
        if matrix.startswith("8 B") and ", norm" not in each["kernel"] and each["kernel"] != "dequantize":
            case = cases[f"{matrix.removeprefix('8 B ')}, {'1 row' if rows == '1 rows' else rows}"]
            name = "cuBLAS" if each["kernel"] == "cuBLAS" else bits
            case[name] = min(case.get(name, each["microseconds"]), each["microseconds"])
    return [{"case": case, **times} for case, times in cases.items()]


def _named(names: dict[str, str]) -> Records:
    """The rows of the table of `gpu.py` that have these names and a target."""
    return lambda data: [row for row in with_target(data) if row["what"] in names]


def _columns(names: dict[str, str]) -> tuple[Column, ...]:
    return (
        chosen("", "what", names),
        text("measured", "measured"),
        text("floor", "floor"),
        percent("share", "share"),
        percent("wanted", "target", ".0f"),
    )


def _without_target(data: Any) -> Sequence[Any]:
    """Decode steps that nothing was wanted of: of other sampling, and of uneven rows."""
    return [each for each in of_kind("decode")(data) if each["target"] is None]


def _decode_case(record: Any) -> str:
    rows = "1 row" if record["rows"] == 1 else f"{record['rows']} rows"
    context, spread = record["context"], record["spread"]
    tokens = f"{context - spread:,} to {context + spread:,}" if spread else f"{context:,}"
    return f"{rows} of {tokens} tokens, {record['sampling']}"


def _loads(data: Any) -> Sequence[Any]:
    """Returns the output tokens a second of both engines by load, of one round."""
    ours, theirs = (data["figures"][name]["tokens_per_s"] for name in ("chairlift", "nano-vllm"))
    return [
        {"workload": load, "chairlift": rates[0], "nano-vllm": theirs[load][0], "times": rates[0] / theirs[load][0]}
        for load, rates in ours.items()
    ]


def _draw_case(record: Any) -> str:
    kind, _, rows = record["case"].partition(", ")
    return f"{_draws[kind]}, {'1 row' if rows == '1 rows' else rows}"


TABLES = (
    Table(SPEED, "gpu-floors", QUICK, _named(_floors), _columns(_floors)),
    Table(
        SPEED,
        "gpu-sampled",
        QUICK,
        _without_target,
        (Column("8 B: decode step", _decode_case), figures("ms", "seconds", ".2f", 1000)),
    ),
    Table(
        SPEED,
        "gpu-first-tokens",
        QUICK,
        of_kind("first_token"),
        (
            figures("prompt tokens", "prompt_tokens"),
            figures("rows that decode beside it", "rows"),
            figures("first token, ms", "seconds", ".1f", 1000),
            figures("of these the host's, ms", "host_seconds", ".2f", 1000),
        ),
    ),
    Table(SPEED, "gpu-nano-vllm", NANO, _loads, _beside_nano_vllm),
    Table(README, "gpu", NANO, _loads, _beside_nano_vllm),
    Table(
        SPEED,
        "gpu-contest",
        H200,
        of_kind("contest"),
        (chosen("", "who", _callers), workload(), figures("s", "seconds", ".2f")),
    ),
    Table(
        PERFORMANCE,
        "gpu-attention",
        ATTENTION,
        _by_case("attention", ", layer by layer"),
        (
            text("rows x tokens", "case"),
            figures("own kernel, us", "triton", ".1f"),
            figures("flash-attn 2", "flash-attn 2", ".1f"),
            figures("flash-attn 3", "flash-attn 3", ".1f"),
        ),
    ),
    Table(
        PERFORMANCE,
        "gpu-draws",
        DRAWS,
        _by_case("draws"),
        (
            Column("128,256 logits a row", _draw_case),
            figures("kernels, us", "triton", ",.0f"),
            figures("torch's operators, compiled", "operators", ",.0f"),
        ),
    ),
    Table(
        PERFORMANCE,
        "gpu-products",
        PRODUCTS,
        _products,
        (
            text("matrix of 8 B", "case"),
            figures("cuBLAS, bfloat16, us", "cuBLAS", ".1f"),
            figures("kernel, bfloat16", "16 bits", ".1f"),
            figures("kernel, 8 bits", "8 bits", ".1f"),
            figures("kernel, 4 bits", "4 bits", ".1f"),
        ),
    ),
)
