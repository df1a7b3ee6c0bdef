"""The parts of a run. Each returns measurements; `gpu.py` runs each in a process of its own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import transformers
from comparison.ceiling import Workload
from peers.workers.protocol import Generate
from peers.workers.transformers_worker import continuous_batch, static_batch
from transformers.utils.import_utils import is_flash_attn_2_available

from on_gpu.device import measure_rates, wait_for
from on_gpu.engine import TOKENS_BESIDE, Engine, Graphs
from on_gpu.grouped import write_grouped
from on_gpu.scale import Decode, hugging_face_config
from on_gpu.serving import serve_all
from on_gpu.setup import MANY_STEPS, Measurement, Setup, longest

_PREFILL_TRIES = 3
_ROOM = 64  # tokens that rows may generate while the last of them are still prompts


def rates(setup: Setup) -> list[Measurement]:
    """The device's two ceilings."""
    scale = setup.scale
    found = measure_rates(setup.torch_device, getattr(torch, setup.dtype), scale.cube, scale.read_bytes)
    return [{"kind": "rates", **asdict(found)}]


def large(setup: Setup) -> list[Measurement]:
    """The large shape as it is served: decoding, prompts, whole workloads, and what the device does in between."""
    scale = setup.scale
    workloads = [*setup.decode_workloads(scale.large_decodes), scale.prefill, *scale.contests]
    engine = setup.engine("large", MANY_STEPS, workloads)
    measurements = setup.time_decodes(engine, "large", scale.large_decodes)
    seconds = min(engine.seconds(scale.prefill) for _ in range(_PREFILL_TRIES))
    measurements.append({"kind": "prefill", "shape": "large", "workload": scale.prefill.name, "seconds": seconds})
    for workload in scale.contests:
        engine.seconds(Workload(workload.num_requests, workload.prompt_tokens, 1))  # the first of its sizes
        found = engine.seconds(workload)
        measurements.append({"kind": "contest", "who": "chairlift", "workload": workload.name, "seconds": found})
    for decode in scale.large_decodes:
        idle = engine.idle(decode, scale.num_profiled, MANY_STEPS)
        measurements.append({"kind": "idle", "shape": "large", "rows": decode.num_rows, **asdict(idle)})
    return measurements


def quick(setup: Setup) -> list[Measurement]:
    """Returns what matters most of the large shape, with one engine: decoding, also sampled and uneven rows; first
    tokens.
    """
    scale = setup.scale
    decodes = (*scale.large_decodes, *scale.quick_decodes, *scale.uneven_decodes)
    beside = Workload(scale.busy.num_rows, scale.busy.context, TOKENS_BESIDE + _ROOM)
    engine = setup.engine("large", MANY_STEPS, [*setup.decode_workloads(decodes), beside])
    return [*setup.time_decodes(engine, "large", decodes), *_first_tokens(setup, engine, "large")]


def large_single_steps(setup: Setup, *, graphs: Graphs = Graphs.ALL) -> list[Measurement]:
    """One decode step a launch."""
    decodes = setup.scale.plain_decodes
    engine = setup.engine("large", 1, setup.decode_workloads(decodes), graphs=graphs)
    return setup.time_decodes(engine, "large", decodes)


def large_without_graphs(setup: Setup) -> list[Measurement]:
    """One decode step a launch, operator by operator."""
    return large_single_steps(setup, graphs=Graphs.NONE)


def small(setup: Setup) -> list[Measurement]:
    """The small shape."""
    decodes = setup.scale.small_decodes
    engine = setup.engine("small", MANY_STEPS, setup.decode_workloads(decodes))
    return setup.time_decodes(engine, "small", decodes)


def sampled(setup: Setup) -> list[Measurement]:
    """The large shape with every kind of sampling, short rows: a step's time is that of the weights and of sampling."""
    decodes = setup.scale.sampled_decodes
    return setup.time_decodes(setup.engine("large", MANY_STEPS, setup.decode_workloads(decodes)), "large", decodes)


def latency(setup: Setup, graphs: Graphs = Graphs.ALL) -> list[Measurement]:
    """First tokens of single prompts, at an idle engine and beside rows that decode."""
    scale = setup.scale
    beside = Workload(scale.busy.num_rows, scale.busy.context, TOKENS_BESIDE + _ROOM)
    prompts = Workload(beside.num_requests + 1, max(scale.prompt_lengths), 1)
    return _first_tokens(setup, setup.engine("large", MANY_STEPS, [beside, prompts], graphs=graphs), "large")


def latency_without_mixed_graphs(setup: Setup) -> list[Measurement]:
    """The same, where steps with prompts are launched operator by operator."""
    return latency(setup, Graphs.DECODE)


def uneven(setup: Setup) -> list[Measurement]:
    """The large shape with rows of very different lengths, beside rows that are all as long as these on average."""
    decodes = setup.scale.uneven_decodes
    return setup.time_decodes(setup.engine("large", MANY_STEPS, setup.decode_workloads(decodes)), "large", decodes)


