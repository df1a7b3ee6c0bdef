"""Strict loading of a checkpoint into a model, parameter by parameter.

Names and shapes are compared before anything is allocated. Then weights go straight to their places on the model's
device, so that the host never holds more than one tensor of them. Matrices in groups of small integers keep that format
if the model's backend multiplies it; otherwise they are dequantized to the model's dtype. The blocks say which tensors
of a checkpoint are stacked in which parameter (`ModelConfig.weights`).
"""

import functools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chairlift.config import DType
from chairlift.errors import CheckpointError, ConfigurationError, sized
from chairlift.models.checkpoint import Checkpoint
from chairlift.models.config import TORCH_DTYPES, AdaptedConfig, ModelConfig, ModelShape
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import (
    GROUP_ALIGNMENT,
    GroupedParts,
    GroupedWeight,
    round_to_float8,
    workspace_elements,
)
from chairlift.models.matching import listed, match_tensors, naming_tensor, read_tensor, refuse_differences
from chairlift.models.side_by_side import compute_each
from chairlift.models.stored import GroupedSize, GroupFormat, SafetensorsWeights, WeightReader, stacked_format

if TYPE_CHECKING:
    from chairlift.models.adapter import AdaptedDecoder

logger = logging.getLogger(__name__)

_ELEMENTS_AT_ONCE = 1 << 18  # of groups, dequantized: their copies in float32 stay in a processor's cache


def load_model(
    checkpoint: Checkpoint,
    dtype: DType,
    device: str,
    max_seq_len: int,
    num_positions: int | None = None,
    *,
    keeps_groups: bool = False,
    reads_late: bool = False,
    is_float8: bool = False,
) -> Decoder:
    """A family's model with its weights on the device. CheckpointError names a missing, leftover or misshapen tensor.

    `num_positions` that slots have memory for; None: `max_seq_len`. `keeps_groups`: the backend multiplies weights in
    groups, so those of products and embeddings stay as they are stored; on a GPU embeddings do not. `reads_late`: the
    backend packs one matrix of a product at a time and then frees it, so each is read only when it is packed.
    `is_float8`: large matrices are rounded to float8 as they are read, which is for a GPU.
    """
    start = time.perf_counter()
    model, reader = _describe_model(checkpoint.config), checkpoint.open_weights()
    logger.info("%s", model.config.describe())
    parts = match_tensors(model, reader)
    _log_skipped(model.config, reader)
    is_on_gpu = device != "cpu"
    formats = _formats_of(model, reader, parts, is_on_gpu=is_on_gpu)
    if grouped := _size_in_groups(model, reader, parts, formats, is_on_gpu=is_on_gpu):
        fate = "stay so" if keeps_groups else f"become {dtype}, since nothing here multiplies them as they are"
        logger.info("%s of weights in groups of small integers %s", sized(grouped.num_bytes), fate)
    if keeps_groups:
        _log_widened(reader, parts, formats, dtype)
    _log_float8(reader, parts, formats if keeps_groups else {}, dtype)
    num_kept = grouped.num_bytes if grouped and keeps_groups else 0
    num_late = 0 if is_on_gpu else num_kept  # bytes
    exact = {weight.module for weight in model.config.weights() if weight.is_parameter}
    with _room_for(_weigh(model, dtype, grouped if keeps_groups else None, is_float8=is_float8), device):
        for name, stored in parts.items():
            if keeps_groups and name in formats and is_on_gpu:
                read = _grouped_parts(reader, stored)()
                model.load_weight(name, read.without_table().regular().on(device).compacted())
            elif keeps_groups and name in formats:
                model.load_weight(name, _grouped_parts(reader, stored))
            elif reads_late and model.is_product(name):
                num_late += model.get_parameter(name).numel() * dtype.num_bytes
                model.load_weight(name, functools.partial(_read_plain, reader, stored, TORCH_DTYPES[dtype], device))
            elif is_float8 and model.can_round(name):
                rounded = round_to_float8(_read_plain(reader, stored, TORCH_DTYPES[dtype], device))
                num_kept += rounded.num_bytes
                model.load_weight(name, rounded)
            else:
                format = torch.float32 if name in exact else TORCH_DTYPES[dtype]
                _set(model, name, _read_plain(reader, stored, format, device))
    model.finalize(max_seq_len, num_positions)
    more = f"; {sized(num_late)} more are read when they are packed" if num_late else ""
    more = f", and {sized(num_kept)} quantized" if num_kept and (is_on_gpu or is_float8) else more
    _log("loaded %s: %s of weights for %s in %.2f s%s", checkpoint, model, dtype, start, more)
    return model


