"""The tables of a GPU, of shared prefixes, of a step's budget, of speculation and of streams."""

from .cells import chosen, figures, percent, text, workload
from .records import at, gains, launches, mean_rounds, named, of_kind, streams, with_target
from .source import Source
from .table import Column, Table

SPEED, PREFIXES, SPECULATION = "docs/speed.md", "docs/prefix-reuse.md", "docs/speculation.md"
PERFORMANCE = "docs/performance.md"
H200 = Source("gpu-nvidia-h200")
H200_MORE = Source("gpu-nvidia-h200-http-and-kernels", recorded="14de84f")

_servers = {
    "chairlift": "Chairlift",
    "no-reuse": "Chairlift, `--no-enable-prefix-caching`",
    "vllm-32": "vLLM, blocks of 32",
    "vllm": "vLLM, blocks of 128",
}
_wanted_of_a_gpu = {
    "decode large, 1 x 128, flash_attn, graphs, 8 a launch": "8 B: decode step, 1 row of 128 tokens",
    "decode large, 32 x 1024, flash_attn, graphs, 8 a launch": "32 rows of 1,024",
    "decode large, 256 x 1024, flash_attn, graphs, 8 a launch": "256 rows of 1,024",
    "prefill large, 16x1024+1": "16 prompts of 1,024 tokens",
    "idle large, 1 rows: in all, between steps": "time in which no kernel runs, 1 row; share: between steps (at most)",
    "idle large, 32 rows: in all, between steps": "32 rows",
    "idle large, 256 rows: in all, between steps": "256 rows",
    "decode small, 1 x 128, flash_attn, graphs, 8 a launch": "1 B: decode step, 1 row of 128 tokens",
}
_callers = {
    "chairlift": "Chairlift",
    "transformers generate": "transformers `generate`",
    "transformers generate_batch": "transformers `generate_batch`",
}
_ttft = (
    chosen("", "name", _servers),
    figures("turn 1", "ttft_p50_ms_by_turn/0"),
    figures("turn 2", "ttft_p50_ms_by_turn/1"),
    figures("all turns", "ttft_p50_ms"),
    figures("p90", "ttft_p90_ms"),
    percent("prompt tokens cached", "cached_share", ".0f"),
    figures("times as late: turn 1, turn 2, all", "ratio_by_turn/0,ratio_by_turn/1,ratio", ".1f"),
    figures("whole round, s", "duration_s", ".1f"),
)
_memories = {"elastic": "32 elastic slots", "whole": "2 whole slots of 8,192 tokens", "vllm": "vLLM's pages"}
_CPU = "cpu_us/server,cpu_us/workers,cpu_us/client"
_kinds = {
    "copy": "repeat a text with a change",
    "json": "an object as JSON",
    "code": "edit a function",
    "schema": "under a JSON schema",
    "free": "free text",
    "again": "asked again",
    "prediction": "the right `prediction`",
}


def _gains(mark: str, source: Source, *kinds: str) -> Table:
    columns = (text("requests at once", "rows"), *(figures(_kinds[kind], kind, ".2f") for kind in kinds))
    return Table(SPECULATION, mark, source, gains, columns)


TABLES = (
    Table(
        SPEED,
        "gpu-floors",
        H200,
        with_target,
        (
            chosen("", "what", _wanted_of_a_gpu),
            text("measured", "measured"),
            text("floor", "floor"),
            percent("share", "share"),
            percent("wanted", "target", ".0f"),
        ),
    ),
    Table(
        SPEED,
        "gpu-contest",
        H200,
        of_kind("contest"),
        (chosen("", "who", _callers), workload(), figures("s", "seconds", ".2f")),
    ),
    Table(SPEED, "gpu-launches", H200_MORE, launches, (text("1 B, a step", "name"), figures("ms", "s", ".1f", 1000))),
    Table(
        SPEED,
        "gpu-http",
        H200_MORE,
        at("http", "runs"),
        (
            text("clients", "concurrency"),
            Column("prompt tokens", lambda run: f"{int(run['prompt_tokens']):,}"),
            figures("output tokens/s", "summary/output_token_throughput"),
            figures("first token, ms", "summary/ttft_ms/p50"),
            figures("per output token, ms", "summary/tpot_ms/p50", ".1f"),
        ),
    ),
    Table(PREFIXES, "all-at-once", Source("shared-prefix-135m-bf16-all-at-once-xeon-amx-2-cores"), mean_rounds, _ttft),
    Table(
        PREFIXES,
        "one-user-a-second",
        Source("shared-prefix-135m-bf16-1-user-per-s-xeon-amx-2-cores"),
        mean_rounds,
        _ttft[:-1],
    ),
    Table(
        PREFIXES,
        "token-budget",
        Source("token-budget-135m-bf16-xeon-amx-2-cores"),
        at("results"),
        (
            figures("`max_num_batched_tokens`", "budget"),
            figures("TPOT, ms", "medians/tpot_ms"),
            figures("gaps' p99, ms", "medians/itl_p99_ms"),
            figures("long prompt's TTFT, ms", "medians/ttft_p50_ms"),
            figures("prompt tokens/s", "medians/prompt_tokens_per_s"),
            figures("streams' tokens/s", "medians/stream_tokens_per_s"),
            figures("gap without long prompts, ms", "medians/quiet_itl_p50_ms", ".1f"),
        ),
    ),
    Table(
        PERFORMANCE,
        "equal-memory",
        Source("equal-memory-135m-xeon-avx512-2-cores", where="Intel Xeon with AVX-512, 2 cores", recorded="01c6d66"),
        named("engines"),
        (
            chosen("", "name", _memories),
            figures("output tokens/s", "tokens_per_s"),
            figures("s", "seconds"),
        ),
    ),
    Table(
        PERFORMANCE,
        "streams",
        Source("host-path-2-cores"),
        streams,
        (
            figures("streams", "streams"),
            figures("step, ms", "step_ms"),
            figures("prompt and output tokens", "prompt_tokens,output_tokens"),
            text("server", "server"),
            figures("tokens/s", "tokens_per_s"),
            figures("device's tokens/s", "ideal"),
            percent("device idle", "idle", ".0f"),
            figures("p99 of gaps, ms", "gap_ms/p99"),
            figures("CPU a token, us: first process, its children, client", _CPU, ".1f"),
        ),
    ),
    _gains(
        "xeon",
        Source(
            "speculation-smollm2-2-threads",
            where="Intel Xeon with AVX-512 and without AMX, 2 threads",
            recorded="a4ad42f",
        ),
        *_kinds,
    ),
    _gains(
        "epyc",
        Source("speculation-smollm2-epyc-2-cores"),
        *("copy", "json", "code", "schema", "free", "prediction"),
    ),
    _gains("avx2", Source("speculation-smollm2-avx2-epyc-2-threads"), *("copy", "code", "free", "prediction")),
    _gains("1b", Source("speculation-1b-int8-epyc-2-cores"), *("prediction", "free")),
    Table(
        SPECULATION,
        "peers",
        Source("speculation-peers-smollm2-epyc-2-cores"),
        gains,
        (
            text("requests at once", "rows"),
            chosen("", "engine", {"chairlift": "Chairlift", "openvino": "OpenVINO's prompt lookup"}),
            *(figures(_kinds[kind], kind, ".2f") for kind in ("copy", "json", "code", "free")),
        ),
    ),
)