def grouped(setup: Setup) -> list[Measurement]:
    """The large shape with its weights in groups of 4 bits."""
    decodes = setup.scale.grouped_decodes
    workloads = setup.decode_workloads(decodes)
    model = write_grouped(setup.scale.large, longest(workloads), setup.dtype, setup.scratch / "grouped", setup.device)
    engine = setup.engine_of(model, MANY_STEPS, workloads, load_format="safetensors")
    return setup.time_decodes(engine, "large, int4", decodes)


def float8(setup: Setup) -> list[Measurement]:
    """The large shape with its weights in float8: decoding, and the first tokens of single prompts."""
    return _decodes_and_first_token(setup, "large", setup.scale.float8_decodes, is_float8=True)


def float8_mixture(setup: Setup) -> list[Measurement]:
    """The same of a mixture of experts."""
    return _decodes_and_first_token(setup, "mixture", setup.scale.float8_decodes, is_float8=True)


def recurrent(setup: Setup) -> list[Measurement]:
    """A model most of whose layers are recurrent: decoding, and the first tokens of single prompts."""
    return _decodes_and_first_token(setup, "recurrent", setup.scale.recurrent_decodes)


def mixture(setup: Setup) -> list[Measurement]:
    """A mixture of experts: decoding, and the first tokens of single prompts."""
    return _decodes_and_first_token(setup, "mixture", setup.scale.mixture_decodes)


def served(setup: Setup) -> list[Measurement]:
    """The large shape over HTTP, with and without graphs of steps with prompts."""
    return serve_all(setup)


def transformers_static(setup: Setup) -> list[Measurement]:
    """transformers' `generate`."""
    return _contests(setup, "transformers generate", static_batch(_peer(setup, "sdpa")))


def transformers_continuous(setup: Setup) -> list[Measurement]:
    """transformers' `generate_batch`."""
    attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"  # what it reads its pages with
    batches = [(each.num_requests, each.prompt_tokens + each.output_tokens) for each in setup.scale.contests]
    generate = continuous_batch(_peer(setup, attention), batches, max_batch_tokens=512)
    return _contests(setup, "transformers generate_batch", generate)


PARTS: Mapping[str, Callable[[Setup], list[Measurement]]] = {
    part.__name__: part
    for part in (
        rates,
        quick,
        large,
        small,
        sampled,
        latency,
        latency_without_mixed_graphs,
        uneven,
        grouped,
        float8,
        float8_mixture,
        recurrent,
        mixture,
        large_single_steps,
        large_without_graphs,
        served,
        transformers_static,
        transformers_continuous,
    )
}


def _decodes_and_first_token(
    setup: Setup, shape: str, decodes: tuple[Decode, ...], *, is_float8: bool = False
) -> list[Measurement]:
    longest_prompt = max(setup.scale.prompt_lengths)
    workloads = [*setup.decode_workloads(decodes), Workload(1, longest_prompt, 1)]
    engine = setup.engine(shape, MANY_STEPS, workloads, is_float8=is_float8)
    name = f"{shape}, float8" if is_float8 else shape
    return [*setup.time_decodes(engine, name, decodes), _first_token(engine, name, longest_prompt, None)]


def _first_tokens(setup: Setup, engine: Engine, shape: str) -> list[Measurement]:
    """Measures first tokens of all lengths, at an idle engine and beside the rows of `busy`."""
    return [
        _first_token(engine, shape, num_tokens, beside)
        for beside in (None, setup.scale.busy)
        for num_tokens in setup.scale.prompt_lengths
    ]


def _first_token(engine: Engine, shape: str, num_tokens: int, beside: Decode | None) -> Measurement:
    return {
        "kind": "first_token",
        "shape": shape,
        "prompt_tokens": num_tokens,
        "rows": beside.num_rows if beside else 0,
        "variant": engine.variant,
        **asdict(engine.first_token(num_tokens, beside)),
    }


def _peer(setup: Setup, attention: str) -> Any:
    """transformers' model with random weights of the large shape, made on the device in its number format."""
    num_positions = max(each.prompt_tokens + each.output_tokens for each in setup.scale.contests)
    config: Any = hugging_face_config(setup.scale.large, num_positions, setup.dtype)
    config._attn_implementation = attention
    torch.set_default_dtype(getattr(torch, setup.dtype))
    try:
        with setup.torch_device:
            model: Any = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def _contests(setup: Setup, who: str, generate: Generate) -> list[Measurement]:
    return [
        {"kind": "contest", "who": who, "workload": each.name, "seconds": _seconds(setup, generate, each)}
        for each in setup.scale.contests
    ]


def _seconds(setup: Setup, generate: Generate, workload: Workload) -> float:
    """From the prompts to the last token, after one run that does not count."""
    vocab_size = setup.scale.large["vocab_size"]
    generate(workload.prompts("warm-up", vocab_size), min(4, workload.output_tokens))
    wait_for(setup.torch_device)
    start = time.perf_counter()
    counts = generate(workload.prompts("measured", vocab_size), workload.output_tokens)
    wait_for(setup.torch_device)
    elapsed = time.perf_counter() - start
    if counts != [workload.output_tokens] * workload.num_requests:
        raise RuntimeError(f"transformers gave {counts} tokens for {workload.output_tokens} each")
    return elapsed
