"""The tables of servers: under somebody else's loads, of shared prefixes and prompts on disk, of a step's budget, of
speculation, recurrences and streams.
"""

from .cells import OURS, chosen, figures, percent, served, text
from .records import at, beginnings, gains, mean_rounds, named, played, streams
from .source import Source
from .table import Column, Table

README, SPEED = "README.md", "docs/speed.md"
PREFIXES, SPECULATION = "docs/prefix-reuse.md", "docs/speculation.md"
PERFORMANCE, ON_DISK = "docs/performance.md", "docs/prompts-on-disk.md"

_servers = {
    "chairlift": "Chairlift",
    "no-reuse": "Chairlift, `--no-enable-prefix-caching`",
    "vllm-32": "vLLM, blocks of 32",
    "vllm": "vLLM, blocks of 128",
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
_restarts = {"chairlift": "Chairlift", "llama.cpp": "llama.cpp, its slot saved and restored by hand"}
_CPU = "cpu_us/server,cpu_us/workers,cpu_us/client"
_sizes = ("rows", "inputs", "outputs")
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


_EVALUATIONS = {
    "evaluation": Source("evaluation-qwen3-0.6b-epyc-avx512-2-cores"),
    "evaluation-tinyllama": Source("evaluation-tinyllama-1.1b-epyc-avx512-2-cores"),
    "evaluation-1b": Source("evaluation-llama-3.2-1b-epyc-avx512-2-cores"),
    "evaluation-granite": Source("evaluation-granite-3.2-2b-epyc-avx512-2-cores"),
}
_peers = (served("vLLM", "vllm", OURS), served("llama.cpp", "llama.cpp", OURS))
_loads = (
    text("load", "load"),
    figures("prompt and output tokens", "lengths/0,lengths/1"),
    figures("users", "users"),
)
_each = "servers/chairlift/{0},servers/vllm/{0},servers/llama.cpp/{0}"
_WHOSE = "Chairlift, vLLM, llama.cpp"

_latencies = (
    *_loads,
    served("output tokens/s: Chairlift", OURS),
    *_peers,
    figures(f"first token, s: {_WHOSE}", _each.format("ttft_ms"), ".2f", factor=1e-3),
    figures(f"between tokens, ms: {_WHOSE}", _each.format("itl_ms")),
)

_files = {"qwen.gguf": "Qwen2.5-0.5B", "gemma.gguf": "Gemma 3 270M"}


def _seconds(head: str, part: str) -> Column:
    return figures(f"{head}, s: before, now", f"medians/before/{part},medians/this/{part}", ".1f")


TABLES = (
    Table(
        README,
        "evaluation",
        _EVALUATIONS["evaluation"],
        played,
        (*_loads, served("Chairlift", OURS, mark="**"), *_peers),
    ),
    *(Table(SPEED, mark, source, played, _latencies) for mark, source in _EVALUATIONS.items()),
    Table(
        PERFORMANCE,
        "stream-cost",
        Source("http-cost-135m-bf16-epyc-avx512-2-cores"),
        at("cases"),
        (
            figures("streams at once", "requests"),
            percent("read as they come, median of rounds", "cost"),
            percent("the fastest round", "cost_of_fastest"),
            percent("read at the end, median", "unread_cost"),
            percent("the fastest round", "unread_cost_of_fastest"),
        ),
    ),
    Table(
        PERFORMANCE,
        "loading",
        Source("loading-gguf-2-cores"),
        at("cases"),
        (
            chosen("file", "model", _files),
            figures("MB", "megabytes"),
            _seconds("imports", "import_s"),
            _seconds("until ready", "load_s"),
            _seconds("first token", "first_token_s"),
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
        PREFIXES,
        "recurrent",
        Source("common-beginning-qwen3.5-0.8b-epyc-avx512-2-cores"),
        beginnings,
        (
            text("weights", "format"),
            figures("tokens in common", "length"),
            chosen("", "server", {"chairlift": "Chairlift", "vllm": "vLLM 0.32", "llama.cpp": "llama.cpp"}),
            figures("first prompt, ms", "first_s", factor=1000),
            figures("second, ms", "second_s", factor=1000),
            figures("later, ms", "later_s", factor=1000),
            figures("tokens cached in later ones", "later_cached_tokens"),
        ),
    ),
    Table(
        ON_DISK,
        "saving-cost",
        Source("saving-cost-1b-bf16-epyc-avx512-2-cores"),
        named("medians"),
        (
            text("saving", "name"),
            figures("tokens/s, median", "tokens_per_s", ".1f"),
            figures("processor time a token in user mode, ms, median", "user_ms", ".1f"),
        ),
    ),
    Table(
        ON_DISK,
        "restart",
        Source("prompts-on-disk-1b-bf16-epyc-avx512-2-cores"),
        named("engines"),
        (
            chosen("", "name", _restarts),
            figures("cold, s", "cold/first_token_s", ".1f"),
            figures("warm in memory, s", "memory/first_token_s", ".2f"),
            figures("after a restart, s", "restored_s", ".2f"),
            figures("times as soon as cold", "times_as_soon"),
            figures("prompt tokens cached", "disk/num_cached"),
            figures("MB written", "num_bytes", factor=1e-6),
        ),
    ),
    Table(
        PERFORMANCE,
        "recurrence-share",
        Source("recurrence-share-epyc-avx512-2-cores", where="AMD EPYC with AVX-512, VNNI and bf16", commit="f584ac7"),
        named("weights"),
        (
            text("weights", "name"),
            percent("products, those of attention too", "products", ".0f"),
            percent("states, token by token", "states", ".0f"),
            percent("convolution, norms and gates", "convolution_norms_gates", ".0f"),
            percent("the rest", "rest", ".0f"),
        ),
    ),
    Table(
        PERFORMANCE,
        "products",
        Source("products-bf16-epyc-avx512-1-thread", where="AMD EPYC with AVX-512, VNNI and bf16, one thread"),
        at("results"),
        (
            Column("rows x inputs x outputs", lambda product: " x ".join(f"{product[size]:,}" for size in _sizes)),
            figures("Chairlift", "gflops/chairlift"),
            figures("oneDNN, packed", "gflops/packed"),
            figures("torch's `linear`", "gflops/linear"),
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
