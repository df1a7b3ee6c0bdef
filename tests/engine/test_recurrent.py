"""Models with recurrent states in a real engine: the same bits whatever is reused, guessed, late or preempted."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM
from chairlift.config import AttentionBackend, SpeculationMethod
from chairlift.models import load_forward
from chairlift.params import RequestOptions, RequestOutput, StructuredOutputs
from tests.engine.support import END_TOKEN, GREEDY, VOCAB_SIZE, core_of, state_of, tokens_of
from tests.engine.test_late_masks import IMPATIENT, Lateness
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.engines import HOOKED, WrappedForward, ahead, grammars_limited, make_core

IN_TORCH: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "falcon_h1": {  # a layer keeps keys, values and a state
        "num_hidden_layers": 2,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
}
_NATIVE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **IN_TORCH["qwen3_5_text"],
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "lfm2": {**IN_TORCH["lfm2"], "hidden_size": 64},
    "falcon_h1": {**IN_TORCH["falcon_h1"], "head_dim": 32, "mamba_d_head": 16, "mamba_d_state": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "head_dim": 32,
        "mamba_num_heads": 2,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "hidden_size": 64,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 2,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "attention_multiplier": 0.2,
    },
}
SHAPES = {AttentionBackend.TORCH: IN_TORCH, AttentionBackend.CPU: _NATIVE}
"""By backend: families, in shapes that it takes."""

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": END_TOKEN,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "batch_invariant": True,
    "max_batch_size": 3,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 2**22,
    "max_steps_per_launch": 1,
}
(SYSTEM,) = random_prompts(5, [120], 250)
TAILS = random_prompts(6, [1, 9, 30, 4, 17, 2], 250)
PROMPTS = [SYSTEM + tail for tail in TAILS] + [SYSTEM[:70] + tail for tail in TAILS[:3]]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 8},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "scored": {"prompt_logprobs": 1},
    "a grammar": {"structured_outputs": StructuredOutputs(regex="[a-z]{4}[0-9]+")},
}
PARAMS = [
    GREEDY.model_copy(update={"logprobs": 2, **case}) for case, _ in zip(cycle(CASES.values()), PROMPTS, strict=False)
]


MODELS = [
    ("qwen3_5_text", AttentionBackend.TORCH),
    ("qwen3_5_text", AttentionBackend.CPU),
    ("lfm2", AttentionBackend.CPU),
    ("falcon_h1", AttentionBackend.CPU),
    ("granitemoehybrid", AttentionBackend.CPU),
    pytest.param(("nemotron_h", AttentionBackend.CPU), marks=pytest.mark.slow),
    pytest.param(("lfm2", AttentionBackend.TORCH), marks=pytest.mark.slow),
    pytest.param(("falcon_h1", AttentionBackend.TORCH), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=MODELS, ids=" on ".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a checkpoint, in a folder with the name of the backend that runs it."""
    family, backend = request.param
    directory = tmp_path_factory.mktemp("recurrent") / backend
    make_checkpoint(directory, seed=3, model_type=family, **{**TINY, **SHAPES[backend][family]})
    make_byte_tokenizer(directory)
    return str(directory)


def make(model: str, num_ahead: int = 0, **config: Any) -> LLM:
    settings = {**SETTINGS, "attention_backend": Path(model).name, **config}
    return LLM.of(make_core(model, ahead(num_ahead) if num_ahead else HOOKED, **settings))


@pytest.fixture(scope="module")
def forgetful(model: str) -> Iterator[LLM]:
    """An engine that reuses nothing."""
    with make(model, enable_prefix_caching=False) as llm:
        yield llm


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def parts_of(outputs: list[RequestOutput]) -> list[Any]:
    """Returns what is generated, with its log-probabilities bit for bit; how many tokens were guessed is no part of
    it.
    """
    choices = [
        [replace(choice, num_accepted_tokens=0, num_rejected_tokens=0) for choice in output.outputs]
        for output in outputs
    ]
    return [choices, [output.prompt_logprobs for output in outputs]]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_ahead": 1, "max_steps_per_launch": 4},
        {"state_snapshot_bytes": 0},
        {"speculation": SpeculationMethod.NGRAM, "num_speculative_tokens": 5},
    ],
    ids=["plain", "ahead", "no room for states", "guessing"],
)
def test_answers_are_those_of_an_engine_that_reuses_nothing(model: str, forgetful: LLM, config: dict[str, Any]) -> None:
    with make(model, **config) as llm:
        expected = parts_of(forgetful.generate(PROMPTS, PARAMS))
        assert parts_of(llm.generate(PROMPTS, PARAMS)) == expected
        again = llm.generate(PROMPTS, PARAMS)
        assert parts_of(again) == expected
        assert sum(cached(again)) > 200
        core_of(llm).check()


