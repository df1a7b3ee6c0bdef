"""The Python call: what goes in, what comes out, and the right exception when something is wrong."""

import gc
import io
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tqdm import tqdm

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.runner import Launch
from chairlift.errors import EngineClosed, InvalidRequest, QueueFull
from chairlift.params import RequestOptions
from chairlift.plan import StepPlan
from tests.engine.support import END_TOKEN, ENGINE, GREEDY, PROMPTS, VOCAB_SIZE, assert_idle, make_llm, tokens_of
from tests.scheduler.first_come_queue import FirstComeQueue
from tests.support.engines import HOOKED, hooked, make_core

HI, HO = ([{"role": "user", "content": text}] for text in ("hi", "ho"))
RANDOM = SamplingParams(max_tokens=10, ignore_eos=True)


def test_a_text_texts_and_token_ids_are_prompts(llm: LLM) -> None:
    (single,) = llm.generate("hi", GREEDY)
    texts = llm.generate(["hi", "ho"], GREEDY)
    ids = llm.generate([[104, 105], [104, 111]], GREEDY)
    assert llm.generate([], GREEDY) == []
    assert (single.prompt, single.prompt_token_ids) == ("hi", [104, 105])
    assert [output.prompt for output in texts + ids] == ["hi", "ho", None, None]
    assert tokens_of([single]) == tokens_of(texts)[:1]
    assert tokens_of(ids) == tokens_of(texts)


def test_outputs_stand_in_prompt_order_whoever_ends_first(llm: LLM) -> None:
    params = [GREEDY.model_copy(update={"max_tokens": count}) for count in (30, 1, 17, 2, 9, 25, 3, 12)]
    outputs = llm.generate(PROMPTS, params)
    again = llm.generate(PROMPTS[:2], params[:2])
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in tokens_of(outputs)] == [30, 1, 17, 2, 9, 25, 3, 12]
    assert len({output.request_id for output in outputs + again}) == 10


def test_a_conversation_or_several_are_answered_through_the_template(llm: LLM) -> None:
    longer = [*HO, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    both = llm.chat([HI, longer], GREEDY)
    assert tokens_of(llm.chat(HI, GREEDY)) == tokens_of(both)[:1]
    assert tokens_of(both) == tokens_of(llm.generate([llm.inputs.encode_chat(each) for each in (HI, longer)], GREEDY))


def test_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = RANDOM.model_copy(update={"n": 5, "seed": 11})
    first, second = (llm.generate("hi", params)[0] for _ in range(2))
    single = llm.generate("hi", params.model_copy(update={"n": 1}))
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 5
    assert tokens_of([first]) == tokens_of([second])
    assert tokens_of(single) == tokens_of([first])[:1]


def test_without_a_seed_calls_differ_and_the_configurations_seed_repeats_the_whole(tiny: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        with make_llm(tiny, seed=seed) as llm:
            runs.append(tokens_of(llm.generate(["hi", "hi"], RANDOM) + llm.generate("hi", RANDOM)))
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[1] + runs[2]}) == 6


FILTERED = SamplingParams(seed=9, max_tokens=12, top_p=0.9, top_k=50, frequency_penalty=0.5, min_tokens=3)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(tiny: str, llm: LLM) -> None:
    with make_llm(tiny, max_batch_size=8, max_steps_per_launch=1, max_num_batched_tokens=8) as other:
        for params in (GREEDY, SamplingParams(seed=9, max_tokens=12, ignore_eos=True), FILTERED):
            alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
            crowd, chunked = llm.generate(PROMPTS, params), other.generate(PROMPTS, params)
            assert tokens_of(crowd) == tokens_of(alone) == tokens_of(chunked)


ALL_ENDS = {"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 2}
ALL_ENDS_BUT_ONE = {"stop_token_ids": list(range(VOCAB_SIZE - 1)), "min_tokens": 2}
LIMITS: dict[str, list[Any]] = {
    "temperature": [1e-320, 1e300],  # next to 0, and beyond float32
    "top_p": [1e-300, 1.0 - 1e-16],
    "min_p": [1e-300],
    "top_k": [2**31, 2**63 - 1, 2**63],
    "seed": [2**63 - 1, -(2**63)],
    "repetition_penalty": [1e-60, 1e300],
    "logit_bias": [dict.fromkeys(range(VOCAB_SIZE), bias) for bias in (-100.0, 100.0)],
}
EXTREMES: list[dict[str, Any]] = [
    *({name: value, "n": 3} for name, values in LIMITS.items() for value in values),
    {"min_p": 1.0, "top_k": 1, "top_p": 1e-9},
    {"repetition_penalty": 1e-38, "logit_bias": {ord("h"): 100.0}},  # at the end of float32
    {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 60},
    *({**ALL_ENDS, "temperature": temperature} for temperature in (0.0, 1.0)),
    {**ALL_ENDS_BUT_ONE, "ignore_eos": False},  # the one is the model's own
    {**ALL_ENDS_BUT_ONE, "top_p": 0.5},
]


@pytest.mark.parametrize("fields", EXTREMES)
def test_extreme_parameters_are_refused_or_give_tokens(llm: LLM, fields: dict[str, Any]) -> None:
    try:
        outputs = llm.generate("hi", SamplingParams(**{"max_tokens": 5, "seed": 1, "ignore_eos": True, **fields}))
    except (ValidationError, InvalidRequest):
        outputs = []
    assert all(tokens and max(tokens) < VOCAB_SIZE for tokens in tokens_of(outputs))
    assert_idle(llm)


@pytest.mark.parametrize("eos", [VOCAB_SIZE, 100_000, -1, [], None, [100_000, END_TOKEN]])
def test_answers_end_at_the_tokenizers_end_token_whatever_a_file_says(tiny: str, tmp_path: Path, eos: Any) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for name in ("generation_config.json", "config.json"):
        path = tmp_path / name
        given = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**given, "eos_token_id": eos}))
    eager = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=4, logit_bias={END_TOKEN: 100.0})
    with make_llm(str(tmp_path)) as llm:
        (tokens,) = tokens_of(llm.generate("hi", eager))
        assert_idle(llm)
    assert [token == END_TOKEN for token in tokens] == [False, False, True]


