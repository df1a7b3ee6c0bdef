"""Decides every "auto" of an `EngineConfig`, and refuses what cannot work before anything is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.cache.budget import CHUNK_TOKENS
from chairlift.cache.layout import StateLayout
from chairlift.cache.state_books import PROMPT_TAIL
from chairlift.config import MAX_DRAFT, AttentionBackend, Auto, DType, EngineConfig, Quantization, ResolvedConfig
from chairlift.engine.execution.weight_sizes import advise, describe_shortage, formats_for, weigh
from chairlift.errors import ConfigurationError, sized
from chairlift.models.attention.flash import PAGE_SIZE
from chairlift.models.config import ModelShape
from chairlift.models.stored import GroupedSize

MAX_AUTO_SEQ_LEN_GPU = 4096  # every slot takes memory for so many tokens there, so not a model's 128k
MAX_AUTO_SLOTS_CPU, MAX_AUTO_SLOTS_GPU = 32, 256
AUTO_STEPS_PER_LAUNCH_CPU, AUTO_STEPS_PER_LAUNCH_GPU = 1, 4  # on a CPU more gain 2 %, but delay requests and streams
AUTO_BATCHED_TOKENS_CPU, AUTO_BATCHED_TOKENS_GPU = 1024, 2048  # graphs have so many, and decode rows wait for them
AUTO_SNAPSHOTS_SHARE, MAX_AUTO_SNAPSHOTS = 4, 256  # of the cache's memory, one part in so many
_PAGED = AttentionBackend.TRITON, AttentionBackend.FLASH_ATTN  # flash-attn computes the prompts of both, if it is there
_NO_FLOAT8 = "quantization fp8 needs a GPU that multiplies bfloat16, and Triton; on a CPU choose int8 or int4"
_SLOT_STATES_SHARE = 2  # one part in so many of the rest, at most, goes to the states of slots


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Holds what `resolve` needs to know of the machine. `device` is concrete: "cpu" or "cuda:0"."""

    device: str
    fast_dtypes: frozenset[DType]  # formats that the device multiplies natively
    free_bytes: int
    has_elastic_memory: bool = False  # a cache allocates memory as it is written
    num_threads: int = 1
    cpu_drawback: str | None = None  # why torch is faster here than the cpu backend
    has_own_kernels: bool = False  # a GPU that runs kernels of ours: Triton is installed

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


FindObstacle = Callable[[AttentionBackend, ModelShape, DType, str, int], str | None]
"""Says why a backend cannot run a model in a format on a device, divided over some ranks; None if it can."""


class _Backend(NamedTuple):
    name: AttentionBackend
    fallback_reason: str | None = None


