"""The tables of README and docs/speed.md that were measured on processors."""

from .cells import OURS, ceiling, chosen, commit, figures, rate, text, workload
from .records import formats, levels, trials, trials_of_runs
from .source import Source, level_name
from .table import Column, Table

README, SPEED = "README.md", "docs/speed.md"
AMX_135M = Source("compare-135m-bf16-xeon-amx-2-cores")
LLAMA_CPP = Source("compare-llama-cpp-135m-xeon-avx512-2-cores", labels="quantized")
FORMATS = Source("formats-smollm2-avx512-vnni-xeon-2-cores")
FORMATS_EPYC = Source("formats-smollm2-epyc-avx512-2-cores")

_FORMATS = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int4", "file": "its own GGUF file, Q4_1"}
_names = chosen("format", "name", _FORMATS)
_bits = figures("bits a weight", "bits", ".1f")
_perplexity = figures("perplexity", "perplexity", ".2f")
_speeds = figures("tokens/s at 1, 8 and 32 requests", "rates/0,rates/1,rates/2")
_memory = figures("peak memory, GB", "peak_bytes", ".2f", factor=1e-9)
_by_format = (_names, _bits, _perplexity, _speeds)
_level = Column("instruction set", lambda record: level_name(record["name"]))
_ours = (workload(), rate("Chairlift", OURS), ceiling)
_openvino, _vllm = rate("OpenVINO GenAI", "openvino", OURS), rate("vLLM", "vllm", OURS)
_three = (rate("bfloat16", OURS), rate("int8", "int8"), rate("int4", "int4"))


def _levels(mark: str, name: str, wanted: tuple[str, ...], *shown: str) -> Table:
    return Table(SPEED, mark, Source(name), levels(*wanted), (_level, *(text(_FORMATS[each], each) for each in shown)))


