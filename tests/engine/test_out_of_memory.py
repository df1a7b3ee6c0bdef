"""A step for which the device has no memory: who ends, who goes on, and what is left behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.device import on_device
from chairlift.engine.execution import runner as runner_module
from chairlift.errors import EngineDead
from chairlift.models import TorchForward
from chairlift.models.attention import BatchMetadata
from chairlift.params import RequestOutput
from tests.engine.support import GREEDY, PROMPTS, core_of, make_llm, tokens_of
from tests.engine.test_poison import ahead, assert_clean, greedy

SAID = (
    "the device ran out of memory in a step with this sequence; lower max_num_batched_tokens or kv_cache_memory_bytes"
)
LONG_PROMPT = list(range(1, 60))
PENALISED = greedy(repetition_penalty=1.5, frequency_penalty=0.5)


@pytest.fixture(params=[0, 1], ids=["waits", "1 ahead"])
def make(tiny: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """An engine that has no memory for some batches; so many launches ahead."""

    def make_with(is_too_large: Callable[[BatchMetadata], bool]) -> LLM:
        hidden = TorchForward.hidden

        def hidden_if_it_fits(self: TorchForward, batch: BatchMetadata, *rest: Any) -> torch.Tensor:
            result = hidden(self, batch, *rest)
            if is_too_large(batch):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        monkeypatch.setattr(TorchForward, "hidden", hidden_if_it_fits)
        with ahead(request.param):
            return make_llm(tiny, attention_backend="torch", max_steps_per_launch=1)

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
    """Where rows are looked up on the device, before anything is computed."""
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
    with make(lambda _: True) as llm:
        core_of(llm)._runner._is_divided = True
        with pytest.raises(EngineDead, match="CUDA out of memory"):
            llm.generate([PROMPTS[0]], GREEDY)


# --- the device of a launch


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

    with make_llm(tiny, attention_backend="torch") as llm:
        monkeypatch.setattr(runner_module, "on_device", note)
        hidden = TorchForward.hidden

        def noted(*args: Any) -> torch.Tensor:
            seen.append("hidden")
            return hidden(*args)

        monkeypatch.setattr(TorchForward, "hidden", noted)
        llm.generate([PROMPTS[0]], asking(GREEDY, 1)[0])
    assert seen == ["on cpu", "hidden", "off"]
