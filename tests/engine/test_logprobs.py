"""Log-probabilities in the engine: equal to transformers', for every mix of rows, chunks and steps per launch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.engine.sampling.sampler import pick_logprobs
from chairlift.params import RequestOutput, StructuredOutputs, TokenLogprobs
from tests.engine.support import ENGINE, PROMPTS, make_llm
from tests.support.checkpoints import make_checkpoint, random_prompts

LENGTHS = [1, 2, 64, 65, 66, 40]  # positions are scored in blocks of 64
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
    """The token stands first, then the likeliest ones in order; ranks count from 1; rounding may swap neighbours."""
    first, *others = entry
    assert first == token
    assert entry[token].logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
    surely, perhaps = (int((row > row[token] + margin).sum()) for margin in (TOLERANCE, -TOLERANCE))
    assert surely < entry[token].rank <= perhaps  # which counts the token itself
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
        assert output.prompt_logprobs is not None
        assert choice.logprobs is not None
        entries = [*output.prompt_logprobs, *choice.logprobs]
        tokens = prompt + choice.token_ids
        assert (entries[0], len(output.prompt_logprobs), len(choice.logprobs)) == (None, len(prompt), 9)
        for place, (row, entry) in enumerate(zip(reference(model, tokens), entries[1:], strict=True), 1):
            assert entry is not None
            assert_scored(row, tokens[place], entry, 2 if place < len(prompt) else 3)


def scores(output: RequestOutput) -> list[list[float]]:
    return [[entry[token].logprob for token in entry] for entry in output.outputs[0].logprobs or []]


def test_scored_rows_among_others_each_get_what_they_asked_for(tiny: str) -> None:
    asked = [None, 0, 5, None, 20, 1, 0, None]
    params = [SCORED.model_copy(update={"logprobs": number, "prompt_logprobs": None}) for number in asked]
    with make_llm(tiny) as llm:
        outputs = llm.generate(PROMPTS, params)
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    for number, output, single in zip(asked, outputs, alone, strict=True):
        (choice,) = output.outputs
        assert (choice.logprobs is None) == (choice.cumulative_logprob is None) == (number is None)
        assert output.prompt_logprobs is None
        for got, expected in zip(scores(output), scores(single), strict=True):
            assert len(got) in (max(number or 0, 1), (number or 0) + 1)
            assert got == pytest.approx(expected, abs=TOLERANCE)
        if choice.logprobs is not None:
            own = [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
            assert choice.cumulative_logprob == pytest.approx(sum(own))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_row_with_a_grammar_keeps_one_score_per_token(tiny: str, steps: int) -> None:
    params = SCORED.model_copy(update={"structured_outputs": StructuredOutputs(choice=["grammar"]), "logprobs": 0})
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        free, ruled = (output.outputs[0] for output in llm.generate(["ab", "ab"], [SCORED, params]))
    assert bytes(ruled.token_ids) == b"grammar"
    for choice in (free, ruled):
        assert [next(iter(entry)) for entry in choice.logprobs or []] == choice.token_ids


def test_ties_share_a_rank_nothing_is_likelier_than_the_first_and_more_than_all_are_all() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    (entry,) = pick_logprobs(logprobs, torch.tensor([2]), 2).to_host([2])
    assert (entry[2].rank, entry[0].rank) == (2, 1)
    assert entry[0].logprob == pytest.approx(-0.6931472)
    logprobs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    (entry,) = pick_logprobs(logprobs, torch.tensor([1]), 20).to_host([20])
    assert list(entry) == [1, 0, 2]
