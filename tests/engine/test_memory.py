"""Requests that would like ten times the memory that there is, memory that comes back, and a step that finds none.

And a model for which there is none at all.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES

from chairlift import LLM, SamplingParams
from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.cache.memory import MappedMemory, can_map
from chairlift.config import DType
from chairlift.device import on_device
from chairlift.engine.execution import runner as runner_module
from chairlift.engine.execution.machine import inspect_machine
from chairlift.engine.execution.runner import ModelRunner
from chairlift.engine.parts import Parts
from chairlift.errors import ConfigurationError, EngineDead
from chairlift.models import load_forward
from chairlift.models.attention import BatchMetadata
from chairlift.params import RequestOutput
from tests.engine.async_support import last, make_async_llm, wait_until
from tests.engine.support import GREEDY, PROMPTS, core_of, make_llm, make_tiny_checkpoint, tokens_of
from tests.engine.test_poison import assert_clean, greedy
from tests.models.cpu.support import BASE, FLOAT32, cpu_bench
from tests.support.engines import WrappedForward, ahead, make_core
from tests.support.forward_bench import SLOT_LEN, Row
from tests.support.gguf_files import Kind, new_writer
from tests.support.kernels import HAS_COMPILER

needs_mapping = pytest.mark.skipif(not can_map(torch.device("cpu")), reason="memory comes at once on this platform")
SOON_IDLE = Parts(idle_after=0.01)
TOKEN_BYTES = 2 * 2 * 32 * 4  # two layers of keys and values of one head, in float32
MANY = [[(7 * i + 3 * j) % 90 + 5 for j in range(40 + 11 * i)] for i in range(20)]
PARAMS_OF_MANY = [
    SamplingParams(temperature=0.0, max_tokens=20 + 2 * i, ignore_eos=True, prompt_logprobs=1 if i % 2 else None)
    for i in range(20)
]


@pytest.fixture
def make_scarce(tmp_path: Path) -> Callable[..., LLM]:
    """Engines with ten slots of 512 tokens and memory for 640, whose results do not depend on the batch."""
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    model = make_tiny_checkpoint(tmp_path, head_dim=32, max_position_embeddings=512)
    return partial(make_llm, model, max_batch_size=10, kv_cache_memory_bytes=640 * TOKEN_BYTES)


@pytest.fixture
def llm(make_scarce: Callable[..., LLM]) -> Iterator[LLM]:
    with make_scarce() as llm:
        yield llm


@needs_mapping
def test_all_end_with_the_tokens_that_each_has_alone_and_with_whole_scores_of_their_prompts(llm: LLM) -> None:
    together = llm.generate(MANY, PARAMS_OF_MANY)  # 3,670 tokens in memory for 640
    core = core_of(llm)
    core.check()
    assert core.read_stats().totals.num_preemptions > 0
    llm.reset_prefix_cache()
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(MANY, PARAMS_OF_MANY, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    lengths = [len(output.prompt_logprobs) if output.prompt_logprobs else None for output in together]
    assert lengths == [len(prompt) if index % 2 else None for index, prompt in enumerate(MANY)]


@needs_mapping
def test_memory_comes_with_tokens_and_goes_when_all_rests(llm: LLM) -> None:
    core = core_of(llm)
    (memory,) = core.cache.memories
    assert isinstance(memory, MappedMemory)
    assert memory.num_resident() == 0
    llm.generate(MANY[-2:], SamplingParams(max_tokens=1))
    used = memory.num_resident()
    assert used > 0
    core.use_idle_time()
    core.check()
    assert memory.num_resident() <= used / 4
    assert core.read_stats().cache.num_warm <= 64  # a tenth of 640 tokens


@needs_mapping
async def test_a_python_call_gives_memory_back_if_no_other_follows(make_scarce: Callable[..., LLM]) -> None:
    with make_scarce(SOON_IDLE) as llm:
        for _ in range(2):  # it works on after a rest
            llm.generate([[7] * 300], SamplingParams(max_tokens=1))
            await wait_until(lambda: core_of(llm).read_stats().cache.num_warm <= 64, "memory is back")


@needs_mapping
def test_a_slot_beyond_four_gigabytes_and_two_to_the_31_elements_holds_what_any_other_does() -> None:
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    bench = cpu_bench(BASE, FLOAT32)
    tokens = [(5 * i) % 261 for i in range(150)]
    (expected,) = bench.run([Row(0, tokens)])
    num_slots = 2**31 // bench.blocks[0].numel() + 9
    kept = BASE.kept(DType.FLOAT32)
    bench.cache = ContinuousBatchingKVCacheManager(kept, num_slots, SLOT_LEN, BASE.num_layers, ["cpu"])
    bench.cache.claim_slot(num_slots - 1)
    assert bench.blocks.stride(0) * (num_slots - 1) > 2**31
    (logits,) = bench.run([Row(num_slots - 1, tokens)])
    assert torch.equal(logits, expected)
    bench.cache.check_memory()


@needs_mapping
async def test_an_engine_that_has_had_nothing_to_do_for_a_while_rests(tiny: str) -> None:
    async with make_async_llm(tiny, SOON_IDLE) as engine:
        await last(engine.generate([7] * 100, SamplingParams(max_tokens=1), "a"))
        (memory,) = core_of(engine).cache.memories
        assert isinstance(memory, MappedMemory)
        assert memory.num_resident() > 0  # a tenth may stay warm
        await engine.reset_prefix_cache()
        await wait_until(lambda: memory.num_resident() == 0, "memory is back")
        await last(engine.generate([7] * 100, SamplingParams(max_tokens=1), "b"))  # it works on


SAID = (
    "the device ran out of memory in a step with this sequence; lower max_num_batched_tokens or kv_cache_memory_bytes"
)
LONG_PROMPT = list(range(1, 60))
PENALISED = greedy(repetition_penalty=1.5, frequency_penalty=0.5)


class LimitedForward(WrappedForward):
    """Has no memory for some batches."""

    is_too_large: Callable[[BatchMetadata], bool]

    def hidden(self, batch: BatchMetadata, *rest: Any) -> torch.Tensor:
        result = super().hidden(batch, *rest)
        if self.is_too_large(batch):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result


@pytest.fixture(params=[0, 1], ids=["waits", "1 ahead"])
def make(tiny: str, request: pytest.FixtureRequest) -> Callable[..., LLM]:
    """An engine that has no memory for some batches; so many launches ahead."""

    def make_with(is_too_large: Callable[[BatchMetadata], bool], **parts: Any) -> LLM:
        def load(*given: Any) -> LimitedForward:
            forward = LimitedForward(load_forward(*given))
            forward.is_too_large = is_too_large
            return forward

        chosen = replace(ahead(request.param), load_forward=load, **parts)
        return make_llm(tiny, chosen, attention_backend="torch", max_steps_per_launch=1)

    return make_with


def errors_of(outputs: list[RequestOutput]) -> list[str | None]:
    return [output.outputs[0].error for output in outputs]


def asking(params: SamplingParams, *max_tokens: int) -> list[SamplingParams]:
    return [params.model_copy(update={"max_tokens": each}) for each in max_tokens]


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_a_prompt_ends_with_an_error_and_rows_that_decode_beside_it_go_on(
    make: Callable[..., LLM], tiny: str, params: SamplingParams
) -> None:
    prompts = [*PROMPTS[:3], LONG_PROMPT]  # three slots: the long one comes when the first has ended
    asked = asking(params, 5, 12, 12, 12)
    with make_llm(tiny, attention_backend="torch", max_steps_per_launch=1) as llm:
        expected = tokens_of(llm.generate(prompts, asked))
    with make(lambda batch: max(batch.num_new_tokens) > 50) as llm:
        outputs = llm.generate(prompts, asked)
        assert errors_of(outputs) == [None, None, None, SAID]
        assert tokens_of(outputs) == [*expected[:3], []]
        assert_clean(llm)


def test_no_memory_for_the_smallest_copy_is_no_end_either(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where rows are looked up on the device, before anything is computed."""
    view = ContinuousBatchingKVCacheManager.view

    def view_if_it_fits(self: ContinuousBatchingKVCacheManager, *rest: Any) -> list[Any]:
        inputs = view(self, *rest)
        if inputs[0].max_cache_length > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs

    monkeypatch.setattr(ContinuousBatchingKVCacheManager, "view", view_if_it_fits)
    with make(lambda _: False) as llm:
        assert errors_of(llm.generate([LONG_PROMPT], GREEDY)) == [SAID]
        assert errors_of(llm.generate([PROMPTS[0]], asking(GREEDY, 3))) == [None]
        assert_clean(llm)