def make_dummy_model(
    checkpoint: Checkpoint,
    dtype: DType,
    device: str,
    seed: int,
    max_seq_len: int,
    num_positions: int | None = None,
    *,
    is_float8: bool = False,
) -> Decoder:
    """The model with random weights that depend on the seed and the kind of device; only the configuration is read.

    Matrices are normal with deviation 1 / sqrt(inputs), so that products keep the scale of what goes in (LeCun et al.,
    "Efficient BackProp", 1998); norms one; biases zero. `is_float8`: see `load_model`.
    """
    start = time.perf_counter()
    model = _describe_model(checkpoint.config)
    logger.info("%s", model.config.describe())
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        weight = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
        if weight.dim() > 1:
            return weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
        return weight.fill_(0.0 if name.endswith(".bias") or model.config.has_offset_norms else 1.0)

    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with _room_for(_weigh(model, dtype, is_float8=is_float8), device):
        for name, shape in shapes.items():
            if is_float8 and model.can_round(name):
                model.load_weight(name, round_to_float8(draw(name, shape)))
            else:
                _set(model, name, draw(name, shape))
    model.finalize(max_seq_len, num_positions)
    _log("made up weights for %s: %s for %s in %.2f s", checkpoint, model, dtype, start)
    return model


def load_adapted(checkpoint: Checkpoint, dtype: DType, device: str) -> "AdaptedDecoder":
    """A decoder that is in no family, in transformers' code. It is loaded into the host's memory, then moved.

    CheckpointError as for `load_model`.
    """
    from chairlift.models.adapter import AdaptedDecoder

    start = time.perf_counter()
    config = checkpoint.config
    assert isinstance(config, AdaptedConfig), "families have a wiring of their own"
    logger.info("%s", config.describe())
    logger.warning(
        "%s runs in transformers' own code over the cache's slots, which is the slower way: a decode step of a small"
        " model took up to 1.3 times as long as a family's in torch, and up to 3 times as long as in native code",
        config.architecture,
    )
    source, report = _load_in_transformers(checkpoint, config, dtype)
    refuse_differences(report["missing_keys"], report["unexpected_keys"])
    with _room_for(sum(parameter.numel() for parameter in source.parameters()) * dtype.num_bytes, device):
        model = AdaptedDecoder(source.to(device).eval().requires_grad_(False))
    model.check_positions()
    _log("loaded %s: %s of weights for %s in %.2f s", checkpoint, model, dtype, start)
    return model


