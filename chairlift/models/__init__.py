"""Architectures as wiring, attention backends, and the loading of checkpoints. Here: which backend can run, by name."""

import logging

import torch

from chairlift.config import AttentionBackend, DType
from chairlift.errors import ConfigurationError
from chairlift.models import cpu
from chairlift.models.attention import Backend, flash, torch_sdpa
from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.config import ModelShape
from chairlift.models.loader import load_adapted, load_model, make_dummy_model

__all__ = [
    "Checkpoint",
    "find_obstacle",
    "load_adapted",
    "load_backend",
    "load_model",
    "make_dummy_model",
    "open_checkpoint",
    "page_size_of",
]

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def find_obstacle(backend: AttentionBackend, model: ModelShape, dtype: DType, device: str) -> str | None:
    """Why the backend cannot run that model in that format on that device ("cpu", "cuda:0"); None if it can.

    For the cpu backend this compiles its kernels, if that has not been done before.
    """
    match backend:
        case AttentionBackend.CPU:
            return cpu.find_obstacle(model, dtype, device)
        case AttentionBackend.FLASH_ATTN:
            return flash.find_obstacle(model.head_dim, dtype, device)
        case AttentionBackend.TORCH:
            return None


def page_size_of(backend: AttentionBackend) -> int:
    """Tokens of which a slot must have memory for a multiple."""
    return flash.PAGE_SIZE if backend is AttentionBackend.FLASH_ATTN else 1


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
    if flash.is_varlen_available(model.head_dim, dtype, model.attention_softcap):
        return flash.TorchVarlenBackend(model.attention)
    logger.info("attention: torch copies the slots of decode rows together, which costs bandwidth")
    return torch_sdpa.TorchBackend(model.attention, is_in_place=False)
