"""The engine's configuration: frozen, and resolved once.

A caller writes `EngineConfig`, in which most numbers may stay "auto". `resolve` is a pure function of that, of facts
about the model and of facts about the machine; the `ResolvedConfig` it returns is what the engine runs on.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from chairlift.errors import ConfigurationError

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]

MAX_AUTO_SEQ_LEN = 4096  # a slot is sized for the worst case, so "auto" does not take a model's 128k at its word
MAX_AUTO_SLOTS_CPU = 32
MAX_AUTO_SLOTS_GPU = 256
AUTO_STEPS_PER_LAUNCH_CPU = 1  # more gain 2 % on a 135 M model, and make newcomers and streams wait
AUTO_STEPS_PER_LAUNCH_GPU = 4
AUTO_BATCHED_TOKENS_CPU = 1024
AUTO_BATCHED_TOKENS_GPU = 8192
CPU_HEAD_DIM_ALIGNMENT = 32  # what the cpu backend's kernels take
CPU_MAX_HEAD_DIM = 256
FLASH_HEAD_DIM_ALIGNMENT = 8  # what the kernels of flash-attn take
FLASH_MAX_HEAD_DIM = 256


class DType(StrEnum):
    """Number formats that weights and cache may have."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class AttentionBackend(StrEnum):
    """Ways to compute attention over the slots."""

    CPU = "cpu"
    TORCH = "torch"
    FLASH_ATTN = "flash_attn"


class Quantization(StrEnum):
    """Coarser number formats for weights."""

    INT8 = "int8"


class LoadFormat(StrEnum):
    """Where weights come from."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


SLOT_ALIGNMENT = {
    AttentionBackend.CPU: 1,
    AttentionBackend.TORCH: 1,
    AttentionBackend.FLASH_ATTN: 256,  # the kernels read a slot as a page, whose size must be a multiple of this
}


class EngineConfig(BaseModel):
    """How to run a model. Field descriptions are the help texts of the command line's flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("bundled", description="checkpoint directory, hub id, or 'bundled' for the model in the package")
    tokenizer: str | None = Field(None, description="directory or hub id of the tokenizer, if not beside the model")
    chat_template: str | None = Field(None, description="file with a Jinja chat template to use instead of the model's")
    load_format: LoadFormat = Field(
        LoadFormat.SAFETENSORS,
        description="dummy: random weights from config.json alone, to measure speed where there is no checkpoint",
    )
    device: str = Field("auto", description="'cpu', 'cuda', 'cuda:1', ...; auto: the first GPU if there is one")
    dtype: DType | Auto = Field("auto", description="auto: the checkpoint's, or float32 where the CPU lacks it")
    attention_backend: AttentionBackend | Auto = Field(
        "auto",
        description="auto: flash_attn on a GPU that has it, cpu (native code) on a CPU, else torch",
    )
    quantization: Quantization | None = Field(
        None, description="int8: weights in 8 bits, products in int8; faster, a little less exact; with the cpu backend"
    )
    max_batch_size: Count | Auto = Field("auto", description="cache slots: requests that run at the same time")
    num_spare_slots: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto",
        description="cache slots beyond max_batch_size, which keep earlier prompts while every other slot is taken;"
        " auto: one for preempt_after, else none",
    )
    max_seq_len: Count | Auto = Field("auto", description="tokens a slot holds: prompt and answer together")
    max_num_batched_tokens: Count | Auto = Field("auto", description="token budget of one step")
    max_steps_per_launch: Count | Auto = Field("auto", description="decode steps between two looks of the host")
    max_queue_size: int = Field(1024, ge=0, description="requests that may wait for a slot; more are refused")
    queue_timeout: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="seconds that a request may wait for a slot; unset: for ever"
    )
    priority_ageing: float = Field(
        30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds in which nobody of a priority got a slot that make up for one level of priority",
    )
    preempt_after: Count | None = Field(
        None,
        description="tokens that a request may generate before one of higher priority may take its slot, each time;"
        " unset: nobody loses a slot",
    )
    enable_prefix_caching: bool = Field(
        True, description="reuse the keys and values of earlier prompts that begin with the same tokens"
    )
    memory_fraction: float = Field(
        0.8,
        gt=0.0,
        le=1.0,
        description="share that the cache may take of the memory that is free beside the weights (on a GPU: beside the"
        " weights and what the largest step needs; CUDA graphs live in the rest)",
    )
    num_threads: Count | Auto = Field(
        "auto", description="CPU threads for the model; auto: physical cores, or OMP_NUM_THREADS"
    )
    seed: int = Field(0, ge=0, description="seeds the sampling of requests that name no seed of their own")
    batch_invariant: bool = Field(
        False,
        description="same logits, bit for bit, whatever else is in the batch; only on a CPU, where the cpu backend"
        " does so anyway and the torch backend becomes slower",
    )
    step_timeout: float = Field(
        120.0, gt=0.0, description="seconds that a step may take before the engine counts as dead"
    )


