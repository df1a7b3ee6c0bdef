"""What comparisons of SmolLM2 share."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from chairlift.models import open_checkpoint
from chairlift.models.checkpoint import find_model
from chairlift.models.gguf import open_gguf
from chairlift.models.gguf.families import describe_gguf


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the numbers that the file's integers stand for.

    Bit for bit what transformers reads of the file (tests/models/test_checkpoint.py), for which it wants accelerate.
    """
    directory = tmp_path_factory.mktemp("smollm2")
    weights = open_checkpoint("smollm2").open_weights()
    tensors = {name: weights.read(name) for name in weights.tensors}
    exact = {name: each if isinstance(each, torch.Tensor) else each.dequantize() for name, each in tensors.items()}
    save_file(exact, directory / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(**describe_gguf(open_gguf(find_model("smollm2")))).save_pretrained(directory)
    return directory
