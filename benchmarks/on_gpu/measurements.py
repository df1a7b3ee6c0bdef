"""The parts of a run. Each returns measurements; `gpu.py` runs each in a process of its own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from comparison.ceiling import Workload
from peers.workers.protocol import Generate
from peers.workers.transformers_worker import continuous_batch, static_batch
from transformers.utils.import_utils import is_flash_attn_2_available

from on_gpu.device import measure_rates, wait_for
from on_gpu.engine import Engine
from on_gpu.scale import SCALES, Decode, Scale, hugging_face_config, write_config

Measurement = dict[str, Any]
"""What was measured (`kind`), of what (`shape`, `rows`, ...), and the figure under its unit's name."""

_MANY_STEPS = 8
_PREFILL_TRIES = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """What every part is told."""

    scale_name: str
    device: str
    dtype: str
    scratch: Path

    @property
    def scale(self) -> Scale:
        return SCALES[self.scale_name]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def engine(self, name: str, num_steps: int, workloads: list[Workload], *, has_graphs: bool = True) -> Engine:
        """On random weights of the `large` or `small` shape, with slots for the largest of the workloads."""
        slot_len = max(each.prompt_tokens + each.output_tokens for each in workloads)
        fields = self.scale.large if name == "large" else self.scale.small
        return Engine(
            write_config(fields, slot_len, self.dtype, self.scratch / name),
            self.device,
            self.dtype,
            num_slots=max(each.num_requests for each in workloads),
            slot_len=slot_len,
            num_steps=num_steps,
            has_graphs=has_graphs,
        )

    def decode_workloads(self, decodes: tuple[Decode, ...]) -> list[Workload]:
        """As they are seen by the cache, with room for all launches that are timed or profiled."""
        num_tokens = 2 * self.scale.num_decoded + (self.scale.num_profiled + 4) * _MANY_STEPS
        return [Workload(each.num_rows, each.context, num_tokens) for each in decodes]


def rates(setup: Setup) -> list[Measurement]:
    """The device's two ceilings."""
    scale = setup.scale
    found = measure_rates(setup.torch_device, getattr(torch, setup.dtype), scale.cube, scale.read_bytes)
    return [{"kind": "rates", **asdict(found)}]


def large(setup: Setup) -> list[Measurement]:
    """The large shape as it is served: decoding, prompts, whole workloads, and what the device does in between."""
    scale = setup.scale
    workloads = [*setup.decode_workloads(scale.large_decodes), scale.prefill, *scale.contests]
    engine = setup.engine("large", _MANY_STEPS, workloads)
    measurements = _decodes(setup, engine, "large", scale.large_decodes)
    seconds = min(engine.seconds(scale.prefill) for _ in range(_PREFILL_TRIES))
    measurements.append({"kind": "prefill", "shape": "large", "workload": scale.prefill.name, "seconds": seconds})
    for workload in scale.contests:
        engine.seconds(Workload(workload.num_requests, workload.prompt_tokens, 1))  # the first of its sizes
        found = engine.seconds(workload)
        measurements.append({"kind": "contest", "who": "chairlift", "workload": workload.name, "seconds": found})
    for decode in scale.large_decodes:
        idle = engine.idle(decode, scale.num_profiled, _MANY_STEPS)
        measurements.append({"kind": "idle", "shape": "large", "rows": decode.num_rows, **asdict(idle)})
    return measurements


def large_single_steps(setup: Setup, *, has_graphs: bool = True) -> list[Measurement]:
    """One decode step a launch."""
    decodes = setup.scale.plain_decodes
    engine = setup.engine("large", 1, setup.decode_workloads(decodes), has_graphs=has_graphs)
    return _decodes(setup, engine, "large", decodes)


def large_without_graphs(setup: Setup) -> list[Measurement]:
    """One decode step a launch, operator by operator."""
    return large_single_steps(setup, has_graphs=False)


def small(setup: Setup) -> list[Measurement]:
    """The small shape."""
    decodes = setup.scale.small_decodes
    engine = setup.engine("small", _MANY_STEPS, setup.decode_workloads(decodes))
    return _decodes(setup, engine, "small", decodes)


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
        large,
        small,
        large_single_steps,
        large_without_graphs,
        transformers_static,
        transformers_continuous,
    )
}


def _decodes(setup: Setup, engine: Engine, shape: str, decodes: tuple[Decode, ...]) -> list[Measurement]:
    return [
        {
            "kind": "decode",
            "shape": shape,
            "rows": decode.num_rows,
            "context": decode.context,
            "variant": engine.variant,
            "target": decode.target,
            **asdict(engine.step_time(decode, setup.scale.num_decoded)),
        }
        for decode in decodes
    ]


def _peer(setup: Setup, attention: str) -> Any:
    """transformers' model with random weights of the large shape, made on the device in its number format."""
    num_positions = max(each.prompt_tokens + each.output_tokens for each in setup.scale.contests)
    config = hugging_face_config(setup.scale.large, num_positions, setup.dtype)
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