def test_several_threads_take_turns(llm: LLM) -> None:
    results: list[list[list[int]]] = []
    expected = tokens_of(llm.generate(PROMPTS, GREEDY))

    def generate() -> None:
        results.append(tokens_of(llm.generate(PROMPTS, GREEDY)))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_idle(llm)
    assert results == [expected, expected, expected]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_there_is_a_progress_bar_on_a_terminal_only_and_if_wanted(tiny: str) -> None:
    shown = []
    for stream, use_tqdm in [(io.StringIO(), True), (Terminal(), False), (Terminal(), True)]:
        with LLM.of(make_core(tiny, max_batch_size=3, **ENGINE), make_bar=partial(tqdm, file=stream)) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=use_tqdm)
        shown.append(stream.getvalue())
    assert shown[:2] == ["", ""]
    assert "8/8" in shown[2]


def test_no_garbage_is_collected_while_an_engine_is_made(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []

    def make(config: EngineConfig) -> EngineCore:
        collects.append(gc.isenabled())
        return EngineCore(config)

    monkeypatch.setattr("chairlift.engine.llm.EngineCore", make)
    LLM(tiny, **ENGINE).close()
    collects.append(gc.isenabled())
    gc.disable()
    try:
        LLM(tiny, **ENGINE).close()
        collects.append(gc.isenabled())
    finally:
        gc.enable()
    assert collects == [False, True, False, False]


def test_an_engine_may_have_another_queue(tiny: str) -> None:
    served: list[str] = []

    def note(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        served.extend(row.key.tag.split("-")[0] for row in plan.rows)
        return launch(plan)

    core = make_core(tiny, replace(HOOKED, new_queue=FirstComeQueue), **ENGINE, max_batch_size=1)
    with LLM.of(core) as llm, hooked(llm, note):
        llm.generate(["first", "urgent"], GREEDY, options=[RequestOptions(), RequestOptions(priority=-1)])
    assert list(dict.fromkeys(served)) == ["0", "1"]


def test_what_is_wrong_is_refused_before_anything_is_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    flat: Any = [1, 2, 3]
    with monkeypatch.context() as patch:
        patch.delattr(EngineCore, "step")
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            llm.generate(["good", ""], GREEDY)
        with pytest.raises(InvalidRequest, match="a string or a list of token ids"):
            llm.generate(flat, GREEDY)
        with pytest.raises(InvalidRequest, match="at least one message"):
            llm.chat([HI, []], GREEDY)
        with pytest.raises(InvalidRequest, match="2 prompts, but 3") as caught:
            llm.generate(["a", "b"], [GREEDY] * 3)
        assert caught.value.param == "params"
        with pytest.raises(InvalidRequest, match="1 prompts, but 0"):
            llm.chat(HI, [])
    assert_idle(llm)


@pytest.mark.parametrize("size", [0, 1])
def test_more_prompts_than_the_queue_and_the_slots_hold_are_all_answered(tiny: str, llm: LLM, size: int) -> None:
    with make_llm(tiny, max_queue_size=size) as other:
        assert tokens_of(other.generate(PROMPTS, GREEDY)) == tokens_of(llm.generate(PROMPTS, GREEDY))


def test_a_queue_that_cannot_hold_all_choices_refuses_them_and_a_share_of_it_makes_prompts_wait(
    tiny: str, llm: LLM
) -> None:
    five, six = (GREEDY.model_copy(update={"n": count}) for count in (5, 6))
    options = [RequestOptions(tenant="a", queue_share=0.5, priority=-index) for index in range(len(PROMPTS))]
    with make_llm(tiny, max_queue_size=2) as other:
        assert len(other.generate("hi", five)[0].outputs) == 5
        with pytest.raises(InvalidRequest, match="n is 6, and at most 5"):
            other.generate(["hi"] * 3, [GREEDY, GREEDY, six])
        assert_idle(other)
        outputs = other.generate(PROMPTS, GREEDY, options=options)  # they displace nobody
        assert tokens_of(outputs) == tokens_of(llm.generate(PROMPTS, GREEDY))
        with pytest.raises(QueueFull, match="your share of the waiting queue is full"):
            other.generate("hi", five, options=options[0])
        assert_idle(other)


def test_a_closed_llm_refuses_and_closing_twice_is_fine(tiny: str) -> None:
    llm = make_llm(tiny)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("hi", GREEDY)
    with pytest.raises(EngineClosed):
        llm.chat(HI, GREEDY)
