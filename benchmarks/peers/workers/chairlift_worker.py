"""Chairlift, as `LLM.generate` runs it.

Options: fields of `EngineConfig`, also another `model` of the same shape; `level`, the kernels' instruction set, which
the driver puts into the environment.
"""

import itertools
from typing import Any

from peers.workers.protocol import Generate, Session, serve


def load(session: Session) -> Generate:
    """`LLM` with slots for the largest workload; everything else as its user would find it."""
    import chairlift

    make_llm = chairlift.LLM  # sets what OpenMP reads when torch is imported

    import torch

    from chairlift.models.cpu.processor import usable_instruction_sets, wanted_level
    from chairlift.params import RequestOptions

    session.imported(chairlift=chairlift.__version__, torch=torch.__version__)
    settings = session.settings
    own: dict[str, Any] = {"model": settings.model, "quantization": settings.quantization, **settings.options}
    own.pop("level", None)
    llm = make_llm(
        device="cpu",
        dtype=settings.dtype,
        num_threads=settings.num_threads,
        max_batch_size=settings.max_requests,
        max_seq_len=settings.max_tokens,
        **own,
    )
    session.about["attention_backend"] = str(llm.config.attention_backend)
    if llm.config.attention_backend == "cpu":
        session.about["cpu_level"] = wanted_level() or usable_instruction_sets()[0]

    clients = map(str, itertools.count())  # one a batch, so that none is guessed from an earlier batch's answers

    def generate(prompts: list[list[int]], num_tokens: int) -> list[int]:
        params = chairlift.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        options = RequestOptions(tenant=next(clients))
        outputs = llm.generate(prompts, params, use_tqdm=False, options=options)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