def test_prompts_of_one_step_end_together(make: Callable[..., LLM]) -> None:
    with make(lambda batch: max(batch.num_new_tokens) > 50) as llm:
        assert errors_of(llm.generate([PROMPTS[0], LONG_PROMPT], GREEDY)) == [SAID, SAID]
        assert_clean(llm)


def test_where_nothing_but_decoding_is_to_be_done_all_rows_end_with_the_tokens_that_they_have(
    make: Callable[..., LLM],
) -> None:
    with make(lambda batch: batch.is_decode and max(batch.num_cached_tokens) == 30) as llm:
        outputs = llm.generate([PROMPTS[1], PROMPTS[6]], GREEDY)  # of 17 and 25 tokens
        assert errors_of(outputs) == [SAID, SAID]
        assert [len(each) for each in tokens_of(outputs)] == [6, 6]
        assert_clean(llm)


def test_one_of_several_ranks_cannot_go_on_without_the_others(make: Callable[..., LLM]) -> None:

    def make_divided(*given: Any, **_: Any) -> ModelRunner:
        return ModelRunner(*given, is_divided=True)

    out_of_memory = pytest.raises(EngineDead, match="CUDA out of memory")
    with make(lambda _: True, make_runner=make_divided) as llm, out_of_memory:
        llm.generate([PROMPTS[0]], GREEDY)


