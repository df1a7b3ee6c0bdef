"""Writing the model directory: weights in bfloat16, tokenizer, configurations.

Everything is first written beside the target and then moved over file by file, so that a reader of the
target never sees half a file.
"""

import os
import shutil
import tempfile
from pathlib import Path

from transformers import GenerationConfig, LlamaForCausalLM

from bundled_model.vocabulary import END_OF_TEXT_ID, TURN_END_ID, build_tokenizer

WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
_READABLE = 0o644


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write everything but the model card."""
    model.bfloat16()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=[TURN_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID
    )
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def move_into_place(source: Path, target: Path) -> None:
    """Replace the target's files by those of the source directory, each one at once."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        path.chmod(_READABLE)
        os.replace(path, target / path.name)
    source.rmdir()


def scratch_beside(target: Path) -> Path:
    """A new directory on the target's file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))


def discard(directory: Path) -> None:
    """Remove a scratch directory if it is still there."""
    shutil.rmtree(directory, ignore_errors=True)
