"""What "auto" becomes on which machine, and what is refused in what words."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from chairlift.config import AttentionBackend, DType, EngineConfig, LoadFormat, Quantization, ResolvedConfig
from chairlift.engine.execution.resolver import MachineFacts, fit_slots, resolve
from chairlift.errors import ChairliftError, ConfigurationError
from chairlift.models.config import ModelConfig, ModelShape
from chairlift.models.stored import GroupedSize
from tests.models.cpu.support import BASE

GIB = 2**30

# In bfloat16 0.5 GiB of weights, and 64 KiB of cache per token.
NUM_PARAMETERS = 2**28
MODEL = replace(
    BASE,
    dtype=DType.BFLOAT16,
    max_position_embeddings=8192,
    layers=BASE.layers * 16,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
)
CPU = MachineFacts(
    "cpu", frozenset({DType.FLOAT32, DType.BFLOAT16}), free_bytes=64 * GIB, has_elastic_memory=True, num_threads=6
)
SLOW = "this processor has no AVX2"
AVX2_CPU = replace(CPU, fast_dtypes=frozenset({DType.FLOAT32}))  # it widens bfloat16 in registers
FLOAT16_CPU = replace(CPU, fast_dtypes=frozenset(DType))  # as with avx512_fp16
OLD_CPU = replace(CPU, fast_dtypes=frozenset({DType.FLOAT32}), cpu_drawback=SLOW)
GPU = MachineFacts("cuda:0", frozenset(DType), free_bytes=128 * GIB)

Obstacles = Mapping[AttentionBackend, str]
NO_OBSTACLES: Obstacles = {}
NO_CHANGES: Mapping[str, Any] = {}
NO_COMPILER: Obstacles = {AttentionBackend.CPU: "there is no C++ compiler"}
NOT_IN_FLOAT16 = "not in float16"
NOT_INSTALLED: Obstacles = {AttentionBackend.FLASH_ATTN: "the package is not installed"}


def resolved(
    machine: MachineFacts = CPU,
    shape: ModelConfig = MODEL,
    obstacles: Obstacles = NO_OBSTACLES,
    grouped: GroupedSize | None = None,
    **config: Any,
) -> ResolvedConfig:
    def find_obstacle(
        backend: AttentionBackend, model: ModelShape, dtype: DType, device: str, num_ranks: int
    ) -> str | None:
        assert (model, device, num_ranks) == (shape, machine.device, config.get("tensor_parallel_size", 1))
        if backend is AttentionBackend.FLASH_ATTN and dtype is DType.FLOAT32:
            return "not in float32"
        if backend is AttentionBackend.CPU and dtype is DType.FLOAT16:
            return NOT_IN_FLOAT16
        return obstacles.get(backend)

    return resolve(EngineConfig(**config), shape, NUM_PARAMETERS, machine, find_obstacle, grouped)


def refusal(machine: MachineFacts = CPU, obstacles: Obstacles = NO_OBSTACLES, **config: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolved(machine, obstacles=obstacles, **config)
    assert isinstance(caught.value, ChairliftError)
    return str(caught.value)


def room_for(num_slots: int, machine: MachineFacts = GPU, short_by: int = 0) -> MachineFacts:
    """That machine with memory for the weights and, in the cache's share, so many slots of 4096 tokens."""
    free_bytes = GIB // 2 + num_slots * 4096 * 2**16 * 5 // 4 - short_by
    return replace(machine, free_bytes=free_bytes)


# What "auto" becomes


def case(
    machine: MachineFacts,
    expected: Mapping[str, Any],
    *,
    obstacles: Obstacles = NO_OBSTACLES,
    model: Mapping[str, Any] = NO_CHANGES,
    **config: Any,
) -> tuple[MachineFacts, Mapping[str, Any], Obstacles, Mapping[str, Any], dict[str, Any]]:
    """`model`: what is different of it."""
    return machine, expected, obstacles, model, config


