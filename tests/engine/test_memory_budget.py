"""An engine whose requests would like ten times the memory that there is, and memory that comes back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.cache.memory import MappedMemory, can_map
from chairlift.engine import llm as llm_module
from chairlift.engine import thread
from tests.engine.async_support import last, make_async_llm, wait_until
from tests.engine.support import ENGINE, core_of, make_tiny_checkpoint, tokens_of
from tests.models.cpu.support import BASE, FLOAT32, cpu_bench
from tests.support.forward_bench import SLOT_LEN, Row
from tests.support.kernels import HAS_COMPILER

pytestmark = pytest.mark.skipif(not can_map(torch.device("cpu")), reason="memory comes at once on this platform")

TOKEN_BYTES = 2 * 2 * 32 * 4  # two layers of keys and values of one head, in float32


PROMPTS = [[(7 * i + 3 * j) % 90 + 5 for j in range(40 + 11 * i)] for i in range(20)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=50 + 5 * i, ignore_eos=True, prompt_logprobs=1 if i % 2 else None)
    for i in range(20)
]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """Ten slots of 512 tokens with memory for 640, and results that do not depend on the batch."""
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    model = make_tiny_checkpoint(tmp_path, head_dim=32, max_position_embeddings=512)
    with LLM(model, **ENGINE, max_batch_size=10, kv_cache_memory_bytes=640 * TOKEN_BYTES) as llm:
        yield llm


def test_all_end_with_the_tokens_that_each_has_alone_and_with_whole_scores_of_their_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, PARAMS)  # 4,800 tokens in memory for 640
    core = core_of(llm)
    core.check()
    assert core.read_stats().totals.num_preemptions > 0
    llm.reset_prefix_cache()
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    lengths = [len(output.prompt_logprobs) if output.prompt_logprobs else None for output in together]
    assert lengths == [len(prompt) if index % 2 else None for index, prompt in enumerate(PROMPTS)]


def test_memory_comes_with_tokens_and_goes_when_all_rests(llm: LLM) -> None:
    core = core_of(llm)
    (memory,) = core.cache.memories
    assert isinstance(memory, MappedMemory)
    assert memory.num_resident() == 0
    llm.generate(PROMPTS[-2:], SamplingParams(max_tokens=1))
    used = memory.num_resident()
    assert used > 0
    core.rest()
    core.check()
    assert memory.num_resident() <= used / 4
    assert core.read_stats().cache.num_warm <= 64  # a tenth of 640 tokens


async def test_a_python_call_gives_memory_back_if_no_other_follows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "REST_AFTER_S", 0.01)
    for _ in range(2):  # it works on after a rest
        llm.generate([[7] * 300], SamplingParams(max_tokens=1))
        await wait_until(lambda: core_of(llm).read_stats().cache.num_warm <= 64, "memory is back")


def test_a_slot_beyond_four_gigabytes_and_two_to_the_31_elements_holds_what_any_other_does() -> None:
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    bench = cpu_bench(BASE, FLOAT32)
    tokens = [(5 * i) % 261 for i in range(150)]
    (expected,) = bench.run([Row(0, tokens)])
    num_slots = 2**31 // bench.blocks[0].numel() + 9
    params = KVCacheParams(torch.float32, BASE.num_kv_heads, BASE.head_dim)
    bench.cache = ContinuousBatchingKVCacheManager(params, num_slots, SLOT_LEN, BASE.num_layers, ["cpu"])
    bench.cache.claim_slot(num_slots - 1)
    assert bench.blocks.stride(0) * (num_slots - 1) > 2**31
    (logits,) = bench.run([Row(num_slots - 1, tokens)])
    assert torch.equal(logits, expected)
    bench.cache.check_memory()


async def test_an_engine_that_has_had_nothing_to_do_for_a_while_rests(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "REST_AFTER_S", 0.01)
    async with make_async_llm(tiny) as engine:
        await last(engine.generate([7] * 100, SamplingParams(max_tokens=1), "a"))
        (memory,) = engine._core.cache.memories
        assert isinstance(memory, MappedMemory)
        assert memory.num_resident() > 0  # a tenth may stay warm
        await engine.reset_prefix_cache()
        await wait_until(lambda: memory.num_resident() == 0, "memory is back")
        await last(engine.generate([7] * 100, SamplingParams(max_tokens=1), "b"))  # it works on
