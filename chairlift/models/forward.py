"""Ways to run a model in torch: in one piece, layer by layer, or with bits that do not depend on the batch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.models import ragged_recurrence
from chairlift.models.attention import (
    AnyLength,
    Backend,
    BatchMetadata,
    Forward,
    PaddedBatch,
    PaddingBackend,
    token_slots,
    torch_sdpa,
)
from chairlift.models.blocks import Pass, Residual
from chairlift.models.decoder import Decoder
from chairlift.models.recurrence import Recur, prepare, prepare_part, prepare_without_states

if TYPE_CHECKING:
    from chairlift.models.adapter import AdaptedDecoder

logger = logging.getLogger(__name__)

_TILE_SIZES = (16, 8, 4, 2, 1)
_NUM_PROBED_LAYERS = 64  # a difference shows in about every fourth pass through a layer, so 64 passes miss none


Drive = Callable[[BatchMetadata, ContinuousBatchingKVCacheCollection], Recur]
"""Prepares what moves the recurrent states of a batch."""


class TorchForward:
    """A decoder of any kind in torch, with an attention backend, as one piece."""

    def __init__(self, model: "Decoder | AdaptedDecoder", attention: Backend, drive: Drive | None = None) -> None:
        """`drive` None: what suits the device."""
        self._model = model
        self._attention = attention
        self._drive = drive or _drive

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """See `Forward`."""
        attend = self._attention.prepare(batch, cache)
        states = () if cache.states is None else (self._drive(batch, cache),)
        hidden: torch.Tensor = self._model(input_ids, batch.positions, attend, *states)
        return hidden

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type of what `logits` returns."""
        return self._model.logits_dtype

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return self._model.logits(hidden)

    @property
    def is_any_length(self) -> bool:
        """See `AnyLength`."""
        return isinstance(self._attention, AnyLength) and self._attention.is_any_length

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_rows: int) -> torch.Tensor:
        """Runs a step of that many tokens without a cache, to measure what it allocates; returns the rows' logits.

        Attention is left out: beside its result, which is as large as the queries, it needs next to nothing. Of
        recurrences a single token is computed, since they take the tokens of a row one after the other.
        """
        places = torch.zeros(num_tokens, dtype=torch.int64, device=self._model.device)
        hidden = _run_alone(self._model, places, places)
        return self._model.logits(hidden[:num_rows])


StageT = TypeVar("StageT")