ON_CPU, IN_TORCH, ON_GPU = AttentionBackend.CPU, AttentionBackend.TORCH, AttentionBackend.FLASH_ATTN
CASES = {
    "a cpu": case(
        CPU,
        {
            "device": "cpu",
            "dtype": DType.BFLOAT16,
            "attention_backend": ON_CPU,
            "fallback_reason": None,
            "max_batch_size": 32,
            "max_seq_len": 8192,
            "max_num_batched_tokens": 1024,
            "max_steps_per_launch": 1,
            "num_threads": 6,
            "num_slots": 32,
            "is_cache_elastic": True,
        },
    ),
    "a gpu": case(
        GPU,
        {
            "device": "cuda:0",
            "dtype": DType.BFLOAT16,
            "attention_backend": ON_GPU,
            "fallback_reason": None,
            "max_batch_size": 256,
            "max_seq_len": 4096,
            "max_num_batched_tokens": 8192,
            "max_steps_per_launch": 4,
        },
    ),
    "the second gpu": case(replace(GPU, device="cuda:1"), {"device": "cuda:1"}, device="cuda"),
    # The number format is the checkpoint's where the machine multiplies it, or where the kernels widen it.
    "float16 on a cpu": case(CPU, {"dtype": DType.FLOAT32}, model={"dtype": DType.FLOAT16}),
    # Native code does not compute in float16.
    "float16 on a cpu that multiplies it": case(
        FLOAT16_CPU, {"dtype": DType.BFLOAT16, "attention_backend": ON_CPU}, model={"dtype": DType.FLOAT16}
    ),
    "float16 on such a cpu in torch": case(
        FLOAT16_CPU, {"dtype": DType.FLOAT16}, model={"dtype": DType.FLOAT16}, attention_backend="torch"
    ),
    "float16 on such a cpu without a compiler": case(
        FLOAT16_CPU, {"dtype": DType.FLOAT16}, model={"dtype": DType.FLOAT16}, obstacles=NO_COMPILER
    ),
    "float16 that is asked for": case(
        FLOAT16_CPU, {"dtype": DType.FLOAT16, "fallback_reason": NOT_IN_FLOAT16}, dtype="float16"
    ),
    "float32 on a cpu": case(CPU, {"dtype": DType.FLOAT32}, model={"dtype": DType.FLOAT32}),
    "float16 on a gpu": case(GPU, {"dtype": DType.FLOAT16}, model={"dtype": DType.FLOAT16}),
    "bfloat16 with AVX2": case(AVX2_CPU, {"dtype": DType.BFLOAT16}),
    "bfloat16 with AVX2 and no compiler": case(AVX2_CPU, {"dtype": DType.FLOAT32}, obstacles=NO_COMPILER),
    "bfloat16 with AVX2 in torch": case(AVX2_CPU, {"dtype": DType.FLOAT32}, attention_backend="torch"),
    "bfloat16 without AVX2": case(OLD_CPU, {"dtype": DType.FLOAT32}),
    # The best backend without an obstacle is chosen; why a CPU has to do with torch is said.
    "float32 on a gpu": case(GPU, {"attention_backend": IN_TORCH}, dtype="float32"),
    "no flash_attn": case(GPU, {"attention_backend": IN_TORCH, "fallback_reason": None}, obstacles=NOT_INSTALLED),
    "no compiler": case(
        CPU, {"attention_backend": IN_TORCH, "fallback_reason": "there is no C++ compiler"}, obstacles=NO_COMPILER
    ),
    "no AVX2": case(OLD_CPU, {"attention_backend": IN_TORCH, "fallback_reason": SLOW}),
    "no AVX2 but asked for": case(OLD_CPU, {"attention_backend": ON_CPU}, attention_backend="cpu"),
    "no AVX2 but quantized": case(OLD_CPU, {"attention_backend": ON_CPU}, quantization="int8"),
    "no AVX2 and invariant": case(OLD_CPU, {"attention_backend": IN_TORCH}, batch_invariant=True),
    "torch": case(CPU, {"attention_backend": IN_TORCH, "fallback_reason": None}, attention_backend="torch"),
    # Where every slot takes all its memory it holds what the model can read up to a usual length.
    "a short model": case(GPU, {"max_seq_len": 2048}, model={"max_position_embeddings": 2048}),
    "a long model": case(GPU, {"max_seq_len": 4096}, model={"max_position_embeddings": 131_072}),
    "slots of pages": case(GPU, {"max_seq_len": 300, "slot_len": 512}, max_seq_len=300),
    "slots in torch": case(GPU, {"slot_len": 300}, max_seq_len=300, attention_backend="torch"),
    # Slots and the token budget bound each other.
    "many slots": case(CPU, {"max_num_batched_tokens": 1500}, max_batch_size=1500, max_seq_len=64),
    "a small budget": case(CPU, {"max_batch_size": 16}, max_num_batched_tokens=16),
    "a budget for all slots": case(CPU, {"max_batch_size": 8}, max_batch_size=8, max_num_batched_tokens=8),
    "slots that just fit": case(room_for(40), {"max_batch_size": 40}, max_batch_size=40),
    "a chunk for each slot": case(
        CPU, {"max_batch_size": 256}, kv_cache_memory_bytes=GIB, max_batch_size=256, max_seq_len=64
    ),
    "all positions": case(CPU, {"max_seq_len": 8192}, max_seq_len=8192),
}


