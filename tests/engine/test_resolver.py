"""Tests what "auto" becomes on which machine, and what is refused in what words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from chairlift.cache.layout import StateParams
from chairlift.config import AttentionBackend, DType, EngineConfig, LoadFormat, Quantization, ResolvedConfig
from chairlift.engine.execution.resolver import MachineFacts, fit_slots, resolve, resolve_divided
from chairlift.errors import ConfigurationError
from chairlift.models.blocks import AttentionBlock, DenseMLPBlock
from chairlift.models.config import ModelShape
from chairlift.models.stored import GroupedSize
from tests.models.cpu.support import BASE
from tests.support.shapes import Positions, mlp_of, positions_of, varied

GIB = 2**30
F16, BF16, F32 = DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32

# In bfloat16 0.5 GiB of weights, and 64 KiB of cache per token.
NUM_PARAMETERS = 2**28
MODEL = varied(BASE, [Positions(rope=None)] * 32, dtype=BF16, num_heads=8, num_kv_heads=8, head_dim=64)
CPU = MachineFacts("cpu", frozenset({F32, BF16}), free_bytes=64 * GIB, has_elastic_memory=True, num_threads=6)
SLOW = "this processor has no AVX2"
AVX2_CPU = replace(CPU, fast_dtypes=frozenset({F32}))  # it widens bfloat16 in registers
FLOAT16_CPU = replace(CPU, fast_dtypes=frozenset(DType))  # as with avx512_fp16
OLD_CPU = replace(AVX2_CPU, cpu_drawback=SLOW)
SMALL_CPU, SMALL_AVX2 = (replace(machine, free_bytes=2 * GIB) for machine in (CPU, AVX2_CPU))
TINY_CPU = replace(CPU, free_bytes=GIB)
GPU = MachineFacts("cuda:0", frozenset(DType), free_bytes=128 * GIB)
OWN_GPU = replace(GPU, has_own_kernels=True)

Obstacles = Mapping[AttentionBackend, str]
NO_OBSTACLES: Obstacles = {}
NO_COMPILER: Obstacles = {AttentionBackend.CPU: "there is no C++ compiler"}
NOT_IN_FLOAT16 = "not in float16"
NO_TRITON: Obstacles = {AttentionBackend.TRITON: "kernels cannot be compiled"}
NOT_INSTALLED: Obstacles = {**NO_TRITON, AttentionBackend.FLASH_ATTN: "the package is not installed"}
GROUPS = {"grouped": GroupedSize(num_parameters=3 * 2**26, num_bytes=GIB // 8)}  # of the 0.25 Gi above


def resolved(
    machine: MachineFacts = CPU,
    stored: DType = BF16,
    positions: int = 8192,
    obstacles: Obstacles = NO_OBSTACLES,
    grouped: GroupedSize | None = None,
    **config: Any,
) -> ResolvedConfig:
    """For a model whose weights are stored so and that reads so many positions."""
    shape = replace(MODEL, dtype=stored, max_position_embeddings=positions)

    def find_obstacle(
        backend: AttentionBackend, model: ModelShape, dtype: DType, device: str, num_ranks: int
    ) -> str | None:
        assert (model, device, num_ranks) == (shape, machine.device, config.get("tensor_parallel_size", 1))
        if backend is AttentionBackend.FLASH_ATTN and dtype is F32:
            return "not in float32"
        if backend is AttentionBackend.CPU and dtype is F16:
            return NOT_IN_FLOAT16
        return obstacles.get(backend)

    return resolve(EngineConfig(**config), shape, NUM_PARAMETERS, machine, find_obstacle, grouped)


KERNELS_GPU = replace(GPU, has_own_kernels=True)
TWO_RANKS = {"tensor_parallel_size": 2}


def room_for(num_slots: int, short_by: int = 0) -> MachineFacts:
    """The GPU with memory for the weights and, in the cache's share, so many slots of 4096 tokens."""
    return replace(GPU, free_bytes=GIB // 2 + num_slots * 4096 * 2**16 * 5 // 4 - short_by)


def cache(num_gib: float, share: float = 1.0) -> dict[str, int]:
    """The setting of its memory."""
    return {"kv_cache_memory_bytes": int(num_gib * GIB * share)}


ON_CPU, IN_TORCH, ON_GPU, BY_FLASH = ({"attention_backend": name} for name in ("cpu", "torch", "triton", "flash_attn"))
BY_TORCH = {"dtype": "float16", **IN_TORCH, "keeps_groups": False}
BY_GROUPS = {"dtype": "bfloat16", **ON_CPU, "keeps_groups": True}
CASES: dict[str, tuple[MachineFacts, dict[str, Any], dict[str, Any]]] = {
    "a cpu": (
        *(CPU, {}),
        {"device": "cpu", "dtype": "bfloat16", **ON_CPU, "fallback_reason": None, "max_batch_size": 32}
        | {"max_seq_len": 8192, "max_num_batched_tokens": 1024, "max_steps_per_launch": 1, "num_threads": 6}
        | {"num_slots": 32, "is_cache_elastic": True},
    ),
    "a gpu": (
        *(GPU, {}),
        {"device": "cuda:0", "dtype": "bfloat16", **ON_GPU, "fallback_reason": None, "max_batch_size": 256}
        | {"max_seq_len": 4096, "max_num_batched_tokens": 2048, "max_steps_per_launch": 4},
    ),
    "the second gpu": (replace(GPU, device="cuda:1"), {"device": "cuda"}, {"device": "cuda:1"}),
    "float8 on a gpu": (KERNELS_GPU, {"quantization": "fp8"}, {"dtype": "bfloat16", **ON_GPU, "keeps_groups": True}),
    "float8 over ranks": (KERNELS_GPU, {"quantization": "fp8", **TWO_RANKS}, {"has_own_kernels": True}),
    "plain numbers over ranks": (KERNELS_GPU, TWO_RANKS, {"has_own_kernels": False}),
    # The number format is the checkpoint's where the machine multiplies it, or where the kernels widen it.
    "float16 on a cpu": (CPU, {"stored": F16}, {"dtype": "float32"}),
    # Native code does not compute in float16.
    "float16 on a cpu that multiplies it": (FLOAT16_CPU, {"stored": F16}, {"dtype": "bfloat16", **ON_CPU}),
    "float16 on such a cpu in torch": (FLOAT16_CPU, {"stored": F16, **IN_TORCH}, {"dtype": "float16"}),
    "float16 on such a cpu, no compiler": (FLOAT16_CPU, {"stored": F16, "obstacles": NO_COMPILER}, {"dtype": F16}),
    "float16 asked for": (FLOAT16_CPU, {"dtype": F16}, {"dtype": "float16", "fallback_reason": NOT_IN_FLOAT16}),
    "float32 on a cpu": (CPU, {"stored": F32}, {"dtype": "float32"}),
    "float16 on a gpu": (GPU, {"stored": F16}, {"dtype": "float16"}),
    "bfloat16 with AVX2": (AVX2_CPU, {}, {"dtype": "bfloat16"}),
    "bfloat16 with AVX2 and no compiler": (AVX2_CPU, {"obstacles": NO_COMPILER}, {"dtype": "float32"}),
    "bfloat16 with AVX2 in torch": (AVX2_CPU, IN_TORCH, {"dtype": "float32"}),
    "bfloat16 without AVX2": (OLD_CPU, {}, {"dtype": "float32"}),
    # The best backend without an obstacle is chosen; why a CPU has to do with torch is said.
    "float32 on a gpu": (GPU, {"dtype": F32}, ON_GPU),
    "no triton": (GPU, {"obstacles": NO_TRITON}, {**BY_FLASH, "fallback_reason": None}),
    "no triton, float32": (GPU, {"obstacles": NO_TRITON, "dtype": F32}, IN_TORCH),
    "flash_attn asked for": (GPU, BY_FLASH, BY_FLASH),
    "neither triton nor flash_attn": (GPU, {"obstacles": NOT_INSTALLED}, {**IN_TORCH, "fallback_reason": None}),
    "no compiler": (CPU, {"obstacles": NO_COMPILER}, {**IN_TORCH, "fallback_reason": "there is no C++ compiler"}),
    "no AVX2": (OLD_CPU, {}, {**IN_TORCH, "fallback_reason": SLOW}),
    "no AVX2 but asked for": (OLD_CPU, ON_CPU, ON_CPU),
    "no AVX2 but quantized": (OLD_CPU, {"quantization": "int8"}, ON_CPU),
    "no AVX2 and invariant": (OLD_CPU, {"batch_invariant": True}, IN_TORCH),
    "torch": (CPU, IN_TORCH, {**IN_TORCH, "fallback_reason": None}),
    # Where every slot takes all its memory it holds what the model can read up to a usual length.
    "a short model": (GPU, {"positions": 2048}, {"max_seq_len": 2048}),
    "a long model": (GPU, {"positions": 131_072}, {"max_seq_len": 4096}),
    "slots of pages": (GPU, {"max_seq_len": 300}, {"max_seq_len": 300, "slot_len": 512}),
    "slots in torch": (GPU, {"max_seq_len": 300, **IN_TORCH}, {"slot_len": 300}),
    # Where memory comes as it is used a sequence may be as long as the model can read, if all memory allows it.
    "a long model on a cpu": (
        *(CPU, {"positions": 131_072}),
        {"max_batch_size": 32, "max_seq_len": 131_072, **cache(63.5, 0.8)}
        | {"cache_tokens": 832_256 // 64 * 64, "is_cache_elastic": True},  # of 64 KiB each
    ),
    "a long model in a small cache": (
        *(CPU, {"positions": 131_072, "kv_cache_memory_bytes": GIB + 2**20}),
        {"max_seq_len": 16_384, "cache_tokens": 16_384, "max_batch_size": 32},
    ),
    "a chunk of 4 MiB for each": (CPU, {"kv_cache_memory_bytes": 10 * 2**22}, {"max_batch_size": 10}),
    "chunks beside a spare slot": (CPU, {**cache(1, 10 / 256), "preempt_after": 5}, {"max_batch_size": 9}),
    "all positions": (CPU, {"max_seq_len": 8192}, {"max_seq_len": 8192}),
    # Slots and the token budget bound each other.
    "many slots": (CPU, {"max_batch_size": 1500, "max_seq_len": 64}, {"max_num_batched_tokens": 1500}),
    "a small budget": (CPU, {"max_num_batched_tokens": 16}, {"max_batch_size": 16}),
    "a budget for all": (CPU, {"max_batch_size": 8, "max_num_batched_tokens": 8}, {"max_batch_size": 8}),
    "slots that just fit": (room_for(40), {"max_batch_size": 40}, {"max_batch_size": 40}),
    "a chunk for each": (CPU, {**cache(1), "max_batch_size": 256, "max_seq_len": 64}, {"max_batch_size": 256}),
    # A spare slot is there for requests that lose theirs, and takes room beside the others.
    "a spare slot": (room_for(10), {"preempt_after": 5}, {"max_batch_size": 9, "num_slots": 10}),
    "no spare slot": (CPU, {"max_batch_size": 3}, {"num_slots": 3}),
    # As many slots as fit beside the weights, up to a usual number.
    "one slot": (room_for(1), {}, {"max_batch_size": 1}),
    "7 slots": (room_for(7), {}, {"max_batch_size": 7}),
    "almost 7 slots": (room_for(7, short_by=2), {}, {"max_batch_size": 6}),
    "256 slots": (room_for(256), {}, {"max_batch_size": 256}),
    "257 slots": (room_for(257), {}, {"max_batch_size": 256}),
    # 1.875 GiB free: in bfloat16 6 slots beside 0.5 GiB of weights, in float32 2 slots of twice the size beside 1 GiB
    "narrow numbers": (room_for(6), {}, {"max_batch_size": 6}),
    "wide numbers": (room_for(6), {"dtype": F32}, {"max_batch_size": 2}),
    # 1 GiB free, 0.25 Gi weights: 0.5 GiB in bfloat16, 0.27 in int8 (8.5 bits each), 0.2 in int4 (6.25 bits)
    "not quantized": (TINY_CPU, {"max_seq_len": 64}, {"cache_tokens": 6528}),
    "int8": (TINY_CPU, {"max_seq_len": 64, "quantization": "int8"}, {"cache_tokens": 9600}),
    "int4": (TINY_CPU, {"max_seq_len": 64, "quantization": "int4"}, {"cache_tokens": 10496}),
    # The cache takes its share of what is free beside the weights.
    "its share": (SMALL_CPU, {}, cache(1.5, 0.8)),
    "half of it": (SMALL_CPU, {"memory_fraction": 0.5}, cache(1.5, 0.5)),
    "memory that is given": (SMALL_CPU, {"memory_fraction": 0.5, **cache(1)}, cache(1)),
    # Beside groups float16 becomes bfloat16 unless it is asked for.
    "float16 and groups": (CPU, {"stored": F16, **GROUPS}, BY_GROUPS),
    "float16 and groups, fp16": (FLOAT16_CPU, {"stored": F16, **GROUPS}, BY_GROUPS),
    "float16 and groups, AVX2": (AVX2_CPU, {"stored": F16, **GROUPS}, BY_GROUPS),
    "float16 asked for and groups": (CPU, {"stored": F16, "dtype": F16, **GROUPS}, BY_TORCH),
    "float16 asked for and groups, fp16": (FLOAT16_CPU, {"stored": F16, "dtype": F16, **GROUPS}, BY_TORCH),
    "float16 asked for and groups, AVX2": (AVX2_CPU, {"stored": F16, "dtype": F16, **GROUPS}, BY_TORCH),
    "float16 and groups on a gpu": (GPU, {"stored": F16, **GROUPS}, {"dtype": "float16"}),
    # Weights that are stored in groups are kept by the cpu backend unless float32 is asked for.
    # On a GPU kernels read them in any format but float32, and some become numbers in a workspace.
    "groups on a gpu": (OWN_GPU, GROUPS, {"keeps_groups": True, "dtype": "bfloat16"}),
    "groups on a gpu in float32": (OWN_GPU, {**GROUPS, "dtype": F32}, {"keeps_groups": False}),
    "groups on a gpu without kernels": (GPU, GROUPS, {"keeps_groups": False, "has_own_kernels": False}),
    "groups": (SMALL_CPU, GROUPS, {"keeps_groups": True, **cache(1.75, 0.8)}),
    "groups in torch": (SMALL_CPU, {**GROUPS, **IN_TORCH}, {"keeps_groups": False, **cache(1.5, 0.8)}),
    "groups in float32": (SMALL_CPU, {**GROUPS, "dtype": F32}, {"keeps_groups": False, **cache(1, 0.8)}),
    "groups without bfloat16": (SMALL_AVX2, GROUPS, {"keeps_groups": True}),
}


@pytest.mark.parametrize(("machine", "asked", "expected"), CASES.values(), ids=CASES.keys())
def test_what_is_not_given_becomes_what_suits_machine_and_model(
    machine: MachineFacts, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = resolved(machine, **asked)
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_is_given_is_kept() -> None:
    given: dict[str, Any] = (
        {"model": "some/model", "tokenizer": "some/tokenizer", "chat_template": "template.jinja"}
        | {"load_format": LoadFormat.DUMMY, "dtype": F32, "attention_backend": AttentionBackend.CPU}
        | {"quantization": Quantization.INT8, "max_batch_size": 3, "max_seq_len": 100, "max_num_batched_tokens": 7}
        | {"max_steps_per_launch": 9, "max_queue_size": 5, "kv_cache_memory_bytes": 3 * GIB, "num_threads": 2}
        | {"seed": 11}
    )
    config = resolved(**given)
    assert {name: getattr(config, name) for name in given} == given


def test_resolving_changes_nothing_that_was_put_in() -> None:
    config = EngineConfig()
    resolve(config, MODEL, NUM_PARAMETERS, CPU, lambda *_: None)
    assert config == EngineConfig()
    assert config.max_batch_size == "auto"


def no_room(what: str, needed: str, left: str, beside: str, advice: str) -> str:
    """`beside`: what is free beside the weights; without it, the number is the one that was given."""
    origin = f"80% of the {beside} that are free beside the weights" if beside else "kv_cache_memory_bytes"
    return f"there is no room for {what}: that is {needed}, and {left} may be used ({origin}); lower {advice}"


FORTY = "40 slots of 4096 tokens"
BY_SLOTS, BY_MORE = "max_batch_size or max_seq_len", "max_batch_size or raise kv_cache_memory_bytes"
SEVEN_FOR_EIGHT = (
    "max_num_batched_tokens (7) is below max_batch_size (8): a step must have room for one token of every running"
    " request; raise the first or lower the second"
)
SMALLER = "choose a smaller model, or one that is quantized"
UNFIT = f"the weights do not fit: they need 512.00 MiB as bfloat16, and 256.00 MiB are free; {SMALLER}"
OVER = "kv_cache_memory_bytes is 70.00 GiB, and 63.50 GiB are free beside the weights; lower it"
QUANTIZED = "the checkpoint's weights are quantized already; leave quantization out"
NO_CPU = "quantization needs attention_backend cpu, which does not work here: no compiler"
NO_FLOAT8 = "quantization fp8 needs a GPU that multiplies bfloat16, and Triton; on a CPU choose int8 or int4"
REFUSALS: list[tuple[MachineFacts, dict[str, Any], str]] = [
    (CPU, BY_FLASH, "attention_backend flash_attn does not work here: not there; choose torch, or remove the obstacle"),
    (CPU, ON_CPU, "attention_backend cpu does not work here: no compiler; choose torch, or remove the obstacle"),
    (CPU, {"quantization": "int8"}, NO_CPU),
    (CPU, {"quantization": "int8", **IN_TORCH}, "quantization needs attention_backend cpu, not torch"),
    (CPU, {"quantization": "int8", **GROUPS}, QUANTIZED),
    (CPU, {"quantization": "fp8"}, NO_FLOAT8),
    (GPU, {"quantization": "fp8"}, NO_FLOAT8),
    (
        KERNELS_GPU,
        {"quantization": "fp8", "dtype": F32},
        "quantization fp8 needs dtype bfloat16 or float16, not float32",
    ),
    (GPU, {"batch_invariant": True}, "batch_invariant works on a CPU only, and the device is cuda:0"),
    (CPU, {"max_seq_len": 8193}, "max_seq_len 8193 is more than the model's 8192 positions"),
    (CPU, {"max_batch_size": 8, "max_num_batched_tokens": 7}, SEVEN_FOR_EIGHT),
    (replace(CPU, free_bytes=GIB // 4), {"dtype": "bfloat16"}, UNFIT),
    (CPU, cache(70), OVER),
    (
        *(CPU, {**cache(1), "max_batch_size": 257, "max_seq_len": 64}),
        no_room("257 slots of at least 64 tokens", "1.00 GiB", "1.00 GiB", "", BY_MORE),
    ),
    (
        *(CPU, {**cache(1), "positions": 131_072, "max_seq_len": 20_000}),
        no_room("a sequence of 20000 tokens", "1.22 GiB", "1.00 GiB", "", "max_seq_len"),
    ),
    (
        room_for(39),
        {"max_batch_size": 40},
        no_room(FORTY, "10.00 GiB", "9.75 GiB", "12.19 GiB", BY_SLOTS),
    ),
    (
        *(room_for(10), {"max_batch_size": 10, "preempt_after": 5}),
        no_room("10 and 1 spare slots of 4096 tokens", "2.75 GiB", "2.50 GiB", "3.12 GiB", BY_SLOTS),
    ),
    (
        room_for(1, short_by=2),
        {},
        no_room("1 slot of 4096 tokens", "256.00 MiB", "256.00 MiB", "320.00 MiB", "max_seq_len"),
    ),
]


@pytest.mark.parametrize(("machine", "asked", "said"), REFUSALS)
def test_what_cannot_work_is_refused_with_the_reason_and_what_to_change(
    machine: MachineFacts, asked: dict[str, Any], said: str
) -> None:
    obstacles = {AttentionBackend.CPU: "no compiler", AttentionBackend.FLASH_ATTN: "not there"}
    with pytest.raises(ConfigurationError) as caught:
        resolved(machine, obstacles=obstacles, **asked)
    assert str(caught.value) == said


# What the weights left


def refitted(free_bytes: int, **config: Any) -> ResolvedConfig:
    """On a GPU, in slots of 4096 tokens and 256 MiB, when so much is free beside weights and activations."""
    return fit_slots(EngineConfig(**config), resolved(GPU, **config), MODEL, free_bytes)


@pytest.mark.parametrize(
    ("free_bytes", "config", "num_slots"),
    [(10 * GIB - 1, {}, 31), (500 * GIB, {}, 256), (500 * GIB, {"max_num_batched_tokens": 16}, 16)],
)
def test_as_many_slots_as_fit_into_what_the_weights_left(
    free_bytes: int, config: dict[str, Any], num_slots: int
) -> None:
    assert refitted(free_bytes, **config).max_batch_size == num_slots  # the default share is 0.8


def test_a_token_takes_what_each_layer_keeps_of_it() -> None:
    attention, mlp = MODEL.layers[0]
    assert isinstance(attention, AttentionBlock)
    # 16 layers like the model's, 8 with a quarter of that, 8 with nothing: 18 instead of 32.
    layers = ((attention, mlp),) * 16 + ((replace(attention, num_kv_heads=4, head_dim=32), mlp),) * 8 + ((mlp,),) * 8
    for shape, num_slots in ((MODEL, 18), (replace(MODEL, layers=layers), 32)):
        fitted = fit_slots(EngineConfig(kv_cache_memory_bytes=18 * 2**28), resolved(GPU), shape, 8 * GIB)
        assert fitted.max_batch_size == num_slots


def test_nothing_but_the_number_of_slots_changes() -> None:
    changes = {"max_batch_size": 32, "cache_tokens": 32 * 4096, "kv_cache_memory_bytes": 8 * GIB}
    assert refitted(10 * GIB) == resolved(GPU).model_copy(update=changes)


# Recurrent states


@dataclass(frozen=True, slots=True)
class Recurrent(DenseMLPBlock):
    """A block with a state of 256 KiB, and inputs of 16 KiB for each token."""

    def state(self) -> StateParams | None:  # type: ignore[override]
        return StateParams(2**16, 2**12)


# 16 layers with keys and values of 2 KiB a token, 16 with a state: a slot's states take 4 MiB, and those of 8 tokens 2.
MLP = mlp_of(MODEL)
RECURRENT = Recurrent(**{each.name: getattr(MLP, each.name) for each in fields(MLP)})
HYBRID = replace(MODEL, layers=MODEL.layers[:16] + ((RECURRENT,),) * 16)
MIB = 2**20


def with_states(machine: MachineFacts, mib: int, **config: Any) -> ResolvedConfig:
    """In a cache of so much memory."""
    asked = EngineConfig(kv_cache_memory_bytes=mib * MIB, **config)
    return resolve(asked, HYBRID, NUM_PARAMETERS, machine, lambda *_: None)


def test_a_quarter_of_the_cache_is_for_snapshots_and_at_most_half_of_the_rest_for_the_states_of_slots() -> None:
    ready = with_states(CPU, 1024)
    assert (ready.max_tentative, ready.num_snapshots, ready.state_snapshot_bytes) == (8, 64, 256 * MIB)
    assert (ready.max_batch_size, ready.cache_tokens) == (32, (768 - 32 * 6) * MIB // 2**15)
    small = with_states(CPU, 64)
    assert (small.num_snapshots, small.max_batch_size, small.cache_tokens) == (4, 4, 24 * MIB // 2**15)


def test_slots_that_are_allocated_at_once_take_their_states_beside_their_tokens() -> None:
    ready = with_states(GPU, 1024, max_seq_len=256)  # of 8 MiB
    assert (ready.num_snapshots, ready.max_batch_size) == (64, 768 // 14)


@pytest.mark.parametrize(
    ("config", "num_snapshots", "num_bytes"),
    [
        ({"state_snapshot_bytes": "9MiB"}, 2, 8 * MIB),
        ({"state_snapshot_bytes": 0}, 0, 0),
        ({"state_snapshot_bytes": "9MiB", "enable_prefix_caching": False}, 0, 0),
        ({"max_batch_size": 8}, 256, 1024 * MIB),
    ],
)
def test_snapshots_take_what_is_asked_for_in_whole_states(
    config: dict[str, Any], num_snapshots: int, num_bytes: int
) -> None:
    ready = with_states(CPU, 8192, **config)
    assert (ready.num_snapshots, ready.state_snapshot_bytes) == (num_snapshots, num_bytes)


def test_a_guess_and_the_token_before_it_may_be_taken_back() -> None:
    guessing: dict[str, Any] = {"speculation": "ngram", "attention_backend": "cpu"}
    assert with_states(CPU, 1024, **guessing).max_tentative == 17
    assert with_states(CPU, 1024, **guessing, num_speculative_tokens=40).max_tentative == 41
    assert resolved(CPU, **guessing).max_tentative == 0


@pytest.mark.parametrize(
    ("mib", "config", "said"),
    [
        (64, {"state_snapshot_bytes": "64MiB"}, "state_snapshot_bytes is 64.00 MiB, and the cache may take 64.00 MiB"),
        (
            *(64, {"max_batch_size": 8}),
            "a sequence of 1 tokens beside the states of 8 slots: that is 50.00 MiB, and 48.00 MiB may be used"
            " (kv_cache_memory_bytes); lower max_seq_len or max_batch_size",
        ),
    ],
)
def test_states_without_room_are_refused(mib: int, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        with_states(CPU, mib, **config)


def test_snapshots_of_a_model_without_states_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="state_snapshot_bytes: no layer of this model has a recurrent state"):
        resolved(CPU, state_snapshot_bytes=GIB)


@pytest.mark.parametrize("free_bytes", [GIB // 4, 0, -GIB])
def test_a_gpu_without_room_for_one_slot_is_refused(free_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=r"1 slot of 4096 tokens: that is 256\.00 MiB.*; lower max_seq_len$"):
        refitted(free_bytes)


@pytest.mark.parametrize(
    ("free", "asked", "said"),
    [
        (GIB // 4, {"dtype": "bfloat16"}, "512.00 MiB as bfloat16, and 256.00 MiB are free; with quantization they"),
        (GIB // 4, {"dtype": "bfloat16"}, "need less (int8 272.00 MiB and int4 200.00 MiB), or choose a smaller model"),
        (GIB // 4, {"quantization": "int8"}, "272.00 MiB as int8, and 256.00 MiB are free; with quantization they"),
        (GIB // 4, {"quantization": "int8"}, "need less (int4 200.00 MiB), or choose a smaller model"),
        (GIB // 8, {"quantization": "int4"}, f"200.00 MiB as int4, and 128.00 MiB are free; {SMALLER}"),
        (99, {"grouped": GroupedSize(2**28, 2**28)}, "256.00 MiB as they are stored, and 99 bytes are free; choose a"),
    ],
)
def test_weights_that_do_not_fit_name_formats_that_need_less(free: int, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        resolved(replace(CPU, free_bytes=free), **asked)


def test_on_a_gpu_that_format_is_float8() -> None:
    with pytest.raises(
        ConfigurationError, match=r"they would need less \(fp8 320\.00 MiB\), or choose a smaller model$"
    ):
        resolved(replace(KERNELS_GPU, free_bytes=GIB // 4))


# Rotary tables

TURNING = varied(MODEL, positions_of(BASE))  # a position takes 512 bytes of a table, and 4 KiB of cache


def resolved_with_tables(positions: int, **config: Any) -> ResolvedConfig:
    """In 13 MiB beside the weights."""
    shape = replace(TURNING, max_position_embeddings=positions)
    machine = replace(CPU, free_bytes=GIB // 2 + 13 * 2**20)
    return resolve(EngineConfig(**config), shape, NUM_PARAMETERS, machine, lambda *_: None)


def test_rotary_tables_are_as_long_as_sequences_and_take_memory() -> None:
    assert TURNING.table_bytes == 512
    short = resolved_with_tables(256)
    assert (short.max_seq_len, short.kv_cache_memory_bytes) == (256, int((13 * 2**20 - 256 * 512) * 0.8))
    asked = resolved_with_tables(2**31 - 1, max_seq_len=512)
    assert (asked.max_seq_len, asked.kv_cache_memory_bytes) == (512, int((13 * 2**20 - 512 * 512) * 0.8))


def test_a_long_context_is_cut_to_what_fits_with_its_tables() -> None:
    fitted = resolved_with_tables(2**31 - 1)
    assert fitted.max_seq_len == 2366  # in 0.8 of 13 MiB
    assert fitted.kv_cache_memory_bytes == int((13 * 2**20 - 2366 * 512) * 0.8)


def test_a_length_whose_tables_have_no_room_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved_with_tables(2**31 - 1, max_seq_len=30_000)
    assert str(caught.value) == (
        "there is no room for the rotary tables of 30000 positions: they take 14.65 MiB, and 13.00 MiB are free beside"
        " the weights; lower max_seq_len"
    )


@pytest.mark.parametrize(
    ("device", "num_gpus", "resolved"), [("auto", 2, "cuda:0"), ("auto", 0, "cpu"), ("cpu", 2, "cpu")]
)
def test_the_first_rank_has_the_first_device(device: str, num_gpus: int, resolved: str) -> None:
    config = EngineConfig(device=device, tensor_parallel_size=2)
    assert resolve_divided(config, None, num_gpus).device == resolved


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(device: str) -> None:
    config = EngineConfig(device=device, tensor_parallel_size=2)
    message = "tensor_parallel_size 2 is more than the 1 CUDA devices here; lower it"
    with pytest.raises(ConfigurationError, match=message):
        resolve_divided(config, None, num_gpus=1)