def test_a_row_whose_mask_is_late_goes_on_with_the_right_state(
    model: str, forgetful: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = PROMPTS[:4], [PARAMS[4], PARAMS[0], PARAMS[4], PARAMS[4]]
    expected = parts_of(forgetful.generate(prompts, params))
    with make(model) as llm, grammars_limited(llm, IMPATIENT):
        lateness = Lateness(monkeypatch)
        lateness.begin()
        assert parts_of(llm.generate(prompts, params)) == expected
        assert lateness.num_late > 5


def test_a_common_beginning_of_any_length_is_cached_from_the_third_request_on(model: str, forgetful: LLM) -> None:
    with make(model) as llm:
        for length in (64, 120):
            prompts = [[length, *SYSTEM[1:length], *tail] for tail in TAILS[:4]]
            outputs = [llm.generate([prompt], PARAMS[0])[0] for prompt in prompts]
            assert parts_of(outputs) == parts_of(forgetful.generate(prompts, PARAMS[0]))
            assert all(number >= 0.9 * length for number in cached(outputs)[2:])
        core = core_of(llm)
        stats, layout = core.read_stats(), core.cache.layout.states
        assert layout is not None
        assert stats.num_snapshot_bytes in range(2 * layout.row_bytes, 9 * layout.row_bytes, layout.row_bytes)
        assert stats.state_distances.count == 6  # the first of each length has nothing in common with others
        assert 64 <= stats.state_distances.sum < 2 * 120


def test_the_next_turn_finds_all_but_what_is_new(model: str, forgetful: LLM) -> None:
    with make(model) as llm:
        prompt = PROMPTS[1]
        (output,) = llm.generate([prompt], GREEDY)
        for _ in range(2):
            prompt = [*prompt, *tokens_of([output])[0], 7, 8, 9]
            (output,) = llm.generate([prompt], GREEDY)
            assert output.num_cached_tokens == len(prompt) - 4  # the answer's last token was not computed
            assert parts_of([output]) == parts_of(forgetful.generate([prompt], GREEDY))
        slots = core_of(llm).read_snapshot().slots
        assert [slot.num_states for slot in slots] == [2, 0, 0]  # of the first turn; the others are too near


def assert_next_turn_is_cached(llm: LLM, plain: LLM) -> None:
    """Several answers that end at tokens which launches do not know in advance, and their next turns."""
    prompts = PROMPTS[:3]
    whole = tokens_of(plain.generate(prompts, GREEDY))
    params = [
        GREEDY.model_copy(update={"stop_token_ids": [answer[place]]})
        for answer, place in zip(whole, (3, 4, 6), strict=True)
    ]
    ended = llm.generate(prompts, params)
    assert [output.outputs[0].finish_reason for output in ended] == ["stop"] * 3
    turns = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, tokens_of(ended), strict=True)]
    outputs = [llm.generate([turn], GREEDY)[0] for turn in turns]
    assert parts_of(outputs) == parts_of(plain.generate(turns, GREEDY))
    assert cached(outputs) == [len(turn) - 4 for turn in turns]
    core_of(llm).check()


@pytest.mark.parametrize(("num_ahead", "num_steps"), [(0, 4), (1, 1)])
def test_a_state_stops_at_the_end_token_of_an_answer(
    model: str, forgetful: LLM, num_ahead: int, num_steps: int
) -> None:
    with make(model, num_ahead, max_steps_per_launch=num_steps) as llm:
        assert_next_turn_is_cached(llm, forgetful)


