"""transformers: `generate` with its static batch, or with the option `batch` its continuous batching."""

from typing import Any

from peers.workers.protocol import Generate, Session, serve

_PAGE_TOKENS = 256


def load(session: Session) -> Generate:
    """A Llama with `sdpa` attention, the default and the fastest that a CPU has there."""
    import torch
    import transformers

    session.imported(transformers=transformers.__version__, torch=torch.__version__)
    settings = session.settings
    torch.set_num_threads(settings.num_threads)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
    )
    if "batch" not in settings.options:
        return static_batch(model)
    return continuous_batch(model, [(settings.max_requests, settings.max_tokens)], max(settings.max_prompt_tokens, 512))


def static_batch(model: Any) -> Generate:
    """`generate`: all prompts of a workload have one length, so it wastes nothing on padding."""
    import torch

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        ids = torch.tensor(prompts, device=model.device)
        limits = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits)
        return [int(output.shape[1] - ids.shape[1])] * len(prompts)

    return generate


def continuous_batch(model: Any, batches: list[tuple[int, int]], max_batch_tokens: int) -> Generate:
    """`generate_batch`; no prefix is shared. `batches`: how many requests of how many tokens it has to hold.

    On a CPU it does not infer its sizes, so they are given.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sizes: dict[str, Any] = {}
    if model.device.type == "cpu":
        num_blocks = max(count * (-(-num_tokens // _PAGE_TOKENS) + 1) for count, num_tokens in batches)
        sizes = {"page_size": _PAGE_TOKENS, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **sizes)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        ends: dict[str, Any] = {"max_new_tokens": num_tokens, "eos_token_id": -1, "pad_token_id": 0}
        config = GenerationConfig.from_dict({"do_sample": False, **ends})
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        failed = [output.error for output in outputs.values() if output.error]
        if failed:
            raise RuntimeError(f"generate_batch: {failed[0]}")
        return [len(output.generated_tokens) for output in outputs.values()]

    return generate


if __name__ == "__main__":
    serve(load)
