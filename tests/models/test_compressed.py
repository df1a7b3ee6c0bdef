"""Compressed safetensors: what compressed-tensors, AWQ and GPTQ pack is what loading gives."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.models import open_checkpoint
from chairlift.models.loader import grouped_size
from tests.models.compressed_support import (
    awq,
    compressed_tensors,
    gptq,
    pack_awq,
    pack_gptq,
    pack_quantized,
    quantized,
)
from tests.models.support import edit, groups_of, linear, load, num_bytes, read_config, refusal, write_config
from tests.support.checkpoints import make_checkpoint

SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 64}
DOWN = "model.layers.0.mlp.down_proj"

CASES: dict[str, tuple[dict[str, Any], int, int, bool]] = {  # what is stated, bits, group size, whether symmetric
    **{
        f"pack-quantized {case}": (compressed_tensors(*case), *case)
        for case in itertools.product((4, 8), (32, 128, -1), (True, False))
    },
    "awq": (awq(), 4, 64, False),
    "gptq, 4 bits": (gptq(), 4, 64, False),
    "gptq, 4 bits, groups of 32, version 2": (gptq(4, 32, checkpoint_format="gptq_v2"), 4, 32, False),
    "gptq, 8 bits, symmetric": (gptq(8, 128), 8, 128, True),
}


def write(directory: Path, case: str, shape: dict[str, Any] = SHAPE, **stated: Any) -> dict[str, torch.Tensor]:
    """A checkpoint whose products in layers are compressed; returns what they are, by the name of the weight."""
    config, num_bits, group_size, is_symmetric = CASES[case]
    make_checkpoint(directory, **shape)
    tensors = load_file(directory / "model.safetensors")
    expected = {}
    for seed, name in enumerate(sorted(tensors)):
        base = name.removesuffix(".weight")
        if not base.endswith("_proj"):
            continue
        matrix = quantized(seed, tensors.pop(name).shape, num_bits, group_size, is_symmetric)
        expected[name] = matrix.exact
        match config["quant_method"]:
            case "awq":
                tensors |= pack_awq(base, matrix)
            case "gptq":
                tensors |= pack_gptq(base, matrix, num_bits, int(config.get("checkpoint_format") != "gptq_v2"))
            case _:
                tensors |= pack_quantized(base, matrix, num_bits, is_symmetric)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, read_config(directory), quantization_config={**config, **stated})
    return expected


@pytest.mark.parametrize("case", CASES)
def test_what_was_packed_is_read_without_loss_and_weighed_before(tmp_path: Path, case: str) -> None:
    expected = write(tmp_path, case)
    plain, kept = load(tmp_path), load(tmp_path, keeps_groups=True)
    parts = [expected[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(linear(plain, "0.self_attn.qkv_proj").weight, torch.cat(parts))
    assert torch.equal(linear(plain, "0.mlp.down_proj").weight, expected[f"{DOWN}.weight"])
    grouped = linear(kept, "0.mlp.down_proj").grouped
    size, native = (grouped_size(open_checkpoint(str(tmp_path)), is_on_gpu=is_on_gpu) for is_on_gpu in (True, False))
    assert grouped is not None
    assert torch.equal(grouped.dequantize(), expected[f"{DOWN}.weight"])
    assert (grouped.num_bits, grouped.group_size) == (CASES[case][1], {-1: 128}.get(CASES[case][2], CASES[case][2]))
    assert size is not None
    assert size.num_bytes == num_bytes(groups_of(kept))
    scales = sum(each.scales.numel() * (1 + (each.offsets is not None)) for each in groups_of(kept))
    assert native is not None
    assert native.num_bytes == size.num_bytes - 2 * scales  # float16 instead of float32


EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}


@pytest.mark.parametrize("case", ["awq", "gptq, 4 bits", f"pack-quantized {(8, 32, True)}"])
def test_matrices_of_experts_are_packed_one_by_one(tmp_path: Path, case: str) -> None:
    expected = write(tmp_path, case, {**SHAPE, "model_type": "qwen3_moe", **EXPERTS})
    kept = load(tmp_path, keeps_groups=True)
    for part in ("gate", "up", "down"):
        grouped = linear(kept, f"0.experts.{part}_proj").grouped
        names = [f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(3)]
        assert grouped is not None
        assert torch.equal(grouped.dequantize(), torch.cat([expected[name] for name in names]))
    size = grouped_size(open_checkpoint(str(tmp_path)), is_on_gpu=True)
    whole = [linear(kept, f"0.self_attn.{part}_proj").grouped for part in ("qkv", "o")]
    assert size is not None  # of a workspace, which is for products of whole matrices
    assert size.num_dequantized == max(each.num_outputs * each.num_inputs for each in whole if each is not None)


ACTIVATIONS = compressed_tensors(8, 128, True)
ACTIVATIONS["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized with bitsandbytes"),
        ({**compressed_tensors(4, 128, True), "format": "nvfp4-pack-quantized"}, "in the format nvfp4-pack-quantized"),
        ({**compressed_tensors(8, -1, True), "format": "int-quantized"}, "in the format int-quantized"),
        (compressed_tensors(4, 128, True, actorder="group"), "in the order of activations (actorder)"),
        (compressed_tensors(3, 128, True), "values of 3 bits in groups of 128"),
        (compressed_tensors(4, 16, True), "values of 4 bits in groups of 16"),
        (compressed_tensors(8, 128, True, type="float"), "of float values by group"),
        ({**compressed_tensors(4, 128, True), "kv_cache_scheme": {"num_bits": 8}}, "a quantized cache"),
        (ACTIVATIONS, "compressed-tensors with quantized activations"),
        (awq(version="gemv"), "AWQ in the version gemv"),
        (awq(bits=8), "AWQ in 8 bits"),
        (gptq(checkpoint_format="marlin"), "GPTQ in the format marlin"),
        (gptq(2), "values of 2 bits"),
    ],
)
def test_another_format_is_refused_by_name(tmp_path: Path, stated: dict[str, Any], said: str) -> None:
    write(tmp_path, "awq", **{"config_groups": None, **stated})
    message = refusal(tmp_path)
    assert said in message
    assert "which cannot be read; choose a checkpoint of 4 or 8 bits in groups of 32, 64 or 128" in message


def test_act_order_is_refused_by_its_indices(tmp_path: Path) -> None:
    write(tmp_path, "gptq, 4 bits", desc_act=True)
    assert load(tmp_path).config.num_layers == 1  # the order is that of the inputs, whatever is stated
    edit(tmp_path, {f"{DOWN}.g_idx": torch.randperm(256) // 64})
    assert "GPTQ in the order of activations (act-order, desc_act)" in refusal(tmp_path)


def test_biases_of_zeros_are_dropped_where_the_model_has_none(tmp_path: Path) -> None:
    write(tmp_path, "gptq, 4 bits")
    before = load(tmp_path).state_dict()
    edit(tmp_path, {f"{DOWN}.bias": torch.zeros(128, dtype=torch.float16)})
    assert load(tmp_path).state_dict().keys() == before.keys()
    assert grouped_size(open_checkpoint(str(tmp_path))) is not None
    edit(tmp_path, {f"{DOWN}.bias": torch.arange(128) / 100})
    assert refusal(tmp_path) == f"tensor {DOWN}.bias is not zero, and this model has no such bias"
    edit(tmp_path, {f"{DOWN}.bias": None, "lm_head.bias": torch.zeros(64)})  # beside a plain matrix
    assert "tensors that this model has no place for: lm_head.bias" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{DOWN}.scales": None}, f"the checkpoint lacks {DOWN}.scales"),
        ({f"{DOWN}.qweight": None, f"{DOWN}.qzeros": None, f"{DOWN}.scales": None}, f"lacks {DOWN}.weight"),
        ({f"{DOWN}.scales": torch.ones(3, 128)}, "256 inputs, which do not make 3 groups"),
        ({f"{DOWN}.scales": torch.ones(4, 64)}, "and its scales have shapes that do not fit each other"),
        ({f"{DOWN}.qzeros": torch.ones(2, 16, dtype=torch.int32)}, "have shapes that do not fit each other"),
        ({f"{DOWN}.qweight": torch.ones(256, 16)}, f"tensor {DOWN}.qweight is torch.float32 [256, 16]"),
        ({f"{DOWN}.qweight": torch.ones(256, dtype=torch.int32)}, f"tensor {DOWN}.qweight has 1 dimensions, not 2"),
        ({f"{DOWN}.qweight": torch.ones(256, 8, dtype=torch.int32)}, "has shape [64, 256]; the model needs [128, 256]"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    write(tmp_path, "awq")
    edit(tmp_path, change)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize("num_groups", [16, 32])
def test_groups_that_kernels_do_not_multiply_become_numbers(tmp_path: Path, num_groups: int) -> None:
    """Scales say how large groups are, whatever the config says."""
    write(tmp_path, "pack-quantized (8, 32, True)")
    matrix = quantized(1, torch.Size([128, 256]), 8, 256 // num_groups, True)
    edit(tmp_path, pack_quantized(DOWN, matrix, 8, True))
    loaded = load(tmp_path, keeps_groups=True)
    assert linear(loaded, "0.mlp.gate_up_proj").grouped is not None
    assert linear(loaded, "0.mlp.down_proj").grouped is None
    assert torch.equal(linear(loaded, "0.mlp.down_proj").weight, matrix.exact)
