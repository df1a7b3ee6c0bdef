"""Float8 experts that are stacked: each is what transformers makes of the stack, whatever shares a scale."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from chairlift.config import DType
from chairlift.models import open_checkpoint
from chairlift.models.grouped import FLOAT8, GroupedWeight
from chairlift.models.loader import grouped_size
from tests.models.compressed_support import fine_grained
from tests.models.support import edit, load, read_config, refusal, write_config
from tests.support.checkpoints import make_checkpoint

SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64, "head_dim": 16}
SIZES: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = "model.layers.0.mlp.experts"
STACKS = {"gate_up_proj": (4, 64, 64), "down_proj": (4, 64, 32)}  # outputs first
SCALES = {"blocks": (32, 32), "experts": None, "all": None}  # what has a scale, and the block that is stated


def write(directory: Path, has_scale: str, *, has_inputs_first: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint whose experts are stacks of float8; returns what they are, outputs first, by transformers."""
    make_checkpoint(directory, model_type="qwen3_moe", dtype=torch.bfloat16, **SHAPE, **SIZES)
    parts = ("gate_proj", "up_proj", "down_proj")
    changed: dict[str, torch.Tensor | None] = {f"{EXPERTS}.{i}.{part}.weight": None for i in range(4) for part in parts}
    generator, judge, wanted = torch.Generator().manual_seed(5), Fp8Dequantize(None), {}  # type: ignore[no-untyped-call]
    for name, shape in STACKS.items():
        stack = torch.randn(shape, generator=generator).mul(100).to(FLOAT8)
        stack = stack.mT.contiguous() if has_inputs_first else stack
        grid = {"blocks": [each // 32 for each in stack.shape[1:]], "experts": [1, 1], "all": [1, 1]}[has_scale]
        scales = torch.rand(1 if has_scale == "all" else 4, *grid, generator=generator) / 256
        judged = judge.convert({"weight": stack, "weight_scale_inv": scales.expand(4, -1, -1)})["weight"]
        assert isinstance(judged, torch.Tensor)
        wanted[name] = judged.mT if has_inputs_first else judged
        changed |= {f"{EXPERTS}.{name}": stack, f"{EXPERTS}.{name}_activation_scale": torch.ones(4)}
        changed[f"{EXPERTS}.{name}_scale_inv"] = scales.flatten() if has_scale == "all" else scales
    edit(directory, changed)
    write_config(directory, read_config(directory), quantization_config=fine_grained(SCALES[has_scale]))
    return wanted


@pytest.mark.parametrize("has_inputs_first", [False, True])
@pytest.mark.parametrize("has_scale", SCALES)
def test_each_expert_is_its_part_of_the_stack(tmp_path: Path, has_scale: str, has_inputs_first: bool) -> None:
    wanted = write(tmp_path, has_scale, has_inputs_first=has_inputs_first)
    reader = open_checkpoint(str(tmp_path)).open_weights()
    for expert in range(4):
        parts = {"gate_proj": wanted["gate_up_proj"][expert, :32], "up_proj": wanted["gate_up_proj"][expert, 32:]}
        for part, matrix in (parts | {"down_proj": wanted["down_proj"][expert]}).items():
            read = reader.read(f"{EXPERTS}.{expert}.{part}.weight")
            assert isinstance(read, GroupedWeight)
            assert torch.equal(read.dequantize(), matrix)


def test_a_model_is_made_of_them(tmp_path: Path) -> None:
    wanted = write(tmp_path, "blocks")
    experts = load(tmp_path, DType.BFLOAT16).layers[0].get_submodule("experts")
    assert torch.equal(experts.get_parameter("up_proj.weight"), wanted["gate_up_proj"][:, 32:].flatten(0, 1).bfloat16())
    on_gpu = grouped_size(open_checkpoint(str(tmp_path)), is_on_gpu=True)
    assert on_gpu is not None
    assert on_gpu.num_parameters == 3 * 4 * 32 * 64


def test_a_scale_of_outputs_of_two_matrices_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "blocks")
    edit(tmp_path, {f"{EXPERTS}.gate_up_proj_scale_inv": torch.ones(4, 2, 4)})
    write_config(tmp_path, read_config(tmp_path), quantization_config=fine_grained((48, 16)))
    assert f"a scale of {EXPERTS}.gate_up_proj_scale_inv is of outputs of both gate_proj and up_proj" in refusal(
        tmp_path
    )


def test_scales_of_no_stack_are_named(tmp_path: Path) -> None:
    write(tmp_path, "experts")
    edit(tmp_path, {f"{EXPERTS}.down_proj": None})
    assert f"tensor {EXPERTS}.down_proj_activation_scale stands beside no stacked matrices" in refusal(tmp_path)
