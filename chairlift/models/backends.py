"""Chooses what runs a model, and loads the model for it.

A model is run by a `Forward` (`attention/backend.py`): native code (`cpu`), or torch with an attention backend.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from chairlift.config import AttentionBackend, DType, LoadFormat, Quantization, ResolvedConfig
from chairlift.device import on_device
from chairlift.errors import ConfigurationError
from chairlift.models import calibration, cpu
from chairlift.models.attention import Backend, Forward, PaddingBackend, flash, flash_builds, torch_sdpa, triton
from chairlift.models.checkpoint import Checkpoint
from chairlift.models.config import AdaptedConfig, ModelShape
from chairlift.models.decoder import Decoder
from chairlift.models.forward import InvariantForward, PiecewiseForward, TorchForward
from chairlift.models.loader import count_parameters, load_adapted, load_model, make_dummy_model
from chairlift.models.parallel import CheckpointPart
from chairlift.models.precision import widths_for

if TYPE_CHECKING:
    from chairlift.models.adapter import AdaptedDecoder

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_ADA = (8, 9)  # compute capability of the first GPUs with instructions for float8
_HOPPER = (9, 0)  # compute capability of the first GPUs that launch a kernel before the one before it has ended


def find_obstacle(
    backend: AttentionBackend, model: ModelShape, dtype: DType, device: str, num_ranks: int = 1
) -> str | None:
    """Says why the backend cannot run that model in that format on that device ("cpu", "cuda:0"); None if it can.

    For the cpu backend this compiles its kernels, if that has not been done before.
    """
    match backend:
        case AttentionBackend.CPU:
            return cpu.find_obstacle(model, dtype, device, num_ranks)
        case AttentionBackend.FLASH_ATTN:
            if any(block.source is not None for block in model.attention_blocks.values()):
                return "its kernels take keys and values of every layer's own"
            if any(block.num_common for block in model.attention_blocks.values()):
                return "its kernels take keys and values that have nothing in common"
            return flash_builds.find_obstacle(model.attention, model.head_dims, dtype, device)
        case AttentionBackend.TRITON:
            return triton.find_obstacle(model.head_dims, device)
        case AttentionBackend.TORCH:
            return None


def load_backend(name: AttentionBackend, model: ModelShape, dtype: torch.dtype, device: torch.device = _CPU) -> Backend:
    """The attention of `flash_attn`, `triton` or `torch` for that model, for which there must be no obstacle.

    `ConfigurationError` if its package cannot be imported.
    """
    if name is AttentionBackend.FLASH_ATTN:
        return _load_flash_attn(model, dtype, device)
    if name is AttentionBackend.TRITON:
        return triton.TritonBackend(model.attention, _load_prompt_backend(model, dtype, device))
    if device.type == "cpu":
        return torch_sdpa.TorchBackend(model.attention)
    if _has_varlen(model, dtype):
        return flash.TorchVarlenBackend(model.attention)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it prepares each new shape anew, and prompts have many
    logger.info("attention: torch copies the slots of decode rows together, which costs bandwidth")
    return torch_sdpa.TorchBackend(model.attention, is_in_place=False)


def _load_flash_attn(model: ModelShape, dtype: torch.dtype, device: torch.device) -> PaddingBackend:
    demands = flash_builds.Demands.of(model.attention, model.head_dims, is_float16=dtype is torch.float16)
    try:
        return flash.load_flash_attn(model.attention, demands, device)
    except ImportError as error:
        raise ConfigurationError(
            f"flash-attn cannot be imported ({error}): reinstall it for torch {torch.__version__},"
            " or choose attention_backend torch"
        ) from error


def _has_sinks(model: ModelShape) -> bool:
    return any(each.has_sinks for each in model.attention.values())


def _has_varlen(model: ModelShape, dtype: torch.dtype) -> bool:
    has_softcap = any(each.softcap is not None for each in model.attention.values())
    is_plain = model.is_plain and not _has_sinks(model)
    return is_plain and flash.is_varlen_available(model.head_dims, dtype, has_softcap=has_softcap)


def _load_prompt_backend(model: ModelShape, dtype: torch.dtype, device: torch.device) -> PaddingBackend | None:
    """The fastest kernels that there are for prompts, but for those in Triton."""
    name = DType(str(dtype).removeprefix("torch."))
    if find_obstacle(AttentionBackend.FLASH_ATTN, model, name, str(device)) is None:
        return _load_flash_attn(model, dtype, device)
    return flash.TorchVarlenBackend(model.attention) if _has_varlen(model, dtype) else None


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
    is_native, is_dummy = config.attention_backend is AttentionBackend.CPU, config.load_format is LoadFormat.DUMMY
    is_calibrated = config.quantization is Quantization.INT4 and not is_dummy
    is_float8 = config.quantization is Quantization.FP8
    # Native code makes rotary tables of its own.
    num_positions = config.slot_len if not is_native else calibration.LENGTH if is_calibrated else 1
    lengths = config.max_seq_len, num_positions
    if is_dummy:
        model = make_dummy_model(checkpoint, config.dtype, config.device, config.seed, *lengths, is_float8=is_float8)
    else:
        model = load_model(
            replace(checkpoint, unpacker=cpu.UNPACKER) if is_native else checkpoint,
            config.dtype,
            config.device,
            *lengths,
            keeps_groups=config.keeps_groups,
            reads_late=is_native,
            is_float8=is_float8,
        )
    if is_native:
        calibration_ids = calibration.draw_tokens(checkpoint.config.vocab_size) if is_calibrated else None
        widths = widths_for(config.quantization, count_parameters(checkpoint.config))
        return cpu.CpuDecoder(model, config.slot_len, widths=widths, calibration_ids=calibration_ids)
    model.pack()
    if isinstance(checkpoint, CheckpointPart):
        checkpoint.connect(model)
    if config.has_own_kernels:
        _choose_products(model)
    if config.batch_invariant:
        return InvariantForward(model)
    return _with_attention(model, model.config, config)


def _choose_products(model: Decoder) -> None:
    from chairlift.models.products import install_products  # imports Triton, which not every machine has

    with on_device(model.device), torch.inference_mode():
        capability = torch.cuda.get_device_capability(model.device)
        install_products(model, can_start_early=capability >= _HOPPER, reads_float8=capability >= _ADA)


def _load_adapted_forward(checkpoint: Checkpoint, config: ResolvedConfig) -> Forward:
    unfit = {
        "batch_invariant": config.batch_invariant,
        "load_format dummy": config.load_format is LoadFormat.DUMMY,
        "quantization": config.quantization is not None,
    }
    if setting := next((name for name, is_set in unfit.items() if is_set), None):
        raise ConfigurationError(
            f"{setting} works with the families that docs/models.md lists, and {checkpoint.config.architecture} is in"
            " none; leave it out"
        )
    return _with_attention(load_adapted(checkpoint, config.dtype, config.device), checkpoint.config, config)


def _with_attention(model: "Decoder | AdaptedDecoder", shape: ModelShape, config: ResolvedConfig) -> TorchForward:
    attention = load_backend(config.attention_backend, shape, model.dtype, model.device)
    logger.info("attention: %s on %s", type(attention).__name__, model.device)
    return PiecewiseForward(model, attention) if isinstance(model, Decoder) else TorchForward(model, attention)
