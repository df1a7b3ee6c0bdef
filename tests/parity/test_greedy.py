"""Greedy tokens equal transformers' in float32, for every shape of model and every mix of batch, chunk and steps."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.scheduler import Request
from tests.support.checkpoints import assert_greedy, make_checkpoint, random_prompts, reference_tokens

NUM_TOKENS = 12
LENGTHS = [1, 5, 17, 40, 3, 64, 2, 29]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}

ENGINES: dict[str, dict[str, Any]] = {
    "all at once": {"max_batch_size": 8, "max_num_batched_tokens": 512, "max_steps_per_launch": 1},
    "one slot": {"max_batch_size": 1, "max_num_batched_tokens": 512, "max_steps_per_launch": 1},
    "fewer slots than requests": {"max_batch_size": 3, "max_num_batched_tokens": 512, "max_steps_per_launch": 4},
    "small chunks": {"max_batch_size": 8, "max_num_batched_tokens": 8, "max_steps_per_launch": 1},
    "odd chunks, multistep": {"max_batch_size": 5, "max_num_batched_tokens": 7, "max_steps_per_launch": 3},
    "long launches": {"max_batch_size": 8, "max_num_batched_tokens": 512, "max_steps_per_launch": 16},
}


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_configurations_give_the_tokens_of_transformers(tmp_path: Path, shape: str, is_tied: bool) -> None:
    seed = 2 * list(SHAPES).index(shape) + is_tied
    rng = random.Random(seed)
    kv_heads = seed % 3 + 1
    heads = kv_heads * (1, 2, 5)[seed // 3 % 3]
    fields = {
        **SHAPES[shape],
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": rng.choice([8, 16, 32]),
        "hidden_size": heads * rng.choice([6, 12, 20]),
        "num_hidden_layers": rng.choice([1, 2, 4]),
        "tie_word_embeddings": is_tied,
    }
    reference = make_checkpoint(tmp_path, seed=seed, **fields)
    prompts = random_prompts(seed, [rng.randint(1, 50) for _ in range(6)])
    slots = rng.randint(1, 6)
    budget = rng.randint(slots, 60)
    steps = rng.choice([1, 2, 5])
    with LLM(str(tmp_path), max_batch_size=slots, max_num_batched_tokens=budget, max_steps_per_launch=steps) as llm:
        outputs = llm.generate(prompts, greedy())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids, NUM_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and what transformers answers to `random_prompts(2, LENGTHS)`."""
    directory = tmp_path_factory.mktemp("checkpoint")
    reference = make_checkpoint(directory, seed=5)
    return directory, [reference_tokens(reference, prompt, NUM_TOKENS) for prompt in random_prompts(2, LENGTHS)]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_every_mix_of_batch_chunk_and_steps_gives_the_same_tokens(
    checkpoint: tuple[Path, list[list[int]]], engine: dict[str, Any]
) -> None:
    directory, expected = checkpoint
    with LLM(str(directory), **engine) as llm:
        outputs = llm.generate(random_prompts(2, LENGTHS), greedy())
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_answers_of_different_lengths_end_each_at_their_own(checkpoint: tuple[Path, list[list[int]]]) -> None:
    directory, expected = checkpoint
    params = [greedy(1 + index) for index in range(len(LENGTHS))]
    with LLM(str(directory), max_batch_size=4, max_steps_per_launch=8) as llm:
        outputs = llm.generate(random_prompts(2, LENGTHS), params)
    assert [o.outputs[0].token_ids for o in outputs] == [tokens[: 1 + i] for i, tokens in enumerate(expected)]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("steps", [1, 3])
def test_aborts_in_the_middle_change_nothing_for_those_who_stay(
    checkpoint: tuple[Path, list[list[int]]], steps: int
) -> None:
    directory, expected = checkpoint
    config = EngineConfig(model=str(directory), max_batch_size=3, max_num_batched_tokens=16, max_steps_per_launch=steps)
    core = EngineCore(config)
    for index, prompt in enumerate(random_prompts(2, LENGTHS)):
        core.add(Request(str(index), prompt, greedy(), NUM_TOKENS, seed=0))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(LENGTHS))}
    aborts = {2: "1", 5: "6", 9: "3"}  # one that runs, one that waits, one that has ended or not
    for step in itertools.takewhile(lambda step: core.has_work or step <= 9, range(200)):
        if step in aborts:
            core.abort(aborts[step])
        core.check()
        for event in core.step() if core.has_work else []:
            tokens[event.request_id] += event.new_token_ids
    assert not core.has_work
    core.check()
    for index, answer in enumerate(expected):
        if index not in (1, 6, 3):
            assert tokens[str(index)] == answer
        assert tokens[str(index)] == answer[: len(tokens[str(index)])]
    assert len(tokens["1"]) < NUM_TOKENS
    assert tokens["6"] == []


def test_an_answer_may_fill_its_slot_to_the_last_token(checkpoint: tuple[Path, list[list[int]]]) -> None:
    directory, expected = checkpoint
    prompts = random_prompts(2, LENGTHS)
    with LLM(str(directory), max_batch_size=8, max_seq_len=64 + NUM_TOKENS, max_steps_per_launch=8) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert output.outputs[0].token_ids[:NUM_TOKENS] == tokens
        assert len(prompt) + len(output.outputs[0].token_ids) == 64 + NUM_TOKENS
