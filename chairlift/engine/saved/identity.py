"""The identity of a cache: everything that the keys and values of a prompt depend on, beside its tokens.

Two engines read each other's files only if all of it is equal, so nothing here may say less than the truth. It may say
more: then a prompt is computed once too often.
"""

import platform
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch

import chairlift
from chairlift.config import AttentionBackend, LoadFormat, Quantization, ResolvedConfig
from chairlift.disk.entry import FORMAT
from chairlift.engine.saved.weights import digest_files
from chairlift.models import Checkpoint
from chairlift.models.cpu import name_kernels
from chairlift.models.gguf import parts_of

_CODE = ("models", "kernels", "cache")  # the packages that keys, values and states come from


def describe_cache(checkpoint: Checkpoint, config: ResolvedConfig, memory: Path) -> dict[str, str]:
    """Returns the facts of the identity, by name. OSError if weights cannot be read.

    `memory`: the directory in which digests of weights are remembered.
    """
    shape = checkpoint.config
    tables = sorted(map(repr, shape.rope_tables))
    if shape.unscaled_positions < config.max_seq_len:
        tables.append(f"for {config.max_seq_len} positions")
    return {
        "format": str(FORMAT),
        "version": chairlift.__version__,
        "code": _digest_code(),
        "model": shape.describe(),
        "config": _digest_config(checkpoint),
        "weights": _describe_weights(checkpoint, config, memory),
        "arithmetic": _describe_arithmetic(config),
        "numbers": f"{config.dtype}, quantization {config.quantization}, groups {config.keeps_groups}",
        "layout": repr((shape.kept(config.cache_dtype), shape.states())),
        "rope": ", ".join(tables),
    }


@cache
def _digest_code() -> str:
    root = Path(chairlift.__file__).parent
    files = sorted(path for package in _CODE for path in (root / package).rglob("*.py"))
    return sha256(b"".join(sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def _digest_config(checkpoint: Checkpoint) -> str:
    """Returns a digest of what describes the model, or says that it is with the weights."""
    if checkpoint.gguf is not None:
        return "in the weights' file"
    return sha256((checkpoint.path / "config.json").read_bytes()).hexdigest()


def _describe_weights(checkpoint: Checkpoint, config: ResolvedConfig, memory: Path) -> str:
    if config.load_format is LoadFormat.DUMMY:
        return f"random, seed {config.seed}"
    paths = checkpoint.weight_files if checkpoint.gguf is None else parts_of(checkpoint.path)
    return digest_files(paths, memory, config.num_threads)


def _describe_arithmetic(config: ResolvedConfig) -> str:
    if config.attention_backend is AttentionBackend.CPU:
        is_calibrated = config.quantization is Quantization.INT4
        calibrated = f", calibrated by torch {torch.__version__} with {config.num_threads} threads"
        return f"native, {name_kernels()}{calibrated if is_calibrated else ''}"
    device = torch.device(config.device)
    on = f"{platform.machine()} with {config.num_threads} threads"
    if device.type == "cuda":
        on = torch.cuda.get_device_name(device)
    return (
        f"torch {torch.__version__}, transformers {version('transformers')}, {config.attention_backend} on {on},"
        f" ranks {config.tensor_parallel_size}, own kernels {config.has_own_kernels},"
        f" invariant {config.batch_invariant}"
    )
