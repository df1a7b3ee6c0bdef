"""transformers on the same device, with random weights of the same shape."""

import time
from typing import Any

import torch
import transformers
from comparison.ceiling import Workload
from peers.workers.protocol import Generate
from transformers.utils.import_utils import is_flash_attn_2_available

from on_gpu.device import wait_for


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


def best_attention() -> str:
    """What its continuous batching reads its pages with."""
    return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"


def seconds(generate: Generate, workload: Workload, vocab_size: int, device: torch.device) -> float:
    """From the prompts to the last token, after one run that does not count."""
    generate(workload.prompts("warm-up", vocab_size), min(4, workload.output_tokens))
    wait_for(device)
    start = time.perf_counter()
    counts = generate(workload.prompts("measured", vocab_size), workload.output_tokens)
    wait_for(device)
    elapsed = time.perf_counter() - start
    if counts != [workload.output_tokens] * workload.num_requests:
        raise RuntimeError(f"transformers gave {counts} tokens for {workload.output_tokens} each")
    return elapsed
