"""What "auto" becomes on which machine, and what is refused in what words."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from chairlift.config import AttentionBackend, DType, EngineConfig, LoadFormat, Quantization, ResolvedConfig
from chairlift.engine.execution.resolver import MachineFacts, fit_slots, resolve
from chairlift.errors import ChairliftError, ConfigurationError
from chairlift.models.config import ModelConfig, ModelShape
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
CPU = MachineFacts("cpu", frozenset({DType.FLOAT32, DType.BFLOAT16}), free_bytes=64 * GIB, num_threads=6)
OLD_CPU = replace(CPU, fast_dtypes=frozenset({DType.FLOAT32}), has_fast_cpu_kernels=False)
GPU = MachineFacts("cuda:0", frozenset(DType), free_bytes=128 * GIB)

Obstacles = Mapping[AttentionBackend, str]
NO_OBSTACLES: Obstacles = {}
NO_COMPILER: Obstacles = {AttentionBackend.CPU: "there is no C++ compiler"}
NOT_INSTALLED: Obstacles = {AttentionBackend.FLASH_ATTN: "the package is not installed"}


def resolved(
    machine: MachineFacts = CPU, shape: ModelConfig = MODEL, obstacles: Obstacles = NO_OBSTACLES, **config: Any
) -> ResolvedConfig:
    def find_obstacle(backend: AttentionBackend, model: ModelShape, dtype: DType, device: str) -> str | None:
        assert (model, device) == (shape, machine.device)
        if backend is AttentionBackend.FLASH_ATTN and dtype is DType.FLOAT32:
            return "not in float32"
        return obstacles.get(backend)

    return resolve(EngineConfig(**config), shape, NUM_PARAMETERS, machine, find_obstacle)


def refusal(machine: MachineFacts = CPU, obstacles: Obstacles = NO_OBSTACLES, **config: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolved(machine, obstacles=obstacles, **config)
    assert isinstance(caught.value, ChairliftError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def room_for(num_slots: int, machine: MachineFacts = CPU, short_by: int = 0) -> MachineFacts:
    """That machine with memory for the weights and so many slots of 4096 tokens, less some bytes."""
    free_bytes = GIB // 2 + num_slots * 4096 * 2**16 - short_by
    return replace(machine, free_bytes=free_bytes)


# What "auto" becomes


def test_on_a_cpu() -> None:
    config = resolved()
    assert (config.device, config.dtype, config.attention_backend) == ("cpu", DType.BFLOAT16, AttentionBackend.CPU)
    assert (config.max_batch_size, config.max_seq_len) == (32, 4096)
    assert (config.max_num_batched_tokens, config.max_steps_per_launch) == (1024, 1)


def test_on_a_gpu() -> None:
    config = resolved(GPU)
    assert (config.device, config.dtype) == ("cuda:0", DType.BFLOAT16)
    assert config.attention_backend is AttentionBackend.FLASH_ATTN
    assert (config.max_batch_size, config.max_seq_len) == (256, 4096)
    assert (config.max_num_batched_tokens, config.max_steps_per_launch) == (8192, 4)


@pytest.mark.parametrize(
    ("machine", "model_dtype", "dtype"),
    [
        (CPU, DType.BFLOAT16, DType.BFLOAT16),
        (CPU, DType.FLOAT16, DType.FLOAT32),
        (CPU, DType.FLOAT32, DType.FLOAT32),
        (OLD_CPU, DType.BFLOAT16, DType.FLOAT32),
        (GPU, DType.FLOAT16, DType.FLOAT16),
    ],
)
def test_the_number_format_is_the_checkpoints_where_the_machine_multiplies_it(
    machine: MachineFacts, model_dtype: DType, dtype: DType
) -> None:
    assert resolved(machine, replace(MODEL, dtype=model_dtype), max_seq_len=64).dtype is dtype


@pytest.mark.parametrize(
    ("machine", "obstacles", "config", "backend"),
    [
        (GPU, {}, {}, AttentionBackend.FLASH_ATTN),
        (GPU, {}, {"dtype": "float32"}, AttentionBackend.TORCH),
        (GPU, NOT_INSTALLED, {}, AttentionBackend.TORCH),
        (CPU, {}, {}, AttentionBackend.CPU),
        (CPU, NO_COMPILER, {}, AttentionBackend.TORCH),
        (OLD_CPU, {}, {}, AttentionBackend.TORCH),
        (OLD_CPU, {}, {"attention_backend": "cpu"}, AttentionBackend.CPU),
        (OLD_CPU, {}, {"quantization": "int8"}, AttentionBackend.CPU),
        (OLD_CPU, {}, {"batch_invariant": True}, AttentionBackend.TORCH),
        (CPU, {}, {"attention_backend": "torch"}, AttentionBackend.TORCH),
    ],
)
def test_the_best_backend_without_an_obstacle_is_chosen(
    machine: MachineFacts, obstacles: Obstacles, config: dict[str, Any], backend: AttentionBackend
) -> None:
    assert resolved(machine, obstacles=obstacles, max_seq_len=64, **config).attention_backend is backend


@pytest.mark.parametrize(
    ("machine", "obstacles", "config", "reason"),
    [
        (CPU, NO_COMPILER, {}, "there is no C++ compiler"),
        (OLD_CPU, {}, {}, "this processor has no AVX-512"),
        (CPU, {}, {}, None),
        (CPU, {}, {"attention_backend": "torch"}, None),
        (GPU, NOT_INSTALLED, {}, None),
    ],
)
def test_why_a_cpu_has_to_do_with_torch_is_said(
    machine: MachineFacts, obstacles: Obstacles, config: dict[str, Any], reason: str | None
) -> None:
    assert resolved(machine, obstacles=obstacles, max_seq_len=64, **config).fallback_reason == reason


@pytest.mark.parametrize(("max_position_embeddings", "max_seq_len"), [(2048, 2048), (4096, 4096), (131072, 4096)])
def test_a_slot_holds_what_the_model_can_read_up_to_a_usual_length(
    max_position_embeddings: int, max_seq_len: int
) -> None:
    shape = replace(MODEL, max_position_embeddings=max_position_embeddings)
    assert resolved(shape=shape).max_seq_len == max_seq_len


@pytest.mark.parametrize(
    ("num_fitting", "short_by", "num_slots"), [(1, 0, 1), (7, 0, 7), (7, 1, 6), (32, 0, 32), (33, 0, 32)]
)
def test_as_many_slots_as_fit_beside_the_weights_up_to_a_usual_number(
    num_fitting: int, short_by: int, num_slots: int
) -> None:
    assert resolved(room_for(num_fitting, short_by=short_by), memory_fraction=1.0).max_batch_size == num_slots


ALL = {"memory_fraction": 1.0}
CHOICES: dict[str, tuple[MachineFacts, dict[str, Any], dict[str, Any]]] = {
    "threads of the machine": (CPU, {}, {"num_threads": 6}),
    "threads that were given": (CPU, {"num_threads": 2}, {"num_threads": 2}),
    "the device that was found": (replace(GPU, device="cuda:1"), {"device": "cuda"}, {"device": "cuda:1"}),
    "the only device": (CPU, {"device": "auto"}, {"device": "cpu"}),
    "a share of the memory beside the weights": (room_for(20), {"memory_fraction": 0.5}, {"max_batch_size": 10}),
    "80 % of it by default": (room_for(20), {}, {"max_batch_size": 16}),
    # 2 GiB free: in bfloat16 6 slots beside 0.5 GiB of weights, in float32 2 slots of twice the size beside 1 GiB,
    # and beside 0.25 GiB of weights in 8 bits one more
    "slots of bfloat16": (room_for(6), ALL, {"max_batch_size": 6}),
    "slots of float32": (room_for(6), {**ALL, "dtype": "float32"}, {"max_batch_size": 2}),
    "slots beside weights in 8 bits": (room_for(6), {**ALL, "quantization": "int8"}, {"max_batch_size": 7}),
    "slots that just fit": (room_for(40), {**ALL, "max_batch_size": 40}, {"max_batch_size": 40}),
    "a spare slot beside the others": (
        room_for(10),
        {**ALL, "preempt_after": 5},
        {"max_batch_size": 9, "num_slots": 10},
    ),
    "no spare slot": (CPU, {"max_batch_size": 3}, {"num_slots": 3}),
    "no more slots than the token budget": (CPU, {"max_num_batched_tokens": 16}, {"max_batch_size": 16}),
    "a token budget of the slots": (
        CPU,
        {"max_batch_size": 1500, "max_seq_len": 64},
        {"max_num_batched_tokens": 1500},
    ),
    "a token budget that just suffices": (
        CPU,
        {"max_batch_size": 8, "max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 8},
    ),
    "all that the model can read": (CPU, {"max_seq_len": 8192}, {"max_seq_len": 8192}),
    "whole pages of flash_attn": (GPU, {"max_seq_len": 300}, {"max_seq_len": 300, "slot_len": 512}),
    "no pages of torch": (GPU, {"max_seq_len": 300, "attention_backend": "torch"}, {"slot_len": 300}),
}


@pytest.mark.parametrize(("machine", "config", "chosen"), CHOICES.values(), ids=CHOICES.keys())
def test_chosen_is(machine: MachineFacts, config: dict[str, Any], chosen: dict[str, Any]) -> None:
    found = resolved(machine, **config)
    assert {name: getattr(found, name) for name in chosen} == chosen


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
        "memory_fraction": 0.3,
        "num_threads": 2,
        "seed": 11,
    }
    config = resolved(**given)
    assert {name: getattr(config, name) for name in given} == given


def test_resolving_changes_nothing_that_was_put_in() -> None:
    config = EngineConfig()
    resolve(config, MODEL, NUM_PARAMETERS, CPU, lambda *_: None)
    assert config == EngineConfig()
    assert config.max_batch_size == "auto"


# Refusals


NEEDS_CPU = "quantization needs attention_backend cpu, "
REFUSED: list[tuple[MachineFacts, dict[str, Any], list[str]]] = [
    (
        room_for(39),
        {**ALL, "max_batch_size": 40},
        [
            *("no room for 40 slots of 4096 tokens: that is 10.00 GiB", "9.75 GiB may be used"),
            *("100% of the 9.75 GiB that are free beside the weights", "; lower max_batch_size or max_seq_len"),
        ],
    ),
    (
        room_for(10),
        {**ALL, "max_batch_size": 10, "preempt_after": 5},
        ["no room for 10 and 1 spare slots of 4096 tokens: that is 2.75 GiB, and 2.50 GiB may be used"],
    ),
    (room_for(1, short_by=1), ALL, ["no room for 1 slot of 4096 tokens: that is 0.25 GiB", "; lower max_seq_len"]),
    (
        replace(CPU, free_bytes=GIB // 4),
        {},
        ["the weights do not fit: they need 0.50 GiB as bfloat16, and 0.25 GiB are free"],
    ),
    (CPU, {"max_seq_len": 8193}, ["max_seq_len 8193", "8192 positions"]),
    (
        CPU,
        {"max_batch_size": 8, "max_num_batched_tokens": 7},
        ["max_num_batched_tokens (7)", "max_batch_size (8)", "raise the first or lower the second"],
    ),
    (GPU, {"batch_invariant": True}, ["batch_invariant works on a CPU only, and the device is cuda:0"]),
    (
        CPU,
        {"attention_backend": "flash_attn"},
        ["attention_backend flash_attn does not work here: the package is not installed; choose torch, or change that"],
    ),
    (
        CPU,
        {"attention_backend": "cpu"},
        ["attention_backend cpu does not work here: there is no C++ compiler; choose torch, or change that"],
    ),
    (CPU, {"quantization": "int8"}, [f"{NEEDS_CPU}which does not work here: there is no C++ compiler"]),
    (CPU, {"quantization": "int8", "attention_backend": "torch"}, [f"{NEEDS_CPU}not torch"]),
]


@pytest.mark.parametrize(("machine", "config", "words"), REFUSED, ids=[words[0] for _, _, words in REFUSED])
def test_refused_is(machine: MachineFacts, config: dict[str, Any], words: list[str]) -> None:
    obstacles = {**NO_COMPILER, **NOT_INSTALLED} if {"attention_backend", "quantization"} & config.keys() else {}
    message = refusal(machine, obstacles, **config)
    assert [each for each in words if each not in message] == []


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
    assert refitted(10 * GIB) == before.model_copy(update={"max_batch_size": 32})


def test_slots_that_were_asked_for_and_fit_no_more_are_refused() -> None:
    assert refitted(10 * GIB, max_batch_size=32).max_batch_size == 32
    with pytest.raises(ConfigurationError) as caught:
        refitted(10 * GIB, max_batch_size=33)
    assert str(caught.value) == (
        "there is no room for 33 slots of 4096 tokens: that is 8.25 GiB, and 8.00 GiB may be used (80% of the 10.00 GiB"
        " that are free beside the weights); lower max_batch_size or max_seq_len"
    )


@pytest.mark.parametrize("free_bytes", [GIB // 4, 0, -GIB])
def test_a_gpu_without_room_for_one_slot_is_refused(free_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=r"1 slot of 4096 tokens: that is 0\.25 GiB.*; lower max_seq_len$"):
        refitted(free_bytes)