def test_a_gpu_is_the_current_one_while_something_is_launched_on_it() -> None:
    guard = on_device(torch.device("cuda:1"))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1


def test_a_launch_happens_on_its_device(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def note(device: torch.device) -> Iterator[None]:
        seen.append(f"on {device}")
        yield
        seen.append("off")

    class Noted(WrappedForward):
        def hidden(self, *given: Any) -> torch.Tensor:
            seen.append("hidden")
            return super().hidden(*given)

    parts = Parts(load_forward=lambda *given: Noted(load_forward(*given)))
    with make_llm(tiny, parts, attention_backend="torch") as llm:
        monkeypatch.setattr(runner_module, "on_device", note)
        llm.generate([PROMPTS[0]], asking(GREEDY, 1)[0])
    assert seen == ["on cpu", "hidden", "off"]


def write_large_mixture(path: Path) -> Path:
    """Writes a file of 16 GB that takes none of the disk: 48 layers of 128 experts, of which it has the names alone."""
    writer = new_writer(path, "qwen3moe")
    hidden, inner, heads, num_experts, layers = 2048, 768, 4096, 128, 48
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(32)
    writer.add_head_count_kv(4)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(inner)
    writer.add_token_list([f"t{index}" for index in range(320)])
    of_a_layer = {
        "attn_norm": (hidden,),
        "attn_q_norm": (128,),
        "attn_k_norm": (128,),
        "ffn_norm": (hidden,),
        "ffn_gate_inp": (num_experts, hidden),
        "attn_q": (heads, hidden),
        "attn_k": (512, hidden),
        "attn_v": (512, hidden),
        "attn_output": (hidden, heads),
        **{f"ffn_{name}_exps": (num_experts, inner, hidden) for name in ("gate", "up")},
        "ffn_down_exps": (num_experts, hidden, inner),
    }
    shapes = {"token_embd": (320, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in of_a_layer.items()}
    for name, shape in shapes.items():
        kind = Kind.F32 if len(shape) == 1 or "gate_inp" in name else Kind.Q4_K
        num_elements, num_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // num_elements * num_bytes
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    num_bytes = sum(each.nbytes for part in writer.tensors for each in part.values())
    os.truncate(path, path.stat().st_size + num_bytes + 32)  # all but the alignment of the first is a multiple of 32
    return path


def test_a_mixture_without_room_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_large_mixture(tmp_path / "model.gguf")
    machine = replace(inspect_machine("cpu"), free_bytes=12 * 2**30)

    def load(*_: object) -> NoReturn:
        raise AssertionError("the file holds nothing but its header")

    said = "they need 16.12 GiB as they are stored, and 12.00 GiB are free; choose a smaller model, or one that is"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        make_core(str(path), Parts(machine=machine, load_forward=load))
