"""Compares what a config says with the tensors that are there, before anything is built: their names and shapes.

A config may come from anywhere. Sizes in it decide how much is built, so none of them is believed beyond what a model
may have, and the number of layers no further than the files confirm.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.rotary import MAX_POSITIONS
from chairlift.models.stored import ComparableWeights

MAX_LAYERS = 1024
MAX_EXPERTS = 4096  # of a layer
MAX_HEAD_DIM = 2**16
MAX_SIZE = 2**24  # limit of every other size of a model

_LIMITS = (  # by the names that transformers' configs give to numbers
    (re.compile(r"((num|n)_)?(hidden_|encoder_|decoder_)?layers?"), MAX_LAYERS),
    (re.compile(r"(num_|n_)\w*experts"), MAX_EXPERTS),
    (re.compile(r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)"), MAX_POSITIONS),
    (re.compile(r"d_model|\w+_(size|dim|heads|rank|embd|inner)|n_(embd|inner|heads?)"), MAX_SIZE),
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_STACKED_DIMENSIONS = 3  # of a tensor that holds matrices of several experts
_OF_A_LAYER = re.compile(r"(.*?)\.([0-9]+)\.")


def refuse_large_numbers(raw: dict[str, Any]) -> None:
    """CheckpointError names a number in a config.json, at any depth, that is larger than a model of today may have."""
    for name, given in raw.items():
        if isinstance(given, dict):
            refuse_large_numbers(given)
        for value in given if isinstance(given, list) else (given,):
            if not isinstance(value, int | float):
                continue
            most = next((limit for pattern, limit in _LIMITS if pattern.fullmatch(name)), value)
            if value > most:
                raise CheckpointError(f"{named(name)} must be at most {most}, not {shown(value)}")


def refuse_absent_layers(raw: dict[str, Any], names: Iterable[str]) -> None:
    """CheckpointError if a config.json says that there are more layers than the tensors' names do."""
    stated = next((name for name in _LAYER_COUNTS if isinstance(raw.get(name), int)), None)
    found = _count_layers(names)
    if stated is not None and raw[stated] > found:
        raise CheckpointError(f"{stated} is {raw[stated]}, and the weights have {found} layers")


def refuse_absent_experts(num_experts: int, shapes: Iterable[tuple[int, ...]]) -> None:
    """CheckpointError if there are more experts in all layers than matrices, some of which may be stacked."""
    found = sum(shape[0] if len(shape) == _STACKED_DIMENSIONS else 1 for shape in shapes)
    if num_experts > found:
        raise CheckpointError(f"its layers have {num_experts} experts, and the weights have {found} matrices")


def _count_layers(names: Iterable[str]) -> int:
    """The most different numbers behind one beginning, such as `model.layers.`, of tensors' names."""
    found = defaultdict(set)
    for name in names:
        if match := _OF_A_LAYER.match(name):
            found[match[1]].add(match[2])
    return max(map(len, found.values()), default=0)


def has_own_head(weights: ComparableWeights, embedding: str, head: str) -> bool:
    """True if the files have a head that differs from the embedding, to which the config ties it.

    Merges of adapters leave such checkpoints. As in transformers, the tensors count more than the config.
    """
    return {embedding, head} <= weights.tensors.keys() and not weights.are_equal(embedding, head)
