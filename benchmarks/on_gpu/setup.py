"""Holds what every part is told, and the engines that it makes of that."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from comparison.ceiling import Workload

from on_gpu.engine import Engine, Graphs
from on_gpu.scale import SCALES, Decode, Scale, write_config

Measurement = dict[str, Any]
"""What was measured (`kind`), of what (`shape`, `rows`, ...), and the figure under its unit's name."""

MANY_STEPS = 8  # a launch


@dataclass(frozen=True, slots=True)
class Setup:
    """Holds what every part is told."""

    scale_name: str
    device: str
    dtype: str
    scratch: Path
    attention: str = "auto"

    @property
    def scale(self) -> Scale:
        return SCALES[self.scale_name]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def engine(
        self,
        name: str,
        num_steps: int,
        workloads: list[Workload],
        *,
        graphs: Graphs = Graphs.ALL,
        is_float8: bool = False,
    ) -> Engine:
        """On random weights of the shape of that name, with slots for the largest of the workloads."""
        slot_len = longest(workloads)
        model = write_config(getattr(self.scale, name), slot_len, self.dtype, self.scratch / name)
        return self.engine_of(model, num_steps, workloads, graphs=graphs, is_float8=is_float8)

    def engine_of(
        self,
        model: Path,
        num_steps: int,
        workloads: list[Workload],
        *,
        graphs: Graphs = Graphs.ALL,
        load_format: str = "dummy",
        is_float8: bool = False,
    ) -> Engine:
        """On that model, with slots for the largest of the workloads.

        `is_float8`: a GPU keeps weights in float8, and a CPU goes the same way with plain ones.
        """
        return Engine(
            model,
            self.device,
            self.dtype,
            num_slots=max(each.num_requests for each in workloads),
            slot_len=longest(workloads),
            num_steps=num_steps,
            graphs=graphs,
            load_format=load_format,
            attention=self.attention,
            quantization="fp8" if is_float8 and self.torch_device.type == "cuda" else None,
        )

    def decode_workloads(self, decodes: tuple[Decode, ...]) -> list[Workload]:
        """As they are seen by the cache, with room for all launches that are timed or profiled."""
        num_tokens = 2 * self.scale.num_decoded + (self.scale.num_profiled + 4) * MANY_STEPS
        return [Workload(each.num_rows, each.longest, num_tokens) for each in decodes]

    def time_decodes(self, engine: Engine, shape: str, decodes: tuple[Decode, ...]) -> list[Measurement]:
        """A step of each, one after the other."""
        return [
            {
                "kind": "decode",
                "shape": shape,
                "rows": decode.num_rows,
                "context": decode.context,
                "spread": decode.spread,
                "sampling": decode.sampling,
                "variant": engine.variant,
                "target": decode.target,
                **asdict(engine.step_time(decode, self.scale.num_decoded)),
            }
            for decode in decodes
        ]


def longest(workloads: list[Workload]) -> int:
    """The tokens that a slot needs."""
    return max(each.prompt_tokens + each.output_tokens for each in workloads)
