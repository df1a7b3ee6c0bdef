"""GGUF files: their headers (`header`), their tensors (`blocks`), what their names and numbers mean (`families`)."""

from chairlift.models.gguf.blocks import PLAIN, READABLE, Groups, Unpacker, format_of, read_tensor
from chairlift.models.gguf.folders import choose_model
from chairlift.models.gguf.header import GGUFFile, TensorInfo, is_gguf, is_gguf_name, open_gguf, parts_of
from chairlift.models.gguf.kinds import Kind
from chairlift.models.gguf.labels import label_tokens

__all__ = [
    "PLAIN",
    "READABLE",
    "GGUFFile",
    "Groups",
    "Kind",
    "TensorInfo",
    "Unpacker",
    "choose_model",
    "format_of",
    "is_gguf",
    "is_gguf_name",
    "label_tokens",
    "open_gguf",
    "parts_of",
    "read_tensor",
]
