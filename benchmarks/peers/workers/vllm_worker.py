"""vLLM's CPU build, as its offline `LLM` runs it: compiled, prefix caching off, a step's budget of its default size.

Cores, cache space and the libraries it advises to preload (tcmalloc, Intel's OpenMP: the option `preload`) reach it
through the environment, before it is imported (`engines.py`). Its other options are fields of its engine's arguments,
for instance `max_num_batched_tokens=2048`.
"""

import json
from typing import Any

from peers.workers.protocol import Generate, Session, Settings, serve

_BATCHED_TOKENS = 4096  # vLLM's own for offline use on a CPU; a step then holds what others prefill at once


def load(session: Session) -> Generate:
    """`LLM` without tokenizer: prompts are ids."""
    import torch
    import vllm

    session.imported(vllm=vllm.__version__, torch=torch.__version__)
    arguments = _arguments(session.settings)
    session.about["arguments"] = arguments
    llm = vllm.LLM(**arguments)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def _arguments(settings: Settings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_requests,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, settings.max_tokens),
        "enable_prefix_caching": False,
        "seed": 0,
    }
    return arguments | {name: _value(text) for name, text in settings.options.items() if name != "preload"}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    serve(load)
