"""The sampler against a plain reference, row by row in float64; what a batch must not change; log-probabilities."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaForCausalLM

import chairlift
from chairlift import LLM, SamplingParams
from chairlift.engine.sampling import drawing
from chairlift.engine.sampling.additions import Scattered
from chairlift.engine.sampling.drawing import INVALID_TOKEN, cutoff_by_bisection, cutoff_by_sorting, uniforms
from chairlift.engine.sampling.sampler import Sampler, pick_logprobs
from chairlift.params import RequestOutput, StructuredOutputs, TokenLogprobs
from chairlift.scheduler import RequestState
from tests.engine.support import ENGINE, PROMPTS, make_llm, make_request, row_of
from tests.support.checkpoints import make_checkpoint, random_prompts

VOCAB = 40
Floats = npt.NDArray[np.float64]


def random_logits(seed: int, num_rows: int, vocab_size: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(num_rows, vocab_size, generator=generator)


def sample_once(requests: Sequence[RequestState], logits: torch.Tensor) -> list[int]:
    sampler = Sampler(logits.shape[1], 8, torch.device("cpu"))
    batch = sampler.prepare(list(map(row_of, requests)), 1)
    tokens: list[int] = sampler.sample(logits.clone(), batch, 0).tokens.tolist()
    return tokens


def exact_probabilities(logits: Sequence[float], params: SamplingParams) -> Floats:
    """Returns what a row is drawn from: bias, temperature, min-p, top-k (ties stay), top-p of what top-k leaves."""
    scores = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    scores = scores / params.temperature
    if params.min_p:
        shares = np.exp(scores - scores.max())
        scores[shares < params.min_p] = -np.inf
    if params.top_k > 0:
        kth = np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
        scores[scores < kth] = -np.inf
    weights = np.exp(scores - scores.max())
    if params.top_p < 1.0:
        order = np.argsort(-weights)
        mass_before = np.concatenate([[0.0], np.cumsum(weights[order] / weights.sum())[:-1]])
        weights[order[mass_before >= params.top_p]] = 0.0
    probabilities: Floats = weights / weights.sum()
    return probabilities


def expected(requests: Sequence[RequestState], logits: torch.Tensor) -> list[int]:
    """The tokens in whose shares of [0, 1) the numbers of the rows lie."""
    drawn = zip(logits.tolist(), requests, uniforms(list(map(row_of, requests)), 1)[0], strict=True)
    shares = ((np.cumsum(exact_probabilities(row, request.params)), number) for row, request, number in drawn)
    return [int(np.searchsorted(ends, number, side="right")) for ends, number in shares]


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature below 1": {"temperature": 0.4},
    "temperature above 1": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_k of all": {"top_k": VOCAB},
    "top_k of more than all": {"top_k": 10 * VOCAB},
    "top_k off by -1": {"top_k": -1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "min_p of 1": {"min_p": 1.0},
    "logit_bias": {"logit_bias": {0: 4.0, 7: -3.5, 39: 2.0}},
    "top_k then top_p": {"top_k": 6, "top_p": 0.8},
    "min_p then top_p": {"min_p": 0.1, "top_p": 0.9},
    "everything": {"temperature": 1.7, "top_k": 12, "top_p": 0.85, "min_p": 0.02, "logit_bias": {3: 3.0}},
}


def test_rows_draw_by_inverting_the_exact_distribution_each_its_own() -> None:
    logits = random_logits(1, 200)
    for name, fields in FILTERS.items():
        requests = [make_request(SamplingParams(**fields), seed=seed) for seed in range(200)]
        assert sample_once(requests, logits) == expected(requests, logits), name
    mixed = [make_request(SamplingParams(**fields), seed=seed) for seed in range(10) for fields in FILTERS.values()]
    assert sample_once(mixed, logits[: len(mixed)]) == expected(mixed, logits[: len(mixed)])


SHARES = [float(np.log(share)) for share in (0.1, 0.5, 0.15, 0.25)]
TIED = [0.0, 2.0, 2.0, 2.0, -1.0]


@pytest.mark.parametrize(
    ("logits", "params", "drawn"),
    [
        ([1.0, 5.0, 3.0], {"temperature": 0.0}, {1}),
        ([1.0, 5.0, 3.0], {"temperature": 0.0, "logit_bias": {1: -100.0}}, {2}),
        ([1.0, 5.0, 3.0], {"temperature": 0.0, "logit_bias": {0: 100.0}}, {0}),
        *(([1.0] * 3, {"logit_bias": {1: -100.0}}, {0, 2}), ([1.0] * 3, {"logit_bias": {1: 100.0}}, {1})),
        *(([0.0, 3.0, 1.0, 2.0], {"top_k": 1}, {1}), ([0.0, 3.0, 1.0, 2.0], {"top_k": 3}, {1, 2, 3})),
        (TIED, {"top_k": 2}, {1, 2, 3}),  # all that tie with the last of them stay
        *(([0.0, 1.0, 0.5], {"top_k": 3}, {0, 1, 2}), ([0.0, 1.0, 0.5], {"top_k": 1000}, {0, 1, 2})),
        *((SHARES, {"top_p": 1e-9}, {1}), (SHARES, {"top_p": 0.45}, {1}), (SHARES, {"top_p": 0.55}, {1, 3})),
        *((SHARES, {"top_p": 0.8}, {1, 2, 3}), (SHARES, {"top_p": 0.95}, {0, 1, 2, 3})),
        *((SHARES, {"min_p": 0.4}, {1, 3}), (SHARES, {"min_p": 0.25}, {1, 2, 3})),
        (SHARES, {"min_p": 0.15}, {0, 1, 2, 3}),
        ([0.0, 0.1, 0.2, -5.0], {"temperature": 1e-30}, {2}),
    ],
)
def test_just_those_tokens_can_be_drawn_that_the_parameters_leave(
    logits: list[float], params: dict[str, Any], drawn: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(SamplingParams(**params), seed=seed) for seed in range(400)]
    for find_cutoff in (cutoff_by_sorting, cutoff_by_bisection):
        monkeypatch.setattr(drawing, "cutoff_by_sorting", find_cutoff)
        assert set(sample_once(requests, torch.tensor([logits] * len(requests)))) == drawn


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("num_allowed", "top_k"), [(1000, 2**24), (1000, 50), (1000, 1), (5, 50), (1, 2**24)])
def test_bisection_keeps_the_tokens_that_sorting_keeps(scale: float, num_allowed: int, top_k: int) -> None:
    scaled = scale * random_logits(5, 7, 1000)
    scaled[2] = scaled[2, 0]  # all tie
    scaled[:, num_allowed:] = -torch.inf
    scaled -= scaled.amax(dim=-1, keepdim=True)
    top_p = torch.tensor([1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999, torch.inf])[:, None]
    wanted = torch.full((7, 1), float(top_k))
    by_bisection, by_sorting = (find(scaled, wanted, top_p) for find in (cutoff_by_bisection, cutoff_by_sorting))
    assert torch.equal(scaled >= by_bisection, scaled >= by_sorting)


def test_greedy_rows_take_the_likeliest_whatever_random_rows_are_beside_them() -> None:
    logits = random_logits(3, 12)
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.2)
    drawn = SamplingParams(temperature=3.0, top_p=0.9, min_p=0.01)
    tokens = sample_once([make_request(greedy if row % 2 else drawn, seed=row) for row in range(12)], logits)
    assert tokens[1::2] == logits.argmax(dim=-1).tolist()[1::2]
    assert tokens[0::2] != logits.argmax(dim=-1).tolist()[0::2]


def test_greedy_rows_take_the_first_of_equals_and_nothing_of_numbers_that_are_none() -> None:
    logits = random_logits(4, 5)
    logits[0, [9, 30]] = 90.0
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, :-1] = -torch.inf
    greedy = [make_request(SamplingParams(temperature=0.0)) for _ in range(5)]
    assert sample_once(greedy, logits) == [9, INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN, VOCAB - 1]


def test_a_row_that_gets_no_token_changes_no_counts_of_another() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    requests = [make_request(params, slot=slot) for slot in range(2)]
    sampler = Sampler(VOCAB, 2, torch.device("cpu"))
    batch = sampler.prepare(list(map(row_of, requests)), 2)
    logits = torch.zeros(2, VOCAB)
    logits[:, VOCAB - 1] = 0.5  # the neighbour of the first token of the slot behind
    logits[1] = torch.nan
    assert sampler.sample(logits.clone(), batch, 0).tokens.tolist() == [VOCAB - 1, INVALID_TOKEN]
    logits[0, VOCAB - 1] = 1.5
    assert sampler.sample(logits.clone(), batch, 1).tokens.tolist() == [VOCAB - 1, INVALID_TOKEN]  # 1.5 - 1 > 0


def test_a_seeded_row_draws_the_same_whatever_is_beside_it_and_however_long_the_launch() -> None:
    steps = [random_logits(10 + step, 1) for step in range(12)]
    crowd = [SamplingParams(**fields) for fields in FILTERS.values()]

    def draw(num_beside: int, launch: int) -> list[int]:
        request = make_request(SamplingParams(temperature=1.3), slot=0, seed=77)
        beside = [make_request(params, seed=row) for row, params in enumerate(crowd[:num_beside])]
        sampler = Sampler(VOCAB, 8, torch.device("cpu"))
        for first in range(0, len(steps), launch):
            batch = sampler.prepare([*map(row_of, beside), row_of(request)], launch)
            tokens = []
            for step in range(launch):
                logits = torch.cat([random_logits(99, num_beside), steps[first + step]])
                tokens.append(int(sampler.sample(logits, batch, step).tokens[-1]))
            request.accept(tokens)
        return request.token_ids[1:]

    alone = draw(num_beside=0, launch=1)
    assert len(set(alone)) > 3
    for num_beside, launch in [(0, 4), (0, 12), (3, 1), (len(crowd), 1), (len(crowd), 3), (len(crowd), 12)]:
        assert draw(num_beside, launch) == alone


@pytest.mark.parametrize("vocab_size", [60_000, 200_000])  # a block has two rows, and one that is larger than it
def test_rows_are_drawn_from_in_blocks_with_greedy_ones_between_them(vocab_size: int) -> None:
    logits = random_logits(4, 7, vocab_size)
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)]
    requests = [make_request(params[row % 3], seed=row) for row in range(7)]
    alone = [sample_once([request], logits[row : row + 1])[0] for row, request in enumerate(requests)]
    assert sample_once(requests, logits) == alone
    assert len(set(alone)) == 7


def test_uniforms_lie_between_0_and_1_are_spread_evenly_and_differ_between_steps_and_seeds() -> None:
    drawn = uniforms([row_of(make_request(SamplingParams(), seed=seed)) for seed in range(-500, 500)], 50)
    assert drawn.shape == (50, 1000)
    assert 0.0 <= drawn.min() < drawn.max() < 1.0
    assert drawn.mean() == pytest.approx(0.5, abs=0.005)
    for rows, beside in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        assert abs(np.corrcoef(rows.ravel(), beside.ravel())[0, 1]) < 0.02
    seeds = [0, 1, -1, 2, -2, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**63 + 126]
    drawn = uniforms([row_of(make_request(SamplingParams(), seed=seed)) for seed in seeds], 100)
    assert len(set(drawn.ravel().tolist())) == 1000


def test_uniforms_depend_on_a_requests_seed_and_its_number_of_tokens_only() -> None:
    first, second = (make_request(SamplingParams(), seed=seed) for seed in (5, 6))
    long_prompt = make_request(SamplingParams(), prompt=[1, 2, 3], seed=5)
    both = uniforms([row_of(first), row_of(second)], 4)
    assert uniforms([row_of(second)], 4)[:, 0].tolist() == both[:, 1].tolist()
    assert uniforms([row_of(long_prompt)], 4)[:, 0].tolist() == both[:, 0].tolist()
    first.accept([9, 9])
    assert uniforms([row_of(first)], 2)[:, 0].tolist() == both[2:, 0].tolist()


def test_what_a_thousand_biased_tokens_cost_does_not_grow_with_the_rows_that_share_them() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={token: 1.0 for token in range(1024)})
    rows = [row_of(make_request(params, slot=row)) for row in range(128)]
    sampler = Sampler(2000, 128, torch.device("cpu"))
    start = time.process_time()
    for _ in range(20):
        batch = sampler.prepare(rows, num_steps=1)
    assert time.process_time() - start < 3.0  # entry by entry it took some 10 s
    (bias,) = batch.additions
    assert isinstance(bias, Scattered)
    assert bias.rows.shape == (128 * 1024,)
    assert bias.values.sum() == 128 * 1024


def test_what_shapes_the_distribution_is_read_in_one_module() -> None:
    engine = Path(chairlift.__file__).parent / "engine"
    knobs = re.compile(r"\.(temperature|top_k|top_p|min_p)\b")
    assert {path.name for path in engine.rglob("*.py") if knobs.search(path.read_text())} == {"drawing.py"}


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