@pytest.mark.parametrize(("num_ahead", "num_steps"), [(0, 4), (1, 2)])
def test_a_stop_string_leaves_a_state_just_before_it(
    model: str, forgetful: LLM, num_ahead: int, num_steps: int
) -> None:
    letters = GREEDY.model_copy(update={"max_tokens": 48, "temperature": 1.0, "seed": 4})
    letters = letters.model_copy(update={"allowed_token_ids": list(range(97, 123))})
    (whole,) = forgetful.generate([SYSTEM], letters)
    stop = whole.outputs[0].text[36:40]
    with make(model, num_ahead, max_steps_per_launch=num_steps) as llm:
        (ended,) = llm.generate([SYSTEM], letters.model_copy(update={"stop": [stop]}))
        assert ended.outputs[0].stop_reason == stop
        turn = [*SYSTEM, *ended.outputs[0].text.encode(), 7, 8, 9]
        (output,) = llm.generate([turn], GREEDY)
        assert parts_of([output]) == parts_of(forgetful.generate([turn], GREEDY))
        assert len(turn) - 3 > output.num_cached_tokens >= len(turn) - 3 - 8 - num_steps
        core_of(llm).check()


def test_a_preempted_request_goes_on_with_its_state(model: str, forgetful: LLM) -> None:
    long = GREEDY.model_copy(update={"max_tokens": 30})
    expected = tokens_of(forgetful.generate(PROMPTS[:2], long))
    with make(model, max_batch_size=1, preempt_after=2) as llm:
        core = core_of(llm)
        low, high = (
            llm.inputs.prepare(name, prompt, long, options=RequestOptions(priority=priority)).requests[0]
            for name, prompt, priority in (("low", PROMPTS[0], 1), ("high", PROMPTS[1], 0))
        )
        core.add(low)
        state = state_of(core, low)
        while state.num_output_tokens < 6:
            core.step()
        core.add(high)
        other = state_of(core, high)
        while core.has_work:
            core.step()
        core.check()
    assert state.num_preemptions == 1
    assert [each.token_ids[each.num_prompt_tokens :] for each in (state, other)] == expected


def test_rows_that_lose_their_slots_for_lack_of_memory_get_the_same_answers(model: str, forgetful: LLM) -> None:
    layout = core_of(forgetful).cache.layout
    assert layout.states is not None
    snapshot_bytes = 2 * layout.states.row_bytes
    memory = {
        "kv_cache_memory_bytes": 256 * layout.token_bytes + 3 * layout.states.slot_bytes(8) + snapshot_bytes,
        "state_snapshot_bytes": snapshot_bytes,
        "max_seq_len": 192,
    }
    long, prompts = GREEDY.model_copy(update={"max_tokens": 90}), [SYSTEM[number : number + 50] for number in range(3)]
    with make(model, **memory) as llm:
        assert core_of(llm).config.cache_tokens == 256
        assert tokens_of(llm.generate(prompts, long)) == tokens_of(forgetful.generate(prompts, long))
        assert core_of(llm).read_stats().totals.num_preemptions > 0
        core_of(llm).check()


class LimitedForward(WrappedForward):
    """Has no memory for the sixth step, after it has moved all states."""

    num_steps = 0

    def hidden(self, *args: Any) -> torch.Tensor:
        result = super().hidden(*args)
        self.num_steps += 1
        if self.num_steps == 6:
            raise torch.OutOfMemoryError("out of memory")
        return result


def test_all_rows_of_a_step_without_memory_end_and_the_next_ones_do_not(model: str, forgetful: LLM) -> None:
    parts = replace(HOOKED, load_forward=lambda *given: LimitedForward(load_forward(*given)))
    with LLM.of(make_core(model, parts, **SETTINGS)) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY)
        assert [output.outputs[0].error is not None for output in outputs] == [True, True]
        assert tokens_of(llm.generate(PROMPTS[:2], GREEDY)) == tokens_of(forgetful.generate(PROMPTS[:2], GREEDY))
        core_of(llm).check()
