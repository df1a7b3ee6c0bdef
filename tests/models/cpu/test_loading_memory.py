"""A mixture's file is packed part by part, so that loading it takes little more memory than the file has bytes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.gguf_files import Kind, write_model
from tests.support.kernels import needs_kernels

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
# The peak of the small file is what Python, torch and a layer take by themselves.
LOAD = """
import re, sys
from pathlib import Path
from chairlift.config import DType
from chairlift.models import load_model, open_checkpoint
from chairlift.models.cpu import CpuDecoder
for path in sys.argv[1:]:
    model = CpuDecoder(load_model(open_checkpoint(path), DType.BFLOAT16, "cpu", 64, keeps_groups=True), 64)
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
    del model
"""


def write(path: Path, kind: Kind, **fields: Any) -> Path:
    """A file of zeros."""
    config = Qwen3MoeConfig(**SHAPE | fields)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in Qwen3MoeForCausalLM(config).state_dict().items()}
    zeros = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    return write_model(SimpleNamespace(config=config, state_dict=lambda: zeros), path, kind)


@needs_kernels
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak is told in other units")
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.MXFP4], ids=lambda kind: kind.name)
def test_a_file_takes_a_tenth_more_memory_than_its_size(tmp_path: Path, kind: Kind) -> None:
    small, large = write(tmp_path / "small.gguf", kind, num_hidden_layers=1), write(tmp_path / "large.gguf", kind)
    command = [sys.executable, "-c", LOAD, str(small), str(large)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    before, peak = map(int, done.stdout.split())
    assert large.stat().st_size > 300e6
    assert peak - before < 1.1 * large.stat().st_size