@pytest.mark.parametrize(("machine", "expected", "obstacles", "model", "config"), CASES.values(), ids=CASES.keys())
def test_what_is_not_given_becomes_what_suits_machine_and_model(
    machine: MachineFacts,
    expected: Mapping[str, Any],
    obstacles: Obstacles,
    model: Mapping[str, Any],
    config: dict[str, Any],
) -> None:
    found = resolved(machine, replace(MODEL, **model), obstacles, **config)
    assert {name: getattr(found, name) for name in expected} == expected


def test_where_memory_comes_as_it_is_used_a_sequence_may_be_as_long_as_the_model_can_read() -> None:
    shape = replace(MODEL, max_position_embeddings=131_072)
    config = resolved(shape=shape)
    assert (config.max_batch_size, config.max_seq_len) == (32, 131_072)
    assert config.kv_cache_memory_bytes == int(63.5 * GIB * 0.8)
    assert config.cache_tokens == 832_256 // 64 * 64  # of 64 KiB each
    assert config.is_cache_elastic


def test_a_sequence_is_no_longer_than_all_memory_allows() -> None:
    shape = replace(MODEL, max_position_embeddings=131_072)
    config = resolved(shape=shape, kv_cache_memory_bytes=GIB + 2**20)
    assert (config.max_seq_len, config.cache_tokens, config.max_batch_size) == (16_384, 16_384, 32)
    assert resolved(shape=shape, kv_cache_memory_bytes=10 * 2**22).max_batch_size == 10  # a chunk of 4 MiB for each
    with pytest.raises(ConfigurationError) as caught:
        resolved(shape=shape, kv_cache_memory_bytes=GIB, max_seq_len=20_000)
    assert str(caught.value) == (
        "there is no room for a sequence of 20000 tokens: that is 1.22 GiB, and 1.00 GiB may be used"
        " (kv_cache_memory_bytes); lower max_seq_len"
    )


@pytest.mark.parametrize(
    ("num_fitting", "short_by", "num_slots"), [(1, 0, 1), (7, 0, 7), (7, 2, 6), (256, 0, 256), (257, 0, 256)]
)
def test_as_many_slots_as_fit_beside_the_weights_up_to_a_usual_number(
    num_fitting: int, short_by: int, num_slots: int
) -> None:
    assert resolved(room_for(num_fitting, short_by=short_by)).max_batch_size == num_slots


def test_wider_numbers_leave_room_for_fewer_slots() -> None:
    # 1.875 GiB free: in bfloat16 6 slots beside 0.5 GiB of weights, in float32 2 slots of twice the size beside 1 GiB
    machine = room_for(6)
    assert resolved(machine).max_batch_size == 6
    assert resolved(machine, dtype="float32").max_batch_size == 2


def test_quantized_weights_leave_room_for_more_memory() -> None:
    # 1 GiB free, 0.25 Gi weights: 0.5 GiB in bfloat16, 0.27 in int8 (8.5 bits each), 0.14 in int4 (4.5 bits)
    machine = replace(CPU, free_bytes=GIB)
    tokens = [resolved(machine, quantization=each, max_seq_len=64).cache_tokens for each in (None, "int8", "int4")]
    assert tokens == [6528, 9600, 11264]