class LayeredForward(Forward, Protocol[StageT]):
    """A way to run a model whose layers can be run some at a time.

    `leave(run(enter(...), 0, num_layers))` is `hidden`, bit for bit, and so is every way to divide the layers. A stage
    is a pass between two pieces. `run` may change it in place, so whoever has given it away uses the one returned.
    """

    @property
    def num_layers(self) -> int: ...

    def enter(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> StageT:
        """Embeds the tokens, int64 `[T]`, and prepares what all layers share."""
        ...

    def run(self, stage: StageT, first_layer: int, count: int) -> StageT:
        """Runs `count` layers from that one on; appends their keys and values to the slots.

        IndexError if there are not so many.
        """
        ...

    def leave(self, stage: StageT) -> torch.Tensor:
        """Normalises: final hidden states `[T, hidden]`, of which `logits` takes rows."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """A pass between two pieces: the tokens so far, and what the layers to come need of the batch."""

    stream: Residual
    now: Pass


class PiecewiseForward(TorchForward):
    """A family's decoder in torch: a `LayeredForward`, and a `PaddedForward`."""

    def __init__(self, model: Decoder, attention: Backend, drive: Drive | None = None) -> None:
        super().__init__(model, attention, drive)
        self._decoder = model

    @property
    def num_layers(self) -> int:
        return self._decoder.config.num_layers

    @property
    def can_pad(self) -> bool:
        """See `PaddedForward`."""
        config = self._decoder.config
        all_keep = all(block.source is None for block in config.attention_blocks.values())
        return config.can_record and all_keep and isinstance(self._attention, PaddingBackend)

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        """See `PaddedForward`."""
        model = self._decoder
        return torch.zeros(num_tokens, model.config.hidden_size, dtype=model.dtype, device=model.device)

    def padded_hidden(
        self, batch: PaddedBatch, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """See `PaddedForward`."""
        assert isinstance(self._attention, PaddingBackend), "`can_pad` says so"
        attend = self._attention.prepare_padded(batch, cache.blocks)
        states = () if cache.states is None else (self._drive(batch.as_rows, cache),)
        hidden: torch.Tensor = self._decoder(input_ids, batch.positions, attend, *states)
        return hidden

    def enter(self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection) -> Stage:
        """See `LayeredForward`."""
        attend = self._attention.prepare(batch, cache)
        recur = None if cache.states is None else self._drive(batch, cache)
        return Stage(*self._decoder.enter(input_ids, self._decoder.look_up(batch.positions, attend, recur)))

    def run(self, stage: Stage, first_layer: int, count: int) -> Stage:
        """See `LayeredForward`."""
        return replace(stage, stream=self._decoder.run(stage.stream, stage.now, first_layer, count))

    def leave(self, stage: Stage) -> torch.Tensor:
        """See `LayeredForward`."""
        return self._decoder.leave(stage.stream)


class InvariantForward:
    """A model in torch that gives a token the same bits whatever else is in the batch. For CPUs.

    Results depend on the batch because libraries choose kernels, and so an order of summation, by the shapes of a call
    (He et al., "Defeating Nondeterminism in LLM Inference", 2025). So the batch has no influence on any call's shape:
    tokens go through the layers in tiles of a fixed size, the last one padded, and each token attends alone. A tile is
    one token if there are experts, since the tokens of a larger one share products with those that chose the same.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._attention = model.config.attention
        sizes = _TILE_SIZES[-1:] if model.config.num_experts else _TILE_SIZES
        self._tile_size = next(size for size in sizes if _ignores_position(model, size))
        logger.info("batch-invariant: tokens are computed in tiles of %d", self._tile_size)

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """See `Forward`."""
        slots = token_slots(batch, cache)

        def run(tile: torch.Tensor) -> torch.Tensor:
            positions = batch.positions[tile]
            attend = torch_sdpa.attend_alone(self._attention, slots[tile], positions, cache)
            recur = None if cache.states is None else prepare_part(cache.states, int(tile[0]), int(tile[-1]) + 1)
            hidden: torch.Tensor = self._model(input_ids[tile], positions, attend, recur)
            return hidden

        return self._in_tiles(len(input_ids), run)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return self._in_tiles(len(hidden), lambda tile: self._model.logits(hidden[tile]))

    def _in_tiles(self, num_rows: int, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`run` gets the indices of a tile's rows; the last row is repeated to fill the last tile."""
        starts = range(0, num_rows, self._tile_size)
        tiles = [torch.arange(start, start + self._tile_size).clamp_(max=num_rows - 1) for start in starts]
        return torch.cat([run(tile) for tile in tiles])[:num_rows]


def _drive(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Recur:
    assert cache.states is not None, "no layer has a state"
    device = cache.states.live.device
    if device.type != "cpu" and ragged_recurrence.is_available(device):
        return ragged_recurrence.prepare(batch, cache)
    return prepare(cache.states)


def _run_alone(model: "Decoder | AdaptedDecoder", input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Runs tokens that see no others, int64 `[T]`, without a cache: final hidden states `[T, hidden]`."""
    recur = (prepare_without_states(model.config.states()),) if isinstance(model, Decoder) else ()
    hidden: torch.Tensor = model(input_ids, positions, lambda _, new: new.query, *recur)
    return hidden


@torch.inference_mode()
def _ignores_position(model: Decoder, tile_size: int) -> bool:
    """Tries if a token gets the same bits at every place in a tile of that size, with this model on this machine.

    Some kernels treat the last rows of a matrix, or the elements at a thread's border, differently.
    """
    num_probes = -(-_NUM_PROBED_LAYERS // model.config.num_layers)
    probes = torch.linspace(0, model.config.vocab_size - 1, num_probes).long()
    for position, token in enumerate(probes.tolist()):
        ids = torch.full((tile_size,), token)
        places = torch.full_like(ids, position % model.num_positions)  # the tables may be shorter than there are probes
        hidden = _run_alone(model, ids, places)
        logits = model.logits(hidden)
        if not all(torch.equal(each, each[:1].expand_as(each)) for each in (hidden, logits)):
            return False
    return True
