"""Log-probabilities in the engine: equal to transformers', for every mix of rows, chunks and steps per launch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.engine.sampling.sampler import LogprobTensors, pick_logprobs, score_tokens
from chairlift.params import RequestOutput, StructuredOutputs, TokenLogprobs
from tests.engine.support import ENGINE, make_llm
from tests.support.checkpoints import make_checkpoint, random_prompts

LENGTHS = [1, 2, 17, 40, 64]
TOLERANCE = 1e-4
SCORED = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2)

ENGINES: dict[str, dict[str, Any]] = {
    "all at once": {"max_batch_size": 5, "max_num_batched_tokens": 512, "max_steps_per_launch": 1},
    "small chunks": {"max_batch_size": 5, "max_num_batched_tokens": 7, "max_steps_per_launch": 1},
    "several steps": {"max_batch_size": 3, "max_num_batched_tokens": 32, "max_steps_per_launch": 4},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LlamaForCausalLM]:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return str(directory), make_checkpoint(directory, seed=7)


@torch.inference_mode()
def reference(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """float32 `[len(tokens) - 1, vocab]`: what follows each token but the last."""
    rows: torch.Tensor = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(dim=-1)
    return rows


def assert_scored(row: torch.Tensor, token: int, entry: TokenLogprobs, num_top: int) -> None:
    """The token stands first, then the likeliest ones in order; ranks count from 1."""
    first, *others = entry
    assert first == token
    assert entry[token].logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
    assert entry[token].rank == int((row > row[token]).sum()) + 1
    top = row.topk(num_top).indices.tolist()
    assert others == [each for each in top if each != token]
    for rank, each in enumerate(top, 1):
        assert entry[each].rank == rank
        assert entry[each].logprob == pytest.approx(row[each].item(), abs=TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_tokens_and_prompts_are_scored_as_transformers_would(
    checkpoint: tuple[str, LlamaForCausalLM], engine: dict[str, Any]
) -> None:
    directory, model = checkpoint
    prompts = random_prompts(4, LENGTHS)
    with LLM(directory, **ENGINE, **engine) as llm:
        outputs = llm.generate(prompts, SCORED)
    for prompt, output in zip(prompts, outputs, strict=True):
        (choice,) = output.outputs
        rows = reference(model, prompt + choice.token_ids)
        assert output.prompt_logprobs is not None
        assert choice.logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert len(choice.logprobs) == 9
        assert output.prompt_logprobs[0] is None
        for index, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert entry is not None
            assert_scored(rows[index - 1], prompt[index], entry, 2)
        for index, entry in enumerate(choice.logprobs):
            assert_scored(rows[len(prompt) - 1 + index], choice.token_ids[index], entry, 3)


def scores(output: RequestOutput) -> list[list[float]]:
    return [[entry[token].logprob for token in entry] for entry in output.outputs[0].logprobs or []]


def test_scored_rows_among_others_each_get_what_they_asked_for(tiny: str) -> None:
    asked = [None, 0, 5, None, 20, 1, 0, None]
    prompts = random_prompts(1, [3, 17, 1, 40, 8, 2, 25, 11], 259)
    params = [SCORED.model_copy(update={"logprobs": number, "prompt_logprobs": None}) for number in asked]
    with make_llm(tiny) as llm:
        outputs = llm.generate(prompts, params)
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for number, output, single in zip(asked, outputs, alone, strict=True):
        assert (output.outputs[0].logprobs is None) == (number is None)
        assert output.prompt_logprobs is None
        for got, expected in zip(scores(output), scores(single), strict=True):
            assert number is not None
            assert len(got) in (max(number, 1), number + 1)
            assert got == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_row_with_a_grammar_keeps_one_score_per_token(tiny: str, steps: int) -> None:
    params = SCORED.model_copy(update={"structured_outputs": StructuredOutputs(choice=["grammar"]), "logprobs": 0})
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        free, ruled = llm.generate(["ab", "ab"], [SCORED, params])
    assert bytes(ruled.outputs[0].token_ids) == b"grammar"
    assert [next(iter(entry)) for entry in ruled.outputs[0].logprobs or []] == list(b"grammar")
    assert [next(iter(entry)) for entry in free.outputs[0].logprobs or []] == free.outputs[0].token_ids


def test_only_the_prompt_is_scored_with_max_tokens_zero(tiny: str) -> None:
    with make_llm(tiny) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    (choice,) = output.outputs
    assert (choice.token_ids, choice.text, choice.finish_reason) == ([], "", "length")
    assert [entry and list(entry) for entry in output.prompt_logprobs or []] == [None, [2], [3]]


def test_the_sum_of_all_tokens_is_at_hand(tiny: str) -> None:
    with make_llm(tiny) as llm:
        (scored,) = llm.generate("hi", SCORED)
        (plain,) = llm.generate("hi", SCORED.model_copy(update={"logprobs": None}))
    entries = zip(scored.outputs[0].logprobs or [], scored.outputs[0].token_ids, strict=True)
    total = sum(entry[token].logprob for entry, token in entries)
    assert scored.outputs[0].cumulative_logprob == pytest.approx(total)
    assert plain.outputs[0].cumulative_logprob is None


# --- the parts


def test_ties_share_a_rank_and_nothing_is_likelier_than_the_first() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    (entry,) = pick_logprobs(logprobs, torch.tensor([2]), 2).to_host([2])
    assert {token: each.rank for token, each in entry.items() if token == 2} == {2: 2}
    assert entry[0].logprob == pytest.approx(-0.6931472)
    assert entry[0].rank == 1


def test_more_likeliest_tokens_than_there_are_are_all_of_them() -> None:
    logprobs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    (entry,) = pick_logprobs(logprobs, torch.tensor([1]), 20).to_host([20])
    assert list(entry) == [1, 0, 2]


def test_positions_of_several_steps_are_joined_in_order() -> None:
    parts = [pick_logprobs(torch.eye(3)[[index]], torch.tensor([index]), 1) for index in range(3)]
    entries = LogprobTensors.join(parts).to_host([0, 1, 1])
    assert [list(entry) for entry in entries] == [[0], [1], [2]]


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_positions_are_scored_in_blocks_without_a_seam(num_tokens: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, 11)
    tokens = [index % 11 for index in range(num_tokens)]
    entries = score_tokens(logits, tokens, 2, lambda hidden: hidden.clone()).to_host([2] * num_tokens)
    expected = logits.log_softmax(dim=-1)
    assert [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)] == pytest.approx(
        expected[range(num_tokens), tokens].tolist()
    )
