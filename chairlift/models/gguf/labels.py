"""Reads which words a reranker's file decides between.

llama.cpp's converter (https://github.com/ggml-org/llama.cpp, conversion/qwen.py) copies the rows of two words out of
the head into a tensor of their own, and writes the words beside it. Here they are read where they were copied from.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.gguf.blocks import read_tensor
from chairlift.models.gguf.header import GGUFFile, TensorInfo

LABELS_HEAD = "cls.output.weight"
LABELS_FIELD = "classifier.output_labels"

_HEADS = ("output.weight", "token_embd.weight")  # the latter is the head where there is no other
_MIN_COSINE = 0.98  # of the same row in two formats


def label_tokens(file: GGUFFile) -> tuple[int, int] | None:
    """Returns the tokens of the word that is good and of the one that is bad; None: the file has no such words.

    CheckpointError unless there are two, whose rows are those of the head.
    """
    labels_head = file.tensors.get(LABELS_HEAD)
    if labels_head is None:
        return None
    labels = file.metadata.get(f"{file.metadata.get('general.architecture')}.{LABELS_FIELD}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(labels, list) or len(labels) != 2 or not isinstance(tokens, list) or set(labels) - set(tokens):
        raise CheckpointError(f"its {LABELS_FIELD} must be two tokens, not {shown(labels)}")
    head = next(file.tensors[name] for name in _HEADS if name in file.tensors)
    found = tuple(tokens.index(label) for label in labels)
    if labels_head.shape != (2, head.shape[-1]) or max(found) >= head.shape[0]:
        raise CheckpointError(f"tensor {named(LABELS_HEAD)} has shape {list(labels_head.shape)}, which does not fit")
    for row, token in enumerate(found):
        cosine = functional.cosine_similarity(_row(labels_head, row), _row(head, token), dim=0)
        if not cosine >= _MIN_COSINE:  # also if it is not a number
            raise CheckpointError(
                f"tensor {named(LABELS_HEAD)} differs from the head's rows for {shown(labels)}, which is not supported"
            )
    return found[0], found[1]


def _row(info: TensorInfo, index: int) -> torch.Tensor:
    """float32 `[columns]`"""
    num_bytes = info.num_bytes // info.shape[0]
    offset = info.offset + index * num_bytes
    read = read_tensor(replace(info, shape=(1, info.shape[1]), offset=offset, num_bytes=num_bytes))
    return (read if isinstance(read, torch.Tensor) else read.dequantize()).float().flatten()
