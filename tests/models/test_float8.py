"""Float8 safetensors: what block, row and tensor scales represent is what loading gives, and transformers agrees."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from chairlift.config import DType
from chairlift.models import open_checkpoint
from chairlift.models.loader import grouped_size
from tests.models.compressed_support import fine_grained, float8, float_quantized
from tests.models.support import edit, linear, load, read_config, refusal, write_config
from tests.support.checkpoints import make_checkpoint

SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 64}
DOWN = "model.layers.0.mlp.down_proj"
INVERSE, PLAIN = "weight_scale_inv", "weight_scale"
ROWS, MATRIX = (1, 10**6), None

CASES: dict[str, tuple[dict[str, Any], tuple[int, int] | None, str]] = {  # what is stated, the block, scales' ending
    "fp8, blocks of 128": (fine_grained((128, 128)), (128, 128), INVERSE),  # 192 inputs are one block and a half
    "fp8, blocks of 64 x 32": (fine_grained((64, 32)), (64, 32), INVERSE),
    "fp8, matrices": (fine_grained(None, activation_scheme="static"), MATRIX, INVERSE),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, ROWS, PLAIN),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, MATRIX, PLAIN),
    "float-quantized, rows": (float_quantized("channel"), ROWS, PLAIN),
    "float-quantized, matrices": (float_quantized("tensor"), MATRIX, PLAIN),
    "float-quantized, blocks": (float_quantized("block", block_structure=[64, 64]), (64, 64), PLAIN),
    "fp8, exponents": (fine_grained((64, 64), scale_fmt="ue8m0"), (64, 64), INVERSE),
    "mxfp8": ({**float_quantized("group", group_size=32), "format": "mxfp8-quantized"}, (1, 32), PLAIN),
    "modelopt, blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, (128, 128), PLAIN),
}
EXPONENTS = {"fp8, exponents": torch.float8_e8m0fnu, "mxfp8": torch.uint8}


def write(directory: Path, case: str, **stated: Any) -> dict[str, torch.Tensor]:
    """A checkpoint whose products in layers are float8; returns what they are, by the name of the weight."""
    config, block, ending = CASES[case]
    make_checkpoint(directory, dtype=torch.bfloat16, **SHAPE)
    tensors = load_file(directory / "model.safetensors")
    expected = {}
    for seed, name in enumerate(sorted(tensors)):
        base = name.removesuffix(".weight")
        if not base.endswith("_proj"):
            continue
        high, wide = tensors.pop(name).shape
        size = (1, wide) if block == ROWS else block
        made, expected[name] = float8(base, seed, (high, wide), size, ending, EXPONENTS.get(case))
        if case == "modelopt, blocks":
            made[f"{base}.{ending}"] = made[f"{base}.{ending}"][:, None, :, None]
        tensors |= made
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, read_config(directory), quantization_config={**config, **stated})
    return expected


@pytest.mark.parametrize("case", CASES)
def test_numbers_times_their_scales_are_loaded(tmp_path: Path, case: str) -> None:
    expected = write(tmp_path, case)
    loaded, rounded = load(tmp_path), load(tmp_path, DType.BFLOAT16)
    parts = [expected[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(linear(loaded, "0.self_attn.qkv_proj").weight, torch.cat(parts))
    assert torch.equal(linear(loaded, "0.mlp.down_proj").weight, expected[f"{DOWN}.weight"])
    assert torch.equal(linear(rounded, "0.mlp.down_proj").weight, expected[f"{DOWN}.weight"].bfloat16())


@pytest.mark.parametrize("case", ["fp8, blocks of 64 x 32", "fp8, matrices", "fbgemm_fp8", *EXPONENTS])
def test_transformers_dequantizes_to_the_same_numbers(tmp_path: Path, case: str) -> None:
    write(tmp_path, case)
    stored, ending = load_file(tmp_path / "model.safetensors"), CASES[case][2]
    judge: Any = Fp8Dequantize
    parts = {"weight": stored[f"{DOWN}.weight"], "weight_scale_inv": stored[f"{DOWN}.{ending}"]}
    judged = judge(None).convert(parts)["weight"]
    assert torch.equal(linear(load(tmp_path), "0.mlp.down_proj").weight.to(judged.dtype), judged)


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_keeps_float8_and_a_cpu_does_not(tmp_path: Path, case: str) -> None:
    write(tmp_path, case)
    on_gpu, on_cpu = (grouped_size(open_checkpoint(str(tmp_path)), is_on_gpu=is_on_gpu) for is_on_gpu in (True, False))
    num_weights = (2 * 128 + 2 * 64) * 128 + 3 * 128 * 192
    assert on_cpu is None
    assert linear(load(tmp_path, keeps_groups=True), "0.mlp.down_proj").grouped is None
    assert on_gpu is not None
    assert on_gpu.num_parameters == num_weights
    assert num_weights < on_gpu.num_bytes <= num_weights * (1 + 4 / 32)


def test_scales_of_activations_and_of_a_cache_are_left_out(tmp_path: Path) -> None:
    expected = write(tmp_path, "float-quantized, matrices", kv_cache_scheme={"num_bits": 8, "type": "float"})
    attention = "model.layers.0.self_attn"
    edit(tmp_path, {f"{DOWN}.input_scale": torch.ones(1), f"{attention}.k_scale": torch.ones(1)})
    assert torch.equal(linear(load(tmp_path), "0.mlp.down_proj").weight, expected[f"{DOWN}.weight"])
    edit(tmp_path, {"model.norm.input_scale": torch.ones(1)})
    assert "tensors that this model has no place for: model.norm.input_scale" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (fine_grained((128, 128), expert_dtype="fp4"), "fp8, and its experts fp4"),
        (fine_grained(None, weight_block_size=[128]), "must have two sizes, not [128]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt's NVFP4"),
        (float_quantized("channel", num_bits=4), "compressed-tensors of 4 bits and type float"),
        (float_quantized("token"), "compressed-tensors of float values by token"),
        (float_quantized("group"), "must have two sizes, not [1, None]"),
        (float_quantized("block"), "must have two sizes, not None"),
    ],
)
def test_another_scheme_is_refused_by_name(tmp_path: Path, stated: dict[str, Any], said: str) -> None:
    write(tmp_path, "fp8, matrices")
    write_config(tmp_path, read_config(tmp_path), quantization_config=stated)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{DOWN}.{INVERSE}": None}, f"the checkpoint lacks the scales of {DOWN}.weight, which holds float8 numbers"),
        (
            {f"{DOWN}.{INVERSE}": torch.ones(3, 2)},
            f"tensor {DOWN}.weight has shape [128, 192] and scales of shape [3, 2], which are not one for each of its"
            " blocks of 128 x 128",
        ),
        (
            {f"{DOWN}.{INVERSE}": torch.ones(1, 2, dtype=torch.int32)},
            f"tensor {DOWN}.{INVERSE} holds int32; weights must be",
        ),
        ({f"{DOWN}.weight": torch.ones(128, 192).to(torch.float8_e5m2)}, "no place for: model.layers.0.mlp.down"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    write(tmp_path, "fp8, blocks of 128")
    edit(tmp_path, change)
    assert said in refusal(tmp_path)