class ResolvedConfig(EngineConfig):
    """An `EngineConfig` with every "auto" decided."""

    dtype: DType
    attention_backend: AttentionBackend
    max_batch_size: int
    num_spare_slots: int = 0
    max_seq_len: int
    max_num_batched_tokens: int
    max_steps_per_launch: int

    @property
    def num_slots(self) -> int:
        """Of the cache: those of running requests, and spare ones."""
        return self.max_batch_size + self.num_spare_slots

    @property
    def slot_len(self) -> int:
        """Tokens that a slot has memory for: `max_seq_len`, rounded up to what the attention backend needs."""
        return _slot_len(self.max_seq_len, self.attention_backend)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve` needs to know of a checkpoint."""

    dtype: DType
    max_position_embeddings: int
    num_parameters: int
    head_dim: int
    kv_elements_per_token: int  # keys and values, all layers


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What `resolve` needs to know of the machine. `device` is concrete: "cpu" or "cuda:0"."""

    device: str
    fast_dtypes: frozenset[DType]  # formats that the device multiplies natively
    free_bytes: int
    flash_attn_obstacle: str | None = None  # why flash-attn cannot be had here
    cpu_kernels_obstacle: str | None = None  # why the cpu backend cannot be had here
    are_cpu_kernels_fast: bool = True  # faster than torch's own

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


def resolve(config: EngineConfig, model: ModelFacts, machine: MachineFacts) -> ResolvedConfig:
    """Decides every "auto"; refuses with `ConfigurationError` what cannot work, and says what to change."""
    if config.batch_invariant and machine.is_gpu:
        raise ConfigurationError(f"batch_invariant works on a CPU only, and the device is {machine.device}")
    dtype = _resolve_dtype(config, model, machine)
    backend = _resolve_attention(config, model, machine, dtype)
    if config.quantization is not None and backend is not AttentionBackend.CPU:
        raise ConfigurationError(
            f"quantization {config.quantization} works with attention_backend cpu only, and here it is {backend}"
            + (f": {obstacle}" if (obstacle := find_cpu_obstacle(model, machine, dtype)) else "")
        )
    seq_len = _resolve_seq_len(config, model)
    num_spare = _or_default(config.num_spare_slots, 0 if config.preempt_after is None else 1)
    slots = _resolve_slots(config, model, machine, dtype, _slot_len(seq_len, backend), num_spare)
    default_steps = AUTO_STEPS_PER_LAUNCH_GPU if machine.is_gpu else AUTO_STEPS_PER_LAUNCH_CPU
    return ResolvedConfig(
        **config.model_dump(exclude=_RESOLVED_FIELDS),
        device=machine.device,
        dtype=dtype,
        attention_backend=backend,
        max_batch_size=slots,
        num_spare_slots=num_spare,
        max_seq_len=seq_len,
        max_num_batched_tokens=_resolve_token_budget(config, machine, slots),
        max_steps_per_launch=_or_default(config.max_steps_per_launch, default_steps),
    )


_RESOLVED_FIELDS = {
    "device",
    "dtype",
    "attention_backend",
    "max_batch_size",
    "num_spare_slots",
    "max_seq_len",
    "max_num_batched_tokens",
    "max_steps_per_launch",
}


def _slot_len(seq_len: int, backend: AttentionBackend) -> int:
    alignment = SLOT_ALIGNMENT[backend]
    return -(-seq_len // alignment) * alignment


def _or_default(value: int | Auto, default: int) -> int:
    return default if value == "auto" else value


def _resolve_dtype(config: EngineConfig, model: ModelFacts, machine: MachineFacts) -> DType:
    if config.dtype != "auto":
        return config.dtype
    return model.dtype if model.dtype in machine.fast_dtypes else DType.FLOAT32


def find_cpu_obstacle(model: ModelFacts, machine: MachineFacts, dtype: DType) -> str | None:
    """Why the cpu backend cannot run that model on that machine in that format; None if it can."""
    if machine.is_gpu:
        return f"it runs on a CPU, and the device is {machine.device}"
    if dtype not in (DType.FLOAT32, DType.BFLOAT16):
        return f"it computes in float32 or bfloat16, not {dtype}"
    if model.head_dim % CPU_HEAD_DIM_ALIGNMENT or model.head_dim > CPU_MAX_HEAD_DIM:
        return (
            f"it takes a head_dim up to {CPU_MAX_HEAD_DIM} that {CPU_HEAD_DIM_ALIGNMENT} divides, not {model.head_dim}"
        )
    return machine.cpu_kernels_obstacle


def find_flash_attn_obstacle(model: ModelFacts, machine: MachineFacts, dtype: DType) -> str | None:
    """Why the flash_attn backend cannot run that model on that machine in that format; None if it can."""
    if not machine.is_gpu:
        return f"it runs on a CUDA device, and the device is {machine.device}"
    if dtype is DType.FLOAT32:
        return f"it computes in bfloat16 or float16, not {dtype}"
    if model.head_dim % FLASH_HEAD_DIM_ALIGNMENT or model.head_dim > FLASH_MAX_HEAD_DIM:
        return (
            f"it takes a head_dim up to {FLASH_MAX_HEAD_DIM} that {FLASH_HEAD_DIM_ALIGNMENT} divides,"
            f" not {model.head_dim}"
        )
    return machine.flash_attn_obstacle


def _resolve_attention(
    config: EngineConfig, model: ModelFacts, machine: MachineFacts, dtype: DType
) -> AttentionBackend:
    obstacles = {
        AttentionBackend.CPU: find_cpu_obstacle(model, machine, dtype),
        AttentionBackend.FLASH_ATTN: find_flash_attn_obstacle(model, machine, dtype),
        AttentionBackend.TORCH: None,
    }
    if config.attention_backend == "auto":
        if obstacles[AttentionBackend.CPU] is None and machine.are_cpu_kernels_fast:
            return AttentionBackend.CPU
        has_flash_attn = obstacles[AttentionBackend.FLASH_ATTN] is None
        return AttentionBackend.FLASH_ATTN if has_flash_attn else AttentionBackend.TORCH
    if obstacle := obstacles[config.attention_backend]:
        raise ConfigurationError(
            f"attention_backend {config.attention_backend} cannot be had: {obstacle}; choose torch, or mend that"
        )
    return config.attention_backend


def _resolve_seq_len(config: EngineConfig, model: ModelFacts) -> int:
    if config.max_seq_len == "auto":
        return min(model.max_position_embeddings, MAX_AUTO_SEQ_LEN)
    if config.max_seq_len > model.max_position_embeddings:
        raise ConfigurationError(
            f"max_seq_len {config.max_seq_len} is more than the model's {model.max_position_embeddings} positions"
        )
    return config.max_seq_len


def _resolve_slots(
    config: EngineConfig, model: ModelFacts, machine: MachineFacts, dtype: DType, slot_len: int, num_spare: int
) -> int:
    """Slots that were asked for, if they fit; with "auto" as many as fit, up to the device's usual number."""
    weight_bytes = model.num_parameters * (1 if config.quantization is Quantization.INT8 else dtype.num_bytes)
    if weight_bytes >= machine.free_bytes:
        raise ConfigurationError(
            f"the weights do not fit: they need {_gib(weight_bytes)} as {dtype},"
            f" and {_gib(machine.free_bytes)} are free"
        )
    ceiling = MAX_AUTO_SLOTS_GPU if machine.is_gpu else MAX_AUTO_SLOTS_CPU
    if config.max_num_batched_tokens != "auto":
        ceiling = min(ceiling, config.max_num_batched_tokens)  # a step must have a token for every slot
    return _fit_slots(
        num_slots=config.max_batch_size,
        num_spare=num_spare,
        ceiling=ceiling,
        slot_len=slot_len,
        slot_bytes=slot_len * model.kv_elements_per_token * dtype.num_bytes,
        free_bytes=machine.free_bytes - weight_bytes,
        memory_fraction=config.memory_fraction,
    )


def refit_slots(config: EngineConfig, resolved: ResolvedConfig, model: ModelFacts, free_bytes: int) -> ResolvedConfig:
    """The number of slots, decided anew once the weights are loaded and it is known what they left.

    `config` is what the caller asked for, `resolved` what came of it, `free_bytes` what is free beside the weights
    and what a step needs. `ConfigurationError` if the slots that were asked for, or a single one, do not fit.
    """
    num_slots = _fit_slots(
        num_slots=config.max_batch_size,
        num_spare=resolved.num_spare_slots,
        ceiling=resolved.max_batch_size,
        slot_len=resolved.slot_len,
        slot_bytes=resolved.slot_len * model.kv_elements_per_token * resolved.dtype.num_bytes,
        free_bytes=free_bytes,
        memory_fraction=config.memory_fraction,
    )
    return resolved.model_copy(update={"max_batch_size": num_slots})


def _fit_slots(
    *,
    num_slots: int | Auto,
    num_spare: int,
    ceiling: int,
    slot_len: int,
    slot_bytes: int,
    free_bytes: int,
    memory_fraction: float,
) -> int:
    """`num_slots`, or with "auto" as many as fit up to `ceiling`, beside the spare ones in the cache's share of
    `free_bytes`.
    """
    cache_bytes = int(max(0, free_bytes) * memory_fraction)
    num_fitting = cache_bytes // slot_bytes - num_spare
    wanted = _or_default(num_slots, max(1, min(num_fitting, ceiling)))
    if wanted > num_fitting:
        spare = f" and {num_spare} spare" if num_spare else ""
        raise ConfigurationError(
            f"there is no room for {wanted}{spare} {'slot' if wanted == 1 else 'slots'} of {slot_len} tokens: that is"
            f" {_gib((wanted + num_spare) * slot_bytes)}, and {_gib(cache_bytes)} may be used ({memory_fraction:.0%} of"
            f" the {_gib(free_bytes)} that are free beside the weights);"
            f" lower {'max_seq_len' if wanted == 1 else 'max_batch_size or max_seq_len'}"
        )
    return wanted


def _resolve_token_budget(config: EngineConfig, machine: MachineFacts, num_slots: int) -> int:
    default = AUTO_BATCHED_TOKENS_GPU if machine.is_gpu else AUTO_BATCHED_TOKENS_CPU
    budget = _or_default(config.max_num_batched_tokens, max(default, num_slots))
    if budget < num_slots:
        raise ConfigurationError(
            f"max_num_batched_tokens ({budget}) is below max_batch_size ({num_slots}): a step must have room for one"
            " token of every running request; raise the first or lower the second"
        )
    return budget


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
