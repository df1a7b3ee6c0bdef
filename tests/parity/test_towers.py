"""The text part of a model that reads images gives the logits of transformers' whole model for text."""

import logging
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chairlift.config import DType
from chairlift.models import TorchForward, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from tests.models.support import edit, read_config, refusal, write_config
from tests.parity.test_families import YARN, assert_near, reference_logits
from tests.parity.test_gemmas import MODELS
from tests.parity.test_recurrent import DELTA_NET
from tests.support.checkpoints import SMALL, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.gguf_files import write_model

PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}
SIGLIP = {"model_type": "siglip_vision_model", **PIXTRAL, "image_size": 28, "patch_size": 14}
QWEN = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
GROWING = {**YARN, "llama_4_scaling_beta": 0.2, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24.0}

# A name begins with transformers' class; then the fields of the text part, and those of the tower.
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"model_type": "gemma3_text", "query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 6},
        {**SIGLIP, "model_type": "siglip_vision_model"},
    ),
    "Gemma4": (MODELS["gemma 4 E2B"], {**PIXTRAL, "model_type": "gemma4_vision", "num_key_value_heads": 2}),
    "Gemma4Unified": (
        MODELS["gemma 4 12B"],
        {"model_type": "gemma4_unified_vision", "patch_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 4},
    ),
    "Mistral3": ({"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "Mistral3, Ministral": ({"model_type": "ministral3", "rope_parameters": GROWING}, PIXTRAL),
    "Qwen2_5_VL": ({"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}, QWEN),
    "Qwen3VL": ({"rope_parameters": QWEN_ROPE}, QWEN),
    "Qwen3VLMoe": (
        {
            "rope_parameters": QWEN_ROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
        QWEN,
    ),
    "Qwen3_5": (
        {"rope_parameters": {**QWEN_ROPE, "mrope_section": [2, 1, 1]}, "num_hidden_layers": 4, **DELTA_NET},
        {**QWEN, "patch_size": 14},
    ),
    "Qwen3_5Moe": (
        {
            "rope_parameters": {**QWEN_ROPE, "mrope_section": [2, 1, 1]},
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            **DELTA_NET,
        },
        {**QWEN, "patch_size": 14},
    ),
}


@cache
def checkpoint(directory: Path, tower: str) -> tuple[Path, Any]:
    """A random checkpoint of that model, and transformers' model of it."""
    torch.manual_seed(3)
    name = tower.partition(",")[0]
    text, vision = TOWERS[tower]
    make_config: Any = getattr(transformers, f"{name}Config")
    head = {} if name == "Qwen2_5_VL" else {"head_dim": 32}
    text = {**SMALL, "max_position_embeddings": 512, **head, **text}
    config = make_config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(directory / tower)
    return directory / tower, model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("towers")


def bench(path: Path) -> Bench:
    model = load_model(open_checkpoint(str(path)), DType.FLOAT32, "cpu", SLOT_LEN)
    return Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention)))


@pytest.mark.parametrize("tower", TOWERS)
def test_text_logits_are_those_of_the_whole_model(
    directory: Path, tower: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = checkpoint(directory, tower)
    (tokens,) = random_prompts(4, [100])
    with caplog.at_level(logging.INFO):
        ours = bench(path).run([Row(2, tokens)])[0]
    assert_near(ours, reference_logits(reference, tokens))
    (line,) = [record.message for record in caplog.records if "left out" in record.message]
    assert "tensors are left out, since no text depends on them" in line


@pytest.mark.parametrize("tower", ["Mistral3, Ministral", "Qwen2_5_VL", "Qwen3VL"])
def test_text_logits_of_a_gguf_file_are_those_of_the_whole_model(directory: Path, tmp_path: Path, tower: str) -> None:
    _, reference = checkpoint(directory, tower)
    config, begin = reference.config.get_text_config(), "model.language_model."
    config.tie_word_embeddings = False
    text = {name.replace(begin, "model."): tensor for name, tensor in reference.state_dict().items() if begin in name}
    text["lm_head.weight"] = reference.lm_head.weight.detach()
    part = SimpleNamespace(config=config, state_dict=lambda: text)
    (tokens,) = random_prompts(4, [100])
    ours = bench(write_model(part, tmp_path / "model.gguf")).run([Row(2, tokens)])[0]
    assert_near(ours, reference_logits(reference, tokens))


def respelled(path: Path, target: Path, spellings: dict[str, str]) -> Path:
    """The same checkpoint with other beginnings of the names of its tensors."""
    target.mkdir()
    write_config(target, read_config(path))
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        begin = next((each for each in spellings if name.startswith(each)), "")
        tensors[spellings.get(begin, "") + name.removeprefix(begin)] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model.", "model."])
def test_every_way_to_name_the_parts_of_a_model_is_read(directory: Path, tmp_path: Path, body: str) -> None:
    path, _ = checkpoint(directory, "Mistral3")
    (tokens,) = random_prompts(4, [20])
    names = load_file(path / "model.safetensors").keys()
    (own,) = {name.removesuffix("embed_tokens.weight") for name in names if name.endswith("embed_tokens.weight")}
    (own_head,) = (name for name in names if name.endswith("lm_head.weight"))
    head = "language_model.lm_head.weight" if body == "language_model.model." else "lm_head.weight"
    other = respelled(path, tmp_path / "other", {own_head: head, own: body})
    assert torch.equal(bench(other).run([Row(2, tokens)])[0], bench(path).run([Row(2, tokens)])[0])


def test_tensors_that_are_neither_text_nor_images_are_refused(directory: Path, tmp_path: Path) -> None:
    path = respelled(checkpoint(directory, "Qwen3VL")[0], tmp_path / "other", {})
    edit(path, {"model.more.weight": torch.zeros(2)})
    assert refusal(path).endswith("has tensors that this model has no place for: model.more.weight")


def test_a_text_part_of_another_kind_is_refused(directory: Path, tmp_path: Path) -> None:
    config = read_config(checkpoint(directory, "Mistral3")[0])
    write_config(tmp_path, config, text_config={**SMALL, "model_type": "qwen2"})
    assert "a text model of type 'qwen2' is not supported, only gemma3_text, " in refusal(tmp_path, open_checkpoint)


def test_more_layers_than_there_are_tensors_are_refused(directory: Path, tmp_path: Path) -> None:
    path = respelled(checkpoint(directory, "Qwen3VL")[0], tmp_path / "other", {})
    config = read_config(path)
    write_config(path, config, text_config={**config["text_config"], "num_hidden_layers": 90})
    assert "num_hidden_layers is 90, and the weights have 3 layers" in refusal(path)
