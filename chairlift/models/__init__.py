"""Architectures, attention backends, and the loading of checkpoints. Here: what can run a model, and its loading.

A model is run by a `Forward` (`attention`): native code (`cpu`), or torch with an attention backend.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import AttentionBackend, DType, LoadFormat, ResolvedConfig
from chairlift.errors import ConfigurationError
from chairlift.models import cpu
from chairlift.models.attention import Backend, BatchMetadata, Forward, flash, token_slots, torch_sdpa
from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.config import AdaptedConfig, ModelShape
from chairlift.models.decoder import Decoder
from chairlift.models.loader import load_adapted, load_model, make_dummy_model
from chairlift.models.parallel import CheckpointPart

if TYPE_CHECKING:
    from chairlift.models.adapter import AdaptedDecoder

__all__ = [
    "Checkpoint",
    "InvariantForward",
    "TorchForward",
    "find_obstacle",
    "load_adapted",
    "load_backend",
    "load_forward",
    "load_model",
    "make_dummy_model",
    "open_checkpoint",
]

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_TILE_SIZES = (16, 8, 4, 2, 1)
_NUM_PROBED_LAYERS = 64  # a difference shows in about every fourth pass through a layer, so 64 passes miss none


def find_obstacle(
    backend: AttentionBackend, model: ModelShape, dtype: DType, device: str, num_ranks: int = 1
) -> str | None:
    """Why the backend cannot run that model in that format on that device ("cpu", "cuda:0"); None if it can.

    For the cpu backend this compiles its kernels, if that has not been done before.
    """
    match backend:
        case AttentionBackend.CPU:
            return cpu.find_obstacle(model, dtype, device, num_ranks)
        case AttentionBackend.FLASH_ATTN:
            return flash.find_obstacle(model.head_dims, dtype, device)
        case AttentionBackend.TORCH:
            return None


def load_backend(name: AttentionBackend, model: ModelShape, dtype: torch.dtype, device: torch.device = _CPU) -> Backend:
    """The attention of `flash_attn` or `torch` for that model, for which there must be no obstacle.

    `ConfigurationError` if its package cannot be imported.
    """
    if name is AttentionBackend.FLASH_ATTN:
        try:
            return flash.load_flash_attn(model.attention, device)
        except ImportError as error:
            raise ConfigurationError(
                f"flash-attn cannot be imported ({error}): reinstall it for torch {torch.__version__},"
                " or choose attention_backend torch"
            ) from error
    if device.type == "cpu":
        return torch_sdpa.TorchBackend(model.attention)
    has_softcap = any(each.softcap is not None for each in model.attention.values())
    if model.is_plain and flash.is_varlen_available(model.head_dims, dtype, has_softcap=has_softcap):
        return flash.TorchVarlenBackend(model.attention)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it prepares each new shape anew, and prompts have many
    logger.info("attention: torch copies the slots of decode rows together, which costs bandwidth")
    return torch_sdpa.TorchBackend(model.attention, is_in_place=False)


def load_forward(checkpoint: Checkpoint, config: ResolvedConfig) -> Forward:
    """Loads a checkpoint's weights, to be run by the backend that the configuration names."""
    if config.slot_len != config.max_seq_len:
        logger.info(
            "max_seq_len %d: slots have memory for %d tokens, since %s reads them in pages",
            config.max_seq_len,
            config.slot_len,
            config.attention_backend,
        )
    if isinstance(checkpoint.config, AdaptedConfig):
        return _load_adapted_forward(checkpoint, config)
    is_native = config.attention_backend is AttentionBackend.CPU
    lengths = config.max_seq_len, 1 if is_native else config.slot_len  # native code makes rotary tables of its own
    if config.load_format is LoadFormat.DUMMY:
        model = make_dummy_model(checkpoint, config.dtype, config.device, config.seed, *lengths)
    else:
        model = load_model(
            checkpoint,
            config.dtype,
            config.device,
            *lengths,
            keeps_groups=config.keeps_groups,
            reads_late=is_native,
        )
    if is_native:
        return cpu.CpuDecoder(model, config.slot_len, quantization=config.quantization)
    model.pack()
    if isinstance(checkpoint, CheckpointPart):
        checkpoint.connect(model)
    if config.batch_invariant:
        return InvariantForward(model)
    return _with_attention(model, model.config, config)


def _load_adapted_forward(checkpoint: Checkpoint, config: ResolvedConfig) -> Forward:
    if config.batch_invariant or config.load_format is LoadFormat.DUMMY:
        setting = "batch_invariant" if config.batch_invariant else "load_format dummy"
        raise ConfigurationError(
            f"{setting} works with the families that docs/models.md lists, and {checkpoint.config.architecture} is in"
            " none; leave it out"
        )
    return _with_attention(load_adapted(checkpoint, config.dtype, config.device), checkpoint.config, config)


def _with_attention(model: "Decoder | AdaptedDecoder", shape: ModelShape, config: ResolvedConfig) -> "TorchForward":
    attention = load_backend(config.attention_backend, shape, model.dtype, model.device)
    logger.info("attention: %s on %s", type(attention).__name__, model.device)
    return TorchForward(model, attention)


class TorchForward:
    """A model in torch, with an attention backend."""

    def __init__(self, model: "Decoder | AdaptedDecoder", attention: Backend) -> None:
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

    @torch.inference_mode()
    def rehearse(self, num_tokens: int, num_rows: int) -> torch.Tensor:
        """Runs a step of that many tokens without a cache, to measure what it allocates; returns the rows' logits.

        Attention is left out: beside its result, which is as large as the queries, it needs next to nothing.
        """
        places = torch.zeros(num_tokens, dtype=torch.int64, device=self._model.device)
        hidden = self._model(places, places, lambda _, query, key, value: query)  # noqa: ARG005
        return self._model.logits(hidden[:num_rows])


class InvariantForward:
    """A model in torch that gives a token the same bits whatever else is in the batch. For CPUs.

    Results depend on the batch because libraries choose kernels, and so an order of summation, by the shapes of a call
    (He et al., "Defeating Nondeterminism in LLM Inference", 2025). So the batch has no influence on any call's shape:
    tokens go through the layers in tiles of a fixed size, the last one padded, and each token attends alone.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._attention = model.config.attention
        self._tile_size = next(size for size in _TILE_SIZES if _ignores_position(model, size))
        logger.info("batch-invariant: tokens are computed in tiles of %d", self._tile_size)

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """See `Forward`."""
        slots = token_slots(batch, cache)

        def run(tile: torch.Tensor) -> torch.Tensor:
            positions = batch.positions[tile]
            hidden: torch.Tensor = self._model(
                input_ids[tile], positions, torch_sdpa.attend_alone(self._attention, slots[tile], positions, cache)
            )
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


@torch.inference_mode()
def _ignores_position(model: Decoder, tile_size: int) -> bool:
    """Whether a token gets the same bits at every place in a tile of that size, tried with this model on this machine.

    Some kernels treat the last rows of a matrix, or the elements at a thread's border, differently.
    """
    num_probes = -(-_NUM_PROBED_LAYERS // model.config.num_layers)
    probes = torch.linspace(0, model.config.vocab_size - 1, num_probes).long()
    for position, token in enumerate(probes.tolist()):
        ids = torch.full((tile_size,), token)
        places = torch.full_like(ids, position % model.num_positions)  # the tables may be shorter than there are probes
        hidden = model(ids, places, lambda _, query, key, value: query)  # noqa: ARG005
        logits = model.logits(hidden)
        if not all(torch.equal(each, each[:1].expand_as(each)) for each in (hidden, logits)):
            return False
    return True
