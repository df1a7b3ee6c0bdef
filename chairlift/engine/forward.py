"""The model's forward pass over a batch, as the runner sees it: hidden states and logits."""

from typing import Protocol

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.models.attention import Backend, BatchMetadata
from chairlift.models.llama import Llama


class Forward(Protocol):
    """A way to run a model."""

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`; appends keys and values to the slots."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        ...


class PlainForward:
    """All tokens at once."""

    def __init__(self, model: Llama, attention: Backend) -> None:
        self._model = model
        self._attention = attention

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """See `Forward`."""
        hidden: torch.Tensor = self._model(input_ids, batch.positions, self._attention.prepare(batch, cache))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return self._model.logits(hidden)
