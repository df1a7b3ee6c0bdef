"""Vectors and scores of prompts: what transformers computes, the same bits in every batch, and a sound engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift import LLM
from chairlift.engine.text.embedding import vector_of
from chairlift.engine.text.inputs import PROMPT_ONLY
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.prompt_work import LabelLogits, LabelTask, PooledStates, Pooling, PoolTask, PromptResult, PromptTask
from tests.engine.support import GREEDY, PROMPTS, TRACELESS, assert_idle, core_of, make_llm, tokens_of
from tests.engine.test_poison import POISON, poisoned
from tests.support.engines import ahead

LONG = PROMPTS[3]  # three chunks of a step's 16 tokens
LAST, MEAN, LABELS = PoolTask(Pooling.LAST), PoolTask(Pooling.MEAN), LabelTask((7, 9))


@pytest.fixture(scope="module")
def chunking(native: str) -> Iterator[LLM]:
    """Computes prompts in chunks, which others of all lengths cut."""
    with make_llm(native, **TRACELESS) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def reference(native: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(native)
    return model.eval()


def run(llm: LLM, *work: tuple[list[int], PromptTask | None]) -> list[PromptResult | None]:
    """Returns what comes of each prompt's task; None for those that are continued, and for those that fail."""
    core, results = core_of(llm), dict[str, PromptResult | None]()
    for index, (prompt, task) in enumerate(work):
        params = GREEDY if task is None else PROMPT_ONLY
        (request,) = llm.inputs.prepare(str(index), prompt, params, task=task).requests
        results[request.request_id] = None
        core.add(request)
    while core.has_work:
        for event in core.step():
            before, now = results[event.request_id], event.prompt_result
            results[event.request_id] = now if before is None else before if now is None else before.followed_by(now)
    return list(results.values())


@torch.inference_mode()
def test_vectors_are_those_of_transformers(chunking: LLM, reference: Any) -> None:
    work = [(prompt, task) for prompt in PROMPTS for task in (LAST, MEAN)]
    for (prompt, task), result in zip(work, run(chunking, *work), strict=True):
        states = reference.model(torch.tensor([prompt])).last_hidden_state[0]
        whole = states[-1] if task is LAST else states.mean(dim=0)
        assert torch.tensor(vector_of(result, is_normalized=False)) == pytest.approx(whole, abs=1e-5)
        half = whole[:16] / whole[:16].norm()
        assert torch.tensor(vector_of(result, 16)) == pytest.approx(half, abs=1e-5)


@torch.inference_mode()
def test_labels_are_the_logits_after_the_prompt(chunking: LLM, reference: Any) -> None:
    for prompt, result in zip(PROMPTS, run(chunking, *((prompt, LABELS) for prompt in PROMPTS)), strict=True):
        assert isinstance(result, LabelLogits)
        expected = reference(torch.tensor([prompt])).logits[0, -1, [7, 9]].tolist()
        assert result.values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("task", [LAST, MEAN, LABELS])
def test_bits_are_the_same_alone_and_beside_chats(native: str, chunking: LLM, task: PromptTask) -> None:
    with make_llm(native) as whole:  # in one chunk each
        alone = [run(whole, (prompt, task))[0] for prompt in PROMPTS]
    together = run(chunking, *((prompt, kind) for prompt in PROMPTS for kind in (None, task)))
    assert together[1::2] == alone


def test_a_last_state_needs_one_token_and_a_mean_needs_all(native: str) -> None:
    with make_llm(native) as llm:
        first, second = (llm.embed([LONG])[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
        assert first.embedding == second.embedding
        (state,) = run(llm, (LONG, MEAN))
        assert isinstance(state, PooledStates)
        assert state.num_tokens == 40
        assert llm.generate([LONG], GREEDY)[0].num_cached_tokens == 39  # an embedding leaves its keys and values, too
        assert_idle(llm)


def test_a_step_may_be_planned_before_a_result_is_known(native: str) -> None:
    work = [(prompt, kind) for prompt in PROMPTS for kind in (LAST, None, MEAN, LABELS)]
    with make_llm(native, ahead(2), **TRACELESS) as llm, make_llm(native, **TRACELESS) as plain:
        assert run(llm, *work) == run(plain, *work)
        assert_idle(llm)


def test_what_is_no_number_ends_its_prompt_alone(tiny: str) -> None:
    with make_llm(tiny, attention_backend="torch") as llm, poisoned(llm):
        results = run(llm, ([POISON], LAST), (PROMPTS[1], MEAN), ([1, POISON, 2], MEAN), ([POISON], LABELS))
        assert [None if each is None else each.is_sound for each in results] == [False, True, False, False]
        with pytest.raises(RequestFailed, match="what was computed of this prompt is not finite"):
            llm.embed([[POISON, 1]])
        assert_idle(llm)


def test_texts_are_scored_by_the_angle_of_their_vectors(chunking: LLM) -> None:
    same, other = chunking.score("a snail", ["a snail", "the north wind"])
    (query, *texts) = (each.embedding for each in chunking.embed(["a snail", "the north wind"]))
    assert same.score == pytest.approx(1.0)
    assert other.score == pytest.approx(sum(a * b for a, b in zip(query, texts[0], strict=True)))
    assert -1.0 < other.score < 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dimensions": 33}, "dimensions: 33 is not between 1 and the vector's 32"),
        ({"prompt_name": "query"}, "the checkpoint has no prompt 'query', only none"),
    ],
)
def test_wrong_settings_of_vectors_are_refused(chunking: LLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chunking.embed("a snail", **settings)
    assert tokens_of(chunking.generate("a snail", GREEDY))