def test_the_cache_takes_its_share_of_what_is_free_beside_the_weights() -> None:
    machine = replace(CPU, free_bytes=2 * GIB)
    shares: list[tuple[dict[str, Any], float]] = [({}, 0.8), ({"memory_fraction": 0.5}, 0.5)]
    for fields, share in shares:
        assert resolved(machine, **fields).kv_cache_memory_bytes == int(1.5 * GIB * share)
    given = resolved(machine, memory_fraction=0.5, kv_cache_memory_bytes=GIB)
    assert given.kv_cache_memory_bytes == GIB


@pytest.mark.parametrize("machine", [CPU, FLOAT16_CPU, AVX2_CPU], ids=["bf16", "fp16", "AVX2"])
def test_beside_groups_float16_becomes_bfloat16_unless_it_is_asked_for(machine: MachineFacts) -> None:
    shape, grouped = replace(MODEL, dtype=DType.FLOAT16), GroupedSize(1, 1)
    chosen, given = (resolved(machine, shape, grouped=grouped, dtype=dtype) for dtype in ("auto", "float16"))
    assert (chosen.dtype, chosen.attention_backend, chosen.keeps_groups) == (DType.BFLOAT16, ON_CPU, True)
    assert (given.dtype, given.attention_backend, given.keeps_groups) == (DType.FLOAT16, IN_TORCH, False)
    assert resolved(GPU, shape, grouped=grouped).dtype is DType.FLOAT16