def resolve(
    config: EngineConfig,
    model: ModelShape,
    num_parameters: int,
    machine: MachineFacts,
    find_obstacle: FindObstacle,
    grouped: GroupedSize | None = None,
) -> ResolvedConfig:
    """A new configuration without "auto". `ConfigurationError` says what cannot work, and what to change.

    `grouped`: the size of the checkpoint's weights that are stored in quantized groups. The cpu backend, and kernels on
    a GPU, multiply these as they are, unless float32 is requested, whose precision they do not have.
    """
    _refuse_contradictions(config, machine, grouped)

    def choose_backend(dtype: DType) -> _Backend:
        return _resolve_backend(
            config, machine, lambda name: find_obstacle(name, model, dtype, machine.device, config.tensor_parallel_size)
        )

    dtype = config.dtype
    if dtype == "auto":
        dtype = _choose_dtype(model.dtype, machine, choose_backend, has_groups=grouped is not None)
    _refuse_wide_float8(config, dtype)
    backend = choose_backend(dtype)
    if config.speculation is not None:
        _check_speculation(config, machine, backend.name)
    has_own_kernels = machine.has_own_kernels and _takes_own_kernels(config)
    is_native = backend.name is AttentionBackend.CPU
    stored, has_experts = config.quantization or dtype, bool(model.num_experts)
    keeps_groups = config.dtype != DType.FLOAT32 if is_native else has_own_kernels and dtype is not DType.FLOAT32
    kept = grouped if keeps_groups else None
    weight_bytes = weigh(num_parameters, stored, kept, has_experts=has_experts, is_native=is_native)
    if weight_bytes >= machine.free_bytes:
        formats = [] if grouped is not None else formats_for(is_native=is_native, has_own_kernels=has_own_kernels)
        advice = advise(num_parameters, config.quantization, formats, has_experts=has_experts)
        raise ConfigurationError(f"{describe_shortage(weight_bytes, kept or stored, machine.free_bytes)}; {advice}")
    decided = {
        "device": machine.device,
        "dtype": dtype,
        "attention_backend": backend.name,
        "fallback_reason": backend.fallback_reason,
        "page_size": PAGE_SIZE if backend.name in _PAGED else 1,
        "num_threads": _or_default(config.num_threads, machine.num_threads),
        "max_seq_len": _resolve_seq_len(config, model, machine),
        "has_head": model.has_head,
        "has_own_kernels": has_own_kernels,
        "keeps_groups": keeps_groups,
        "is_cache_elastic": machine.has_elastic_memory,
        "kv_cache_memory_bytes": _or_default(config.kv_cache_memory_bytes, 1),  # "auto" is decided with the slots
        "state_snapshot_bytes": _or_default(config.state_snapshot_bytes, 0),  # likewise
        "max_tentative": 0 if model.state_layout is None else _most_tentative(config),
        "max_steps_per_launch": _or_default(
            config.max_steps_per_launch, AUTO_STEPS_PER_LAUNCH_GPU if machine.is_gpu else AUTO_STEPS_PER_LAUNCH_CPU
        ),
        **_resolve_batch(config, machine),
    }
    resolved = ResolvedConfig.model_validate({**config.model_dump(), **decided})
    resolved, free_bytes = _fit_tables(config, resolved, model, machine.free_bytes - weight_bytes)
    return fit_slots(config, resolved, model, free_bytes)


def _refuse_contradictions(config: EngineConfig, machine: MachineFacts, grouped: GroupedSize | None) -> None:
    if config.quantization is not None and grouped is not None:
        raise ConfigurationError("the checkpoint's weights are quantized already; leave quantization out")
    if config.quantization is Quantization.FP8 and not machine.has_own_kernels:
        raise ConfigurationError(_NO_FLOAT8)
    if config.prefix_cache_dir is not None and not config.enable_prefix_caching:
        raise ConfigurationError("prefix_cache_dir needs enable_prefix_caching; leave one of the two out")
    if config.batch_invariant and machine.is_gpu:
        raise ConfigurationError(f"batch_invariant works on a CPU only, and the device is {machine.device}")


def _takes_own_kernels(config: EngineConfig) -> bool:
    """Tells if products take kernels of ours: nobody has measured these with several ranks; float8 has no others."""
    return config.tensor_parallel_size == 1 or config.quantization is Quantization.FP8


