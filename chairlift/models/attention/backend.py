"""Defines attention over the cache slots: what a forward pass knows of its batch, and what a backend offers.

A backend's `prepare` looks at a batch once per step and returns `attend`, which every layer calls with its own
queries, keys and values: it appends keys and values to the slots in place and attends to all that each row may see.

Tokens of all rows lie end to end, decode rows first:

    tokens       | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        T = num_tokens
    row_offsets  0    1    2    3             7       9        B + 1
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer_idx, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]`; appends key and value."""

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Describes what attention computes in a layer: softmax(c tanh(scale q k / c)) v over the keys in its window."""

    scale: float
    window: int | None = None  # keys that a query sees, its own included; None: all
    softcap: float | None = None  # c above; None: the scores as they are


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Says where each row's tokens are: on the device, and on the host, which need not wait for the device."""

    row_offsets: torch.Tensor  # int32 [B + 1]
    positions: torch.Tensor  # int64 [T]: of each token in its sequence
    slots: tuple[int, ...]  # row -> slot
    num_new_tokens: tuple[int, ...]  # row -> tokens in this step
    num_cached_tokens: tuple[int, ...]  # row -> tokens in its slot before this step
    num_decode_rows: int  # the first rows, of one new token each

    @property
    def is_decode(self) -> bool:
        """Every row decodes."""
        return self.num_decode_rows == len(self.slots)


class Backend(Protocol):
    """Implements attention, bound to what each layer of a model computes: an `AttentionConfig` by layer.

    On a CUDA device neither `prepare` nor `attend` may wait for the device or copy to it from the host. Of a batch that
    only decodes they read nothing but tensors, `is_decode` and the cache's `max_cache_length`. So what they launch can
    be captured in a CUDA graph, and replayed with other slots and lengths.
    """

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """Computes once per step what all layers share."""
        ...


@runtime_checkable
class AnyLength(Protocol):
    """A backend or a forward that may launch the same for rows that decode however long these are.

    Others launch what suffices up to the cache's `max_cache_length`.
    """

    @property
    def is_any_length(self) -> bool:
        """Tells if it does."""
        ...


class Forward(Protocol):
    """Runs a model."""

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`; appends keys and values to the slots."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> `[N, vocab]`, float32 or the model's type."""
        ...


def find_head_obstacle(head_dims: Iterable[int], alignment: int) -> str | None:
    """Says why kernels that take multiples of `alignment` cannot take heads of those sizes; None if they can."""
    wrong = [head_dim for head_dim in head_dims if head_dim > _MAX_HEAD_DIM or head_dim % alignment]
    if not wrong:
        return None
    return f"it needs a head_dim of at most {_MAX_HEAD_DIM} that is a multiple of {alignment}, not {wrong[0]}"