def _load_in_transformers(checkpoint: Checkpoint, config: AdaptedConfig, dtype: DType) -> tuple[Any, dict[str, Any]]:
    """Returns the model, and how its tensors and the checkpoint's differ.

    transformers gets tensors, because it would map files.
    """
    import transformers
    from transformers.utils import logging as transformers_logging

    from chairlift.models.adapter import ATTENTION

    stored = SafetensorsWeights(checkpoint.weight_files)
    bars: Any = transformers_logging
    has_bar = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        architecture: Any = getattr(transformers, config.architecture)
        loaded = architecture.from_pretrained(
            None,
            config=config.source,
            state_dict={name: stored.read(name) for name in stored.tensors},
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    except Exception as error:  # the files may hold anything, so whatever transformers raises is about them
        raise CheckpointError(f"{checkpoint.path} cannot be loaded: {' '.join(str(error).split())}") from error
    finally:
        if has_bar:
            bars.enable_progress_bar()
    model, report = loaded
    return model, report


def count_parameters(config: ModelShape) -> int:
    """Weights, biases and norms of a model of that description; a tied head counts once. Allocates nothing."""
    if isinstance(config, AdaptedConfig):
        return config.num_parameters
    return sum(parameter.numel() for parameter in _describe_model(config).parameters())


def grouped_size(checkpoint: Checkpoint, *, is_on_gpu: bool = False) -> GroupedSize | None:
    """The size of what stays in groups for a backend that multiplies them; None if nothing does. Reads no weights.

    CheckpointError, as for `load_model`, if names or shapes are not those of the model.
    """
    if isinstance(checkpoint.config, AdaptedConfig):
        return None  # transformers compares them
    model, reader = _describe_model(checkpoint.config), checkpoint.open_weights()
    parts = match_tensors(model, reader)
    formats = _formats_of(model, reader, parts, is_on_gpu=is_on_gpu)
    return _size_in_groups(model, reader, parts, formats, is_on_gpu=is_on_gpu)


def _formats_of(
    model: Decoder, reader: WeightReader, parts: dict[str, list[str]], *, is_on_gpu: bool
) -> dict[str, list[GroupFormat]]:
    """Finds the formats of the parts, by parameter, of products whose matrices are all in groups for the kernels."""
    found = {}
    for name, stored in parts.items():
        formats = _groups_in(reader, stored)
        is_multiplied = is_on_gpu or not any(each.is_float for each in formats)
        is_kept = len(formats) == len(stored) and is_multiplied and model.can_keep_groups(name, is_on_gpu=is_on_gpu)
        if is_kept and stacked_format(formats, is_on_gpu=is_on_gpu) is not None:
            found[name] = formats
    return found


def _log_skipped(config: ModelConfig, reader: WeightReader) -> None:
    if skipped := sorted(name for name in reader.tensors if config.names.is_skipped(name)):
        logger.info("%d tensors are left out, since no text depends on them: %s", len(skipped), listed(skipped))


def _log_widened(
    reader: WeightReader, parts: dict[str, list[str]], formats: dict[str, list[GroupFormat]], dtype: DType
) -> None:
    widened = [
        name
        for name, stored in parts.items()
        if name not in formats and any(not each.is_float for each in _groups_in(reader, stored))
    ]
    if widened:
        logger.info(
            "%s become %s: what is stacked for a product must have groups of one size, a multiple of %d, and a GPU has"
            " embeddings as numbers",
            *(listed(widened), dtype, GROUP_ALIGNMENT),
        )


def _log_float8(
    reader: WeightReader, parts: dict[str, list[str]], kept: dict[str, list[GroupFormat]], dtype: DType
) -> None:
    changed = [
        name
        for name, stored in parts.items()
        if name not in kept and any(each.is_float for each in _groups_in(reader, stored))
    ]
    if changed:
        logger.info("float8 numbers become %s in %s", dtype, listed(changed))


def _groups_in(reader: WeightReader, stored: list[str]) -> list[GroupFormat]:
    return [groups for name in stored if (groups := reader.tensors[name].groups)]


def _size_in_groups(
    model: Decoder,
    reader: WeightReader,
    parts: dict[str, list[str]],
    formats: dict[str, list[GroupFormat]],
    *,
    is_on_gpu: bool,
) -> GroupedSize | None:
    """Counts what stays in groups. On a CPU what is stacked keeps the format of each part where these stay apart.

    Experts need no workspace: kernels read them as they are stored with any number of rows.
    """
    interleaved = {f"{weight.module}.weight" for weight in model.config.weights() if weight.is_interleaved}
    num_parameters = num_bytes = num_dequantized = 0
    for name, each in formats.items():
        size = (shape := model.get_parameter(name).shape).numel()
        num_parameters += size
        is_of_experts = model.is_of_experts(name)
        if not is_of_experts:
            num_dequantized = max(num_dequantized, workspace_elements(*shape))
        is_one = is_on_gpu or is_of_experts or name in interleaved
        if is_one and (stacked := stacked_format(each, is_on_gpu=is_on_gpu)) is not None:
            num_bytes += stacked.num_bytes(size, is_on_gpu=is_on_gpu)
            continue
        sizes = (math.prod(reader.tensors[part].shape) for part in parts[name])
        num_bytes += sum(own.num_bytes(count, is_on_gpu=False) for own, count in zip(each, sizes, strict=True))
    return GroupedSize(num_parameters, num_bytes, num_dequantized) if num_parameters else None


def _describe_model(config: ModelShape) -> Decoder:
    """Makes the model without weights. CheckpointError for sizes of which there can be no tensor."""
    assert isinstance(config, ModelConfig), "other decoders are loaded by load_adapted"
    try:
        with torch.device("meta"):
            return Decoder(config)
    except RuntimeError as error:  # a product of sizes that are possible by themselves
        raise CheckpointError(f"the sizes in its config are too large together: {error}") from error


def _weigh(model: Decoder, dtype: DType, kept: GroupedSize | None = None, *, is_float8: bool) -> int:
    """Counts the bytes of what is kept of a model without weights, once it is loaded."""
    num_bytes = 0 if kept is None else kept.num_bytes - kept.num_parameters * dtype.num_bytes
    for name, parameter in model.named_parameters():
        is_rounded = is_float8 and model.can_round(name)
        num_scales = len(parameter) if is_rounded else 0
        num_bytes += parameter.numel() * (1 if is_rounded else dtype.num_bytes) + num_scales * torch.float32.itemsize
    return num_bytes


@contextmanager
def _room_for(num_bytes: int, device: str) -> Iterator[None]:
    """ConfigurationError if the device has no room for weights of that size, which are moved to it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{device} ran out of memory for {sized(num_bytes)} of weights; stop what else uses it, or choose a"
            " smaller model or another dtype"
        ) from error


def _log(
    message: str,
    checkpoint: Checkpoint,
    model: "Decoder | AdaptedDecoder",
    dtype: DType,
    start: float,
    *others: str,
) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    logger.info(message, checkpoint.path, sized(num_bytes), dtype, time.perf_counter() - start, *others)


def _read_group(reader: WeightReader, name: str) -> GroupedWeight:
    """A matrix in groups."""
    read = read_tensor(reader, name)
    assert isinstance(read, GroupedWeight), "it has a format"
    return read


def _grouped_parts(reader: WeightReader, stored: list[str]) -> GroupedParts:
    """The matrices, stacked."""
    num_elements = sum(math.prod(reader.tensors[name].shape) for name in stored)
    return GroupedParts([functools.partial(_read_group, reader, name) for name in stored], num_elements)


def _read_plain(reader: WeightReader, stored: list[str], dtype: torch.dtype, device: str) -> torch.Tensor:
    """The tensors, stacked, in one allocation on the device."""
    shapes = [reader.tensors[name].shape for name in stored]
    place = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=device)
    for rows, name in zip(torch.split(place, [shape[0] for shape in shapes]), stored, strict=True):
        if reader.tensors[name].groups is None:
            with naming_tensor(name):
                reader.read_into(name, rows)
            continue
        _dequantize_into(rows, _read_group(reader, name))
    return place


def _dequantize_into(place: torch.Tensor, read: GroupedWeight) -> None:
    num_rows = max(1, _ELEMENTS_AT_ONCE // place.shape[1])
    parts = [slice(start, start + num_rows) for start in range(0, len(place), num_rows)]
    compute_each(lambda some: place[some].copy_(read.rows(some).dequantize(place.dtype)), parts, place.numel())


def _set(model: Decoder, name: str, weight: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(weight, requires_grad=False))
