"""OpenVINO GenAI's `ContinuousBatchingPipeline`, on a model exported for it.

Options: `model`, the exported folder; `hint`, its performance hint (LATENCY unless given: THROUGHPUT, which splits the
cores into streams, ended version 2026.4 by SIGFPE on two cores); `cache`, the number format of keys and values (unless
given, the one it computes in, as everyone's: its own default is u8); `max_num_batched_tokens`, a step's budget;
`prompt_lookup`, how many tokens a step it guesses from the text. Where the processor has no bfloat16 it computes in
float32, and refuses a cache in bfloat16.
"""

from typing import Any

from peers.workers.protocol import Generate, Session, serve

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
_BATCHED_TOKENS = 4096
_NGRAM_TOKENS = 3  # the longest end of a text that is looked up, as its documentation has it


def load(session: Session) -> Generate:
    """The pipeline with room for the largest workload, prefix caching off."""
    import numpy as np
    import openvino
    import openvino_genai

    session.imported(openvino_genai=openvino_genai.__version__, openvino=openvino.__version__)
    settings = session.settings
    precision = _PRECISIONS[settings.dtype]
    if precision == "bf16" and "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        precision = "f32"
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": settings.options.get("hint", "LATENCY"),
        "INFERENCE_NUM_THREADS": settings.num_threads,
        "KV_CACHE_PRECISION": settings.options.get("cache", precision),
    }
    num_guessed = int(settings.options.get("prompt_lookup", "0"))
    if num_guessed:
        properties["prompt_lookup"] = True
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.max_num_batched_tokens = int(settings.options.get("max_num_batched_tokens", _BATCHED_TOKENS))
    scheduling.max_num_seqs = settings.max_requests
    scheduling.cache_size = settings.cache_gigabytes
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    session.about["properties"] = properties
    session.about["scheduling"] = scheduling.to_string()
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings.options.get("model", settings.model), scheduling, "CPU", properties
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        if num_guessed:
            config.num_assistant_tokens, config.max_ngram_size = num_guessed, _NGRAM_TOKENS
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        outputs = pipeline.generate(inputs, [config] * len(prompts))
        return [len(output.m_generation_ids[0]) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