def _fit_tables(
    config: EngineConfig, resolved: ResolvedConfig, model: ModelShape, free_bytes: int
) -> tuple[ResolvedConfig, int]:
    """`resolved` with sequences for whose rotary tables there is memory, and the bytes that these leave free.

    ConfigurationError if the length that `config` asks for is too long for that.
    """
    longest = resolved.max_seq_len
    if config.max_seq_len == "auto" and model.table_bytes:
        token_bytes = model.token_bytes(resolved.cache_dtype) + model.table_bytes
        longest = max(1, min(longest, int(free_bytes * resolved.memory_fraction) // token_bytes))
    resolved = resolved.model_copy(update={"max_seq_len": longest})
    num_bytes = resolved.slot_len * model.table_bytes
    if num_bytes >= free_bytes:
        raise ConfigurationError(
            f"there is no room for the rotary tables of {longest} positions: they take {sized(num_bytes)}, and"
            f" {sized(free_bytes)} are free beside the weights; lower max_seq_len"
        )
    return resolved, free_bytes - num_bytes


def resolve_divided(config: EngineConfig, obstacle: str | None, num_gpus: int) -> EngineConfig:
    """`config` with the first of several ranks' device. ConfigurationError for settings that do not work with ranks.

    `obstacle`: why the model cannot be divided like this.
    """
    size = config.tensor_parallel_size
    if config.quantization is not None and not config.quantization.is_for_gpu:
        raise ConfigurationError(
            f"quantization {config.quantization} works with tensor_parallel_size 1 only; leave one of the two out, or"
            " choose fp8 on GPUs"
        )
    if config.attention_backend is AttentionBackend.CPU:
        raise ConfigurationError("attention_backend cpu works with tensor_parallel_size 1 only; choose torch")
    if obstacle is not None:
        raise ConfigurationError(f"tensor_parallel_size {size} does not work with this model: {obstacle}")
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        if config.quantization is not None:
            raise ConfigurationError(_NO_FLOAT8)
        return config.model_copy(update={"device": "cpu"})
    if config.device not in ("auto", "cuda"):
        raise ConfigurationError(
            f"device {config.device} is a single one, and tensor_parallel_size is {size}; choose cpu or cuda"
        )
    if num_gpus < size:
        raise ConfigurationError(f"tensor_parallel_size {size} is more than the {num_gpus} CUDA devices here; lower it")
    return config.model_copy(update={"device": "cuda:0"})


def fit_slots(config: EngineConfig, resolved: ResolvedConfig, model: ModelShape, free_bytes: int) -> ResolvedConfig:
    """`resolved` with memory for the cache, and the slots that `config` asks for, or with "auto" as many as fit.

    `free_bytes`: free memory beside the weights and a step; the cache may take its share of that.
    `ConfigurationError` if the slots asked for, or a single one, do not fit.
    """
    given = config.kv_cache_memory_bytes
    if given != "auto" and given > free_bytes:
        raise ConfigurationError(
            f"kv_cache_memory_bytes is {sized(given)}, and {sized(free_bytes)} are free beside the weights; lower it"
        )
    states = model.state_layout
    if states is None and config.state_snapshot_bytes not in ("auto", 0):
        raise ConfigurationError("state_snapshot_bytes: no layer of this model has a recurrent state; leave it out")
    auto_origin = f"{resolved.memory_fraction:.0%} of the {sized(max(0, free_bytes))} that are free beside the weights"
    num_bytes = _or_default(given, int(max(0, free_bytes) * resolved.memory_fraction))
    num_snapshots = 0 if states is None else _count_snapshots(config, states, num_bytes)
    snapshot_bytes = 0 if states is None else num_snapshots * states.row_bytes
    memory = _Memory(
        num_bytes=num_bytes - snapshot_bytes,
        token_bytes=model.token_bytes(resolved.cache_dtype),
        slot_bytes=0 if states is None else states.slot_bytes(resolved.max_tentative),
        origin=auto_origin if given == "auto" else "kv_cache_memory_bytes",
    )
    fit = _fit_elastic_slots if resolved.is_cache_elastic else _fit_full_slots
    decided = {"kv_cache_memory_bytes": num_bytes, **fit(config, resolved, memory)}
    if states is not None:
        decided |= {"state_snapshot_bytes": snapshot_bytes, "num_snapshots": num_snapshots}
    return resolved.model_copy(update=decided)


def _most_tentative(config: EngineConfig) -> int:
    """The most tokens of a row that may be taken back: a prompt's end, or a guess and the token before it."""
    num_guessed = 0 if config.speculation is None else _or_default(config.num_speculative_tokens, MAX_DRAFT)
    return max(PROMPT_TAIL, 1 + num_guessed)


def _count_snapshots(config: EngineConfig, states: StateLayout, num_bytes: int) -> int:
    """The number of recurrent states to keep beside those of slots, in a cache of `num_bytes`."""
    if not config.enable_prefix_caching:
        return 0
    given = config.state_snapshot_bytes
    if given == "auto":
        return min(num_bytes // AUTO_SNAPSHOTS_SHARE // states.row_bytes, MAX_AUTO_SNAPSHOTS)
    if given >= num_bytes:
        raise ConfigurationError(
            f"state_snapshot_bytes is {sized(given)}, and the cache may take {sized(num_bytes)}; lower it"
        )
    return given // states.row_bytes


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory that the slots may take."""

    num_bytes: int
    token_bytes: int
    slot_bytes: int  # of each slot, however many tokens it holds
    origin: str  # of the number, for messages

    def num_tokens(self, num_slots: int) -> int:
        """In whole chunks, beside what so many slots take in any case."""
        return max(0, self.num_bytes - num_slots * self.slot_bytes) // self.token_bytes // CHUNK_TOKENS * CHUNK_TOKENS

    def refusal(self, what: str, num_slots: int, num_tokens: int, advice: str) -> ConfigurationError:
        """The error that there is no memory for `what`: so many slots, and tokens in all of them together."""
        wanted = num_slots * self.slot_bytes + num_tokens * self.token_bytes
        return ConfigurationError(
            f"there is no room for {what}: that is {sized(wanted)}, and {sized(self.num_bytes)}"
            f" may be used ({self.origin}); {advice}"
        )


def _fit_full_slots(config: EngineConfig, resolved: ResolvedConfig, memory: _Memory) -> dict[str, int]:
    """Every slot has memory for its longest sequence."""
    num_spare = resolved.num_slots - resolved.max_batch_size
    num_fitting = memory.num_bytes // (resolved.slot_len * memory.token_bytes + memory.slot_bytes) - num_spare
    wanted = _or_default(config.max_batch_size, max(1, min(num_fitting, resolved.max_batch_size)))
    if wanted > num_fitting:
        spare = f" and {num_spare} spare" if num_spare else ""
        raise memory.refusal(
            f"{wanted}{spare} {'slot' if wanted == 1 else 'slots'} of {resolved.slot_len} tokens",
            wanted + num_spare,
            (wanted + num_spare) * resolved.slot_len,
            f"lower {'max_seq_len' if wanted == 1 else 'max_batch_size or max_seq_len'}",
        )
    return {"max_batch_size": wanted, "cache_tokens": (wanted + num_spare) * resolved.slot_len}


def _fit_elastic_slots(config: EngineConfig, resolved: ResolvedConfig, memory: _Memory) -> dict[str, int]:
    """One sequence may take all memory, but every slot can have a chunk of it."""
    num_spare = resolved.num_slots - resolved.max_batch_size
    most = resolved.max_batch_size
    if memory.slot_bytes:
        most = max(1, min(most, memory.num_bytes // _SLOT_STATES_SHARE // memory.slot_bytes - num_spare))
    num_asked = _or_default(config.max_batch_size, most) + num_spare
    num_tokens = memory.num_tokens(num_asked)
    longest = resolved.max_seq_len if config.max_seq_len != "auto" else min(resolved.max_seq_len, num_tokens)
    if longest > num_tokens or not num_tokens:
        what, advice = f"a sequence of {max(longest, 1)} tokens", "lower max_seq_len"
        if memory.slot_bytes:
            what, advice = f"{what} beside the states of {num_asked} slots", f"{advice} or max_batch_size"
        raise memory.refusal(what, num_asked, max(longest, CHUNK_TOKENS), advice)
    num_fitting = max(1, num_tokens // CHUNK_TOKENS - num_spare)
    wanted = _or_default(config.max_batch_size, min(num_fitting, most))
    if wanted > num_fitting:
        raise memory.refusal(
            f"{wanted} slots of at least {CHUNK_TOKENS} tokens",
            wanted + num_spare,
            (wanted + num_spare) * CHUNK_TOKENS,
            "lower max_batch_size or raise kv_cache_memory_bytes",
        )
    return {"max_batch_size": wanted, "max_seq_len": longest, "cache_tokens": num_tokens}


def _choose_dtype(
    stored: DType, machine: MachineFacts, choose_backend: Callable[[DType], _Backend], *, has_groups: bool
) -> DType:
    """The checkpoint's format, or float32 if that format is slow.

    On a CPU, bfloat16 replaces float16, which native code does not support: otherwise torch would run such a checkpoint
    on processors that multiply float16, without products of quantized groups.
    """
    is_halved = stored is DType.FLOAT16 and not machine.is_gpu and (has_groups or stored in machine.fast_dtypes)
    if is_halved and machine.cpu_drawback is None and choose_backend(DType.BFLOAT16).name is AttentionBackend.CPU:
        return DType.BFLOAT16
    return stored if _is_fast(stored, machine, choose_backend) else DType.FLOAT32


def _is_fast(dtype: DType, machine: MachineFacts, choose_backend: Callable[[DType], _Backend]) -> bool:
    """bfloat16 also if the cpu backend widens it in registers, because that reads half the bytes of float32."""
    if dtype in machine.fast_dtypes:
        return True
    return (
        dtype is DType.BFLOAT16 and machine.cpu_drawback is None and choose_backend(dtype).name is AttentionBackend.CPU
    )


def _resolve_backend(
    config: EngineConfig, machine: MachineFacts, find_obstacle: Callable[[AttentionBackend], str | None]
) -> _Backend:
    wanted, has_integers = config.attention_backend, config.quantization in (Quantization.INT8, Quantization.INT4)
    if wanted == "auto" and not has_integers:
        return _best_backend(machine, find_obstacle)
    if has_integers and wanted not in ("auto", AttentionBackend.CPU):
        raise ConfigurationError(f"quantization needs attention_backend cpu, not {wanted}")
    backend = AttentionBackend.CPU if wanted == "auto" else wanted
    if obstacle := find_obstacle(backend):
        if has_integers:
            raise ConfigurationError(f"quantization needs attention_backend cpu, which does not work here: {obstacle}")
        raise ConfigurationError(
            f"attention_backend {backend} does not work here: {obstacle}; choose torch, or remove the obstacle"
        )
    return _Backend(backend)


def _best_backend(machine: MachineFacts, find_obstacle: Callable[[AttentionBackend], str | None]) -> _Backend:
    if machine.is_gpu:
        able = (name for name in _PAGED if find_obstacle(name) is None)
        return _Backend(next(able, AttentionBackend.TORCH))
    obstacle = machine.cpu_drawback or find_obstacle(AttentionBackend.CPU)
    return _Backend(AttentionBackend.CPU if obstacle is None else AttentionBackend.TORCH, obstacle)


def _check_speculation(config: EngineConfig, machine: MachineFacts, backend: AttentionBackend) -> None:
    """Speculation leaves tokens unchanged only if their logits do not depend on what else is computed."""
    if machine.is_gpu:
        raise ConfigurationError(f"speculation works on a CPU only, and the device is {machine.device}; leave it out")
    if backend is not AttentionBackend.CPU and not config.batch_invariant:
        raise ConfigurationError(
            f"speculation would change what is generated with attention_backend {backend}; leave it out, choose cpu, or"
            " set batch_invariant"
        )


def _refuse_wide_float8(config: EngineConfig, dtype: DType) -> None:
    if config.quantization is Quantization.FP8 and dtype is DType.FLOAT32:
        raise ConfigurationError("quantization fp8 needs dtype bfloat16 or float16, not float32")


def _resolve_seq_len(config: EngineConfig, model: ModelShape, machine: MachineFacts) -> int:
    if config.max_seq_len == "auto":
        most = model.unscaled_positions
        return most if machine.has_elastic_memory else min(most, MAX_AUTO_SEQ_LEN_GPU)
    if config.max_seq_len > model.max_position_embeddings:
        raise ConfigurationError(
            f"max_seq_len {config.max_seq_len} is more than the model's {model.max_position_embeddings} positions"
        )
    return config.max_seq_len


def _resolve_batch(config: EngineConfig, machine: MachineFacts) -> dict[str, int]:
    """The token budget and the most slots: a step must have room for one token of each slot."""
    auto_slots = MAX_AUTO_SLOTS_GPU if machine.is_gpu else MAX_AUTO_SLOTS_CPU
    num_slots = _or_default(
        config.max_batch_size, min(auto_slots, _or_default(config.max_num_batched_tokens, auto_slots))
    )
    auto_budget = AUTO_BATCHED_TOKENS_GPU if machine.is_gpu else AUTO_BATCHED_TOKENS_CPU
    budget = _or_default(config.max_num_batched_tokens, max(auto_budget, num_slots))
    if budget < num_slots:
        raise ConfigurationError(
            f"max_num_batched_tokens ({budget}) is below max_batch_size ({num_slots}): a step must have room for one"
            " token of every running request; raise the first or lower the second"
        )
    return {"max_batch_size": num_slots, "max_num_batched_tokens": budget}


def _or_default(value: int | Auto, default: int) -> int:
    return default if value == "auto" else value
