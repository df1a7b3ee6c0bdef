"""GGUF files as they are: metadata become a model's description, blocks become weights in groups.

`container` reads the file and its tensors, `families` says what its names and numbers mean.
"""

from chairlift.models.gguf.container import GGUF_SUFFIX, GGUFFile, first_part, open_gguf
from chairlift.models.gguf.families import GGUFWeights, describe_gguf, end_tokens, sampling_of

__all__ = [
    "GGUF_SUFFIX",
    "GGUFFile",
    "GGUFWeights",
    "describe_gguf",
    "end_tokens",
    "first_part",
    "open_gguf",
    "sampling_of",
]