TABLES = (
    Table(README, "formats", FORMATS_EPYC, formats, _by_format),
    Table(
        SPEED,
        "135m-amx",
        AMX_135M,
        trials(is_with_start=True),
        (
            *_ours,
            rate("OpenVINO GenAI 2026.4", "openvino", OURS),
            rate("vLLM 0.32", "vllm", OURS),
            rate("transformers 5.23 `generate`", "transformers", OURS),
            rate("`generate_batch`", "transformers-batch", OURS),
        ),
    ),
    Table(
        SPEED,
        "1b-amx",
        Source("compare-1b-bf16-int8-xeon-amx-2-cores"),
        trials(is_with_start=True),
        (*_ours, _openvino, _vllm),
    ),
    Table(
        SPEED,
        "qwen3-openvino",
        Source("compare-qwen3-0.6b-widened-xeon-avx512-2-cores"),
        trials(is_with_start=True),
        (*_ours, _openvino),
    ),
    Table(
        SPEED,
        "qwen3-vllm",
        Source("compare-qwen3-0.6b-widened-vllm-xeon-avx512-2-cores"),
        trials(is_with_start=True),
        (*_ours, _vllm),
    ),
    Table(
        SPEED,
        "llama-cpp-avx512",
        LLAMA_CPP,
        trials_of_runs,
        (
            workload(),
            rate("Q4_0: Chairlift", "ours-q4_0"),
            rate("llama.cpp", "llama-q4_0", "ours-q4_0"),
            rate("Q8_0: Chairlift", "ours-q8_0"),
            rate("llama.cpp", "llama-q8_0", "ours-q8_0"),
            commit,
        ),
    ),
    Table(
        SPEED,
        "gemma-4",
        Source("compare-gemma-4-llama-cpp-epyc-avx512-2-cores"),
        trials_of_runs,
        (
            text("model", "run"),
            workload(),
            rate("Chairlift", OURS),
            rate("llama.cpp", "llama.cpp", OURS),
        ),
    ),
    Table(
        SPEED,
        "recurrent-vllm",
        Source("compare-recurrent-vllm-epyc-avx512-2-cores"),
        trials_of_runs,
        (text("model", "run"), workload(), rate("Chairlift", OURS), ceiling, rate("vLLM", "vllm", OURS)),
    ),
    *(
        Table(
            SPEED,
            mark,
            Source(f"compare-{mark}-llama-cpp-epyc-avx512-2-cores"),
            trials_of_runs,
            (text("model", "run"), workload(), rate("Chairlift", OURS), *more, rate("llama.cpp", "llama.cpp", OURS)),
        )
        for mark, more in (("recurrent", ()), ("experts", (ceiling,)))
    ),
    Table(
        SPEED,
        "openvino-avx512",
        Source("compare-openvino-135m-int8-int4-xeon-avx512-2-cores"),
        trials(),
        (
            workload(),
            rate("int8: Chairlift", OURS),
            rate("OpenVINO GenAI", "openvino-int8", OURS),
            rate("int4: Chairlift", "int4"),
            rate("OpenVINO GenAI", "openvino-int4", "int4"),
        ),
    ),
    Table(
        SPEED,
        "1b-avx512",
        Source("compare-1b-int8-int4-decode-xeon-avx512-2-cores"),
        trials(),
        (workload(), *_three),
    ),
    Table(SPEED, "formats-avx512", FORMATS, formats, _by_format),
    _levels(
        "levels-135m",
        "formats-smollm2-xeon-avx512-2-cores",
        ("avx2", "avx2_vnni", "avx512_bf16"),
        *("bfloat16", "int8", "int4", "file"),
    ),
    _levels(
        "levels-1b", "formats-1b-xeon-avx512-2-cores", ("avx2", "avx512", "avx512_vnni"), *("bfloat16", "int8", "int4")
    ),
    Table(SPEED, "formats-epyc", FORMATS_EPYC, formats, (*_by_format, _memory)),
    Table(
        SPEED,
        "135m-epyc",
        Source("compare-135m-bf16-int8-int4-epyc-avx512-2-cores"),
        trials(),
        (
            workload(),
            _three[0],
            ceiling,
            *_three[1:],
            rate("torch backend", "torch", OURS),
            rate("vLLM 0.32", "vllm", OURS),
        ),
    ),
    Table(
        SPEED,
        "1b-epyc",
        Source("compare-1b-bf16-int8-int4-epyc-avx512-2-cores"),
        trials(is_with_start=True),
        (workload(), *_three, rate("torch backend", "torch", OURS)),
    ),
    Table(
        SPEED,
        "files-avx2",
        Source("compare-135m-avx2-epyc-zen3-2-threads"),
        trials(),
        (
            workload(),
            rate("Q4_0: Chairlift", "q4_0"),
            rate("llama.cpp", "llama-q4_0", "q4_0"),
            rate("Q8_0: Chairlift", "q8_0"),
            rate("llama.cpp", "llama-q8_0", "q8_0"),
        ),
    ),
    Table(
        SPEED,
        "formats-avx2",
        Source("compare-135m-avx2-epyc-zen3-2-threads"),
        trials(),
        (
            workload(),
            rate("bfloat16: Chairlift", OURS),
            rate("vLLM 0.32", "vllm", OURS),
            rate("int8: Chairlift", "int8"),
            rate("OpenVINO GenAI", "ov-int8", "int8"),
            rate("int4: Chairlift", "int4"),
            rate("OpenVINO GenAI", "ov-int4", "int4"),
        ),
    ),
    Table(
        SPEED,
        "llama-cpp-avx2",
        Source("compare-llama-cpp-135m-q8_0-avx2-2-cores", where="Intel Xeon held to AVX2, 2 threads"),
        trials_of_runs,
        (
            workload(),
            rate("bfloat16: Chairlift", OURS),
            rate("Q8_0: Chairlift", "ours-q8_0"),
            rate("llama.cpp", "llama-q8_0", "ours-q8_0"),
        ),
    ),
)
