"""A GGUF file that is made of a checkpoint gives the logits of transformers' model of that checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as BackendTokenizer

from chairlift import LLM, SamplingParams
from chairlift.config import DType
from chairlift.engine.execution.forward import TorchForward
from chairlift.models import load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.checkpoint import find_model
from tests.parity.test_families import FAMILIES as SHAPES
from tests.parity.test_families import WINDOW, YARN
from tests.support.checkpoints import assert_greedy, make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.gguf_files import Kind, add_byte_level_tokenizer, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LINEAR},
    "llama, tied, biases": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama 3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral, window": {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2, yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    **{name: SHAPES[name] for name in ("qwen3", "granite", "phi3", "phi3, partial longrope", "olmo2")},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0},
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
    },
}


def make(directory: Path, family: str) -> Any:
    return make_checkpoint(directory, seed=3, **{"head_dim": 32, "max_position_embeddings": 512, **FAMILIES[family]})


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    reference = make(tmp_path, family)
    opened = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf")))
    assert opened.config.architecture == reference.config.architectures[0]
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    (tokens,) = random_prompts(4, [100])
    ours = Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention)))
    (logits,) = ours.run([Row(2, tokens)])
    theirs = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    assert theirs.std() > 0.05  # or else there would be nothing to compare
    assert torch.linalg.vector_norm(logits - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_description_is_that_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    reference = make(tmp_path, family)
    ours = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf"))).config
    theirs = open_checkpoint(str(tmp_path)).config
    assert repr(ours).replace(repr(ours.rms_norm_eps), repr(theirs.rms_norm_eps)) == repr(theirs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0])
def test_greedy_tokens_of_a_file_are_those_of_the_numbers_in_it(tmp_path: Path, kind: Kind) -> None:
    reference = make_checkpoint(tmp_path / "checkpoint", seed=5, max_position_embeddings=512)
    backend = BackendTokenizer.from_file(str(find_model("bundled") / "tokenizer.json"))
    tokenizer = partial(add_byte_level_tokenizer, backend=backend, rule="gpt-2", size=320)
    path = write_model(reference, tmp_path / "one" / "model.gguf", kind, tokenizer)
    weights = open_checkpoint(str(path)).open_weights()
    for name, parameter in reference.named_parameters():
        stored = weights.read(name)
        parameter.data = stored.float() if isinstance(stored, torch.Tensor) else stored.dequantize()
    (prompt,) = random_prompts(2, [40])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(path.parent), dtype="float32", attention_backend="torch", max_seq_len=128) as llm:
        assert_greedy(reference, prompt, llm.generate([prompt], params)[0].outputs[0].token_ids, 20)
        assert llm.inputs.tokenize("Hi!") == list(b"Hi!")
