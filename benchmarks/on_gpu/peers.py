"""transformers on the same device, with random weights of the same shape: `generate` and `generate_batch`."""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from comparison.workload import Workload
from transformers.utils.import_utils import is_flash_attn_2_available

from on_gpu.rates import wait_for

_PAGE_TOKENS = 256
Generate = Callable[[list[list[int]], int], None]


def make_model(config: transformers.LlamaConfig, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """Made on the device, in that number format."""
    config._attn_implementation = attention
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def static_batch(model: Any) -> Generate:
    """`generate`: all prompts of a workload have one length, so it wastes nothing on padding."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts, device=model.device)
        limits = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits)

    return generate


def continuous_batch(model: Any, workloads: tuple[Workload, ...]) -> Generate:
    """`generate_batch`; no prefix is shared. On a CPU it does not infer its sizes, so they are given."""
    sizes: dict[str, Any] = {}
    if model.device.type == "cpu":
        num_blocks = [
            each.num_requests * (-(-(each.prompt_tokens + each.output_tokens) // _PAGE_TOKENS) + 1)
            for each in workloads
        ]
        sizes = {"page_size": _PAGE_TOKENS, "num_blocks": max(num_blocks), "max_batch_tokens": 512}
    batching = transformers.ContinuousBatchingConfig(allow_block_sharing=False, **sizes)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ends = {"max_new_tokens": num_tokens, "eos_token_id": -1, "pad_token_id": 0}
        config = transformers.GenerationConfig.from_dict({"do_sample": False, **ends})
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        short = [len(output.generated_tokens) for output in outputs.values()]
        if len(short) != len(prompts) or min(short) < num_tokens:
            raise RuntimeError(f"generate_batch gave {short} tokens for {num_tokens} each")

    return generate


def best_attention() -> str:
    """What its continuous batching reads its pages with."""
    return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"


def seconds(generate: Generate, workload: Workload, vocab_size: int, device: torch.device) -> float:
    """From the prompts to the last token, after one run that does not count."""
    generate(workload.prompts("warm-up", vocab_size), min(4, workload.output_tokens))
    wait_for(device)
    start = time.perf_counter()
    generate(workload.prompts("measured", vocab_size), workload.output_tokens)
    wait_for(device)
    return time.perf_counter() - start
