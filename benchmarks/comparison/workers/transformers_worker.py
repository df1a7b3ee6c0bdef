"""transformers: `generate` with its static batch, or with the option `batch` its continuous batching."""

from typing import Any

from comparison.workers.protocol import Generate, Session, Settings, serve


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
    return _continuous(model, settings) if "batch" in settings.options else _static(model)


def _static(model: Any) -> Generate:
    """`generate`: all prompts of a workload have one length, so it wastes nothing on padding."""
    import torch

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        return [int(output.shape[1] - ids.shape[1])] * len(prompts)

    return generate


def _continuous(model: Any, settings: Settings) -> Generate:
    """`generate_batch`: its sizes for a CPU are not inferred, so they are given; no prefix is shared."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page_size = 256
    blocks_per_request = -(-settings.max_tokens // page_size)
    batching = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=settings.max_requests * (blocks_per_request + 1),
        max_batch_tokens=max(settings.max_prompt_tokens, 512),
        allow_block_sharing=False,
    )

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