def test_weights_that_are_stored_in_groups_are_kept_by_the_cpu_backend_unless_float32_is_asked_for() -> None:
    grouped = GroupedSize(num_parameters=3 * 2**26, num_bytes=GIB // 8)  # of the 0.25 Gi above
    machine = replace(CPU, free_bytes=2 * GIB)
    cases: list[tuple[dict[str, Any], bool, float]] = [
        ({}, True, 0.25),
        ({"attention_backend": "torch"}, False, 0.5),
        ({"dtype": "float32"}, False, 1.0),
    ]
    for fields, is_kept, weight_gib in cases:
        config = resolved(machine, grouped=grouped, **fields)
        assert (config.keeps_groups, config.kv_cache_memory_bytes) == (is_kept, int((2 - weight_gib) * GIB * 0.8))
    without_bfloat16 = replace(machine, fast_dtypes=frozenset({DType.FLOAT32}))
    assert resolved(without_bfloat16, grouped=grouped).keeps_groups


# What is given stays


def test_what_is_given_is_kept() -> None:
    given: dict[str, Any] = {
        "model": "some/model",
        "tokenizer": "some/tokenizer",
        "chat_template": "template.jinja",
        "load_format": LoadFormat.DUMMY,
        "dtype": DType.FLOAT32,
        "attention_backend": AttentionBackend.CPU,
        "quantization": Quantization.INT8,
        "max_batch_size": 3,
        "max_seq_len": 100,
        "max_num_batched_tokens": 7,
        "max_steps_per_launch": 9,
        "max_queue_size": 5,
        "kv_cache_memory_bytes": 3 * GIB,
        "num_threads": 2,
        "seed": 11,
    }
    config = resolved(**given)
    assert {name: getattr(config, name) for name in given} == given


def test_a_spare_slot_is_there_for_requests_that_lose_theirs_and_takes_room_beside_the_others() -> None:
    config = resolved(room_for(10), preempt_after=5)
    assert (config.max_batch_size, config.num_slots) == (9, 10)
    assert resolved(max_batch_size=3).num_slots == 3


def test_resolving_changes_nothing_that_was_put_in() -> None:
    config = EngineConfig()
    resolve(config, MODEL, NUM_PARAMETERS, CPU, lambda *_: None)
    assert config == EngineConfig()
    assert config.max_batch_size == "auto"


# Refusals

NO_ROOM_GPU = "that is 2.75 GiB, and 2.50 GiB may be used (80% of the 3.12 GiB that are free beside the weights)"
REFUSALS: list[tuple[MachineFacts, dict[str, Any], str]] = [
    (
        CPU,
        {"attention_backend": "flash_attn"},
        "attention_backend flash_attn does not work here: the package is not installed; choose torch, or change that",
    ),
    (
        CPU,
        {"attention_backend": "cpu"},
        "attention_backend cpu does not work here: there is no C++ compiler; choose torch, or change that",
    ),
    (
        CPU,
        {"quantization": "int8"},
        "quantization needs attention_backend cpu, which does not work here: there is no C++ compiler",
    ),
    (
        CPU,
        {"quantization": "int8", "attention_backend": "torch"},
        "quantization needs attention_backend cpu, not torch",
    ),
    (GPU, {"batch_invariant": True}, "batch_invariant works on a CPU only, and the device is cuda:0"),
    (CPU, {"max_seq_len": 8193}, "max_seq_len 8193 is more than the model's 8192 positions"),
    (
        CPU,
        {"max_batch_size": 8, "max_num_batched_tokens": 7},
        "max_num_batched_tokens (7) is below max_batch_size (8): a step must have room for one token of every running"
        " request; raise the first or lower the second",
    ),
    (
        MachineFacts("cpu", frozenset({DType.BFLOAT16, DType.FLOAT32}), free_bytes=GIB // 4),
        {"dtype": "bfloat16"},
        "the weights do not fit: they need 0.50 GiB as bfloat16, and 0.25 GiB are free",
    ),
    (
        CPU,
        {"kv_cache_memory_bytes": 70 * GIB},
        "kv_cache_memory_bytes is 70.00 GiB, and 63.50 GiB are free beside the weights; lower it",
    ),
    (
        CPU,
        {"kv_cache_memory_bytes": GIB, "max_batch_size": 257, "max_seq_len": 64},
        "there is no room for 257 slots of at least 64 tokens: that is 1.00 GiB, and 1.00 GiB may be used"
        " (kv_cache_memory_bytes); lower max_batch_size or raise kv_cache_memory_bytes",
    ),
    (
        room_for(39),
        {"max_batch_size": 40},
        "there is no room for 40 slots of 4096 tokens: that is 10.00 GiB, and 9.75 GiB may be used (80% of the 12.19"
        " GiB that are free beside the weights); lower max_batch_size or max_seq_len",
    ),
    (
        room_for(10),
        {"max_batch_size": 10, "preempt_after": 5},
        f"there is no room for 10 and 1 spare slots of 4096 tokens: {NO_ROOM_GPU}; lower max_batch_size or max_seq_len",
    ),
    (
        room_for(1, short_by=2),
        {},
        "there is no room for 1 slot of 4096 tokens: that is 0.25 GiB, and 0.25 GiB may be used (80% of the 0.31 GiB"
        " that are free beside the weights); lower max_seq_len",
    ),
]


@pytest.mark.parametrize(("machine", "config", "said"), REFUSALS)
def test_what_cannot_work_is_refused_with_the_reason_and_what_to_change(
    machine: MachineFacts, config: dict[str, Any], said: str
) -> None:
    assert refusal(machine, {**NO_COMPILER, **NOT_INSTALLED}, **config) == said


def test_weights_that_are_quantized_already_are_not_quantized_again() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved(grouped=GroupedSize(1, 1), quantization="int8")
    assert str(caught.value) == "the checkpoint's weights are quantized already; leave quantization out"


# What the weights left


def refitted(free_bytes: int, **config: Any) -> ResolvedConfig:
    """On a GPU, in slots of 4096 tokens and 256 MiB, when so much is free beside weights and activations."""
    return fit_slots(EngineConfig(**config), resolved(GPU, **config), MODEL, free_bytes)


@pytest.mark.parametrize(("free_bytes", "num_slots"), [(10 * GIB, 32), (10 * GIB - 1, 31), (500 * GIB, 256)])
def test_as_many_slots_as_fit_into_what_the_weights_left(free_bytes: int, num_slots: int) -> None:
    assert refitted(free_bytes).max_batch_size == num_slots  # the default share is 0.8


def test_a_small_token_budget_still_bounds_the_slots() -> None:
    assert refitted(500 * GIB, max_num_batched_tokens=16).max_batch_size == 16


def test_nothing_but_the_number_of_slots_changes() -> None:
    before = resolved(GPU)
    assert refitted(10 * GIB) == before.model_copy(
        update={"max_batch_size": 32, "cache_tokens": 32 * 4096, "kv_cache_memory_bytes": 8 * GIB}
    )


@pytest.mark.parametrize("free_bytes", [GIB // 4, 0, -GIB])
def test_a_gpu_without_room_for_one_slot_is_refused(free_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=r"1 slot of 4096 tokens: that is 0\.25 GiB.*; lower max_seq_len$"):
        refitted(free_bytes)
