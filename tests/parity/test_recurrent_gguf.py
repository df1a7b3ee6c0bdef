"""GGUF files of families with a recurrent state give the logits of transformers, or a line that says what is wrong."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFWriter

from chairlift.config import DType
from chairlift.models import load_model, open_checkpoint
from chairlift.models.cpu import CpuDecoder
from tests.models.support import refusal
from tests.parity.support import bench
from tests.parity.test_families import assert_near, reference_logits
from tests.parity.test_recurrent import FALCON, FAMILIES, NATIVE
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.gguf_files import write_model
from tests.support.kernels import needs_kernels

GGUF_FAMILIES = ("qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid", "granitemoehybrid, rope", "falcon_h1")
GGUF_ONLY: dict[str, dict[str, Any]] = {
    "nemotron_h, biases": {**FAMILIES["nemotron_h, biases"], "tie_word_embeddings": False, "time_step_min": 0.001},
    "falcon_h1, gated before its norm": {
        **FALCON,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 2,
    },
}


@pytest.mark.parametrize("family", [*GGUF_FAMILIES, *GGUF_ONLY])
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    fields = {"model_type": family.partition(",")[0], **(FAMILIES | GGUF_ONLY)[family]}
    reference = make_checkpoint(tmp_path, seed=3, max_position_embeddings=512, **fields)
    file = write_model(reference, tmp_path / "model.gguf")
    (tokens,) = random_prompts(4, [60])
    assert_near(bench(file).run([Row(2, tokens)])[0], reference_logits(reference, tokens))


@needs_kernels
def test_native_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path) -> None:
    """Whose value heads are in another order than in safetensors."""
    reference = make_checkpoint(
        tmp_path, seed=3, max_position_embeddings=512, model_type="qwen3_5_text", **NATIVE["qwen3_5_text"]
    )
    model = load_model(open_checkpoint(str(write_model(reference, tmp_path / "model.gguf"))), DType.FLOAT32, "cpu", 391)
    (tokens,) = random_prompts(4, [60])
    ours = Bench(model.config, model.dtype, CpuDecoder(model, SLOT_LEN)).run([Row(2, tokens)])[0]
    assert_near(ours, reference_logits(reference, tokens))


@pytest.mark.parametrize(
    ("family", "key", "value", "said"),
    [
        ("qwen3_5_text", "ssm.state_size", 8, "in_proj_qkv.weight has shape"),
        ("qwen3_5_text", "ssm.inner_size", 97, "97 features do not make 4 linear value heads of one size"),
        ("qwen3_5_text", "ssm.group_count", 3, "4 linear value heads cannot share 3 key heads"),
        ("qwen3_5_text", "ssm.conv_kernel", None, "it lacks qwen35.ssm.conv_kernel"),
        ("lfm2", "shortconv.l_cache", 9, "conv.conv.weight has shape"),
        ("falcon_h1", "ssm.group_count", 3, "4 Mamba heads do not make 3 groups of one size"),
        ("nemotron_h", "ssm.time_step_rank", 7, "60 features do not make 7 Mamba heads of one size"),
        ("nemotron_h", "attention.head_count_kv", [0, 0], "head_count_kv must be a count, or 5 of them"),
    ],
)
def test_gguf_files_whose_sizes_contradict_their_tensors_are_refused(
    tmp_path: Path, family: str, key: str, value: Any, said: str
) -> None:
    def write_tokens_and_change(writer: GGUFWriter) -> None:
        writer.add_token_list([f"t{i}" for i in range(320)])
        known = writer.kv_data[0]
        named = f"{writer.arch}.{key}"
        if value is None:
            del known[named]
        else:
            known[named].value = value

    reference = make_checkpoint(tmp_path, model_type=family, **FAMILIES[family])
    message = refusal(write_model(reference, tmp_path / "model.gguf", tokenizer=write_tokens_and_change))
    assert said in message
    assert "\n" not in message


def test_gguf_files_without_weights_of_a_convolution_are_refused(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, model_type="qwen3_5_text", **FAMILIES["qwen3_5_text"])
    lacking = "model.layers.1.linear_attn.conv1d.weight"
    weights = {name: tensor for name, tensor in reference.state_dict().items() if name != lacking}
    part = SimpleNamespace(config=reference.config, state_dict=lambda: weights)
    message = refusal(write_model(part, tmp_path / "model.gguf"))
    assert message.endswith(f"lacks {lacking}")
