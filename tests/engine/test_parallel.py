"""A model over several ranks: the same answers as from one, and an end for all when one is lost."""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from chairlift import LLM, SamplingParams
from chairlift.engine.execution.runner import Launch
from chairlift.errors import ConfigurationError, EngineDead
from chairlift.params import RequestOutput, StructuredOutputs
from chairlift.plan import StepPlan
from tests.engine.async_support import DEADLINE_S, make_async_llm
from tests.engine.rank_support import PARTS, pids_of_ranks
from tests.engine.support import GREEDY, PROMPTS, VOCAB_SIZE, core_of, make_llm, make_tiny_checkpoint, tokens_of
from tests.engine.test_poison import failing, greedy
from tests.support.checkpoints import random_prompts
from tests.support.engines import hooked
from tests.support.server_process import SERVE, running

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values of two layers, two heads of 8 in float32
SETTINGS: dict[str, Any] = {"attention_backend": "torch", "max_seq_len": 128, "max_num_batched_tokens": 32}
DRAWN = SamplingParams(
    n=2, seed=9, max_tokens=8, min_tokens=3, top_p=0.9, top_k=50, frequency_penalty=0.5, bad_words=["a", "bc"]
)
DIGITS = StructuredOutputs(regex="[0-9]{3}-[0-9]{2}|none")
LETTERS = {ord(letter): 100.0 for letter in "abcdefgh"}  # as a bias: nothing else is drawn
PREFIX, *ENDINGS = random_prompts(3, [60, 3, 5, 4, 9], VOCAB_SIZE)
LONG = [PREFIX[:40] + ending * 2 for ending in ENDINGS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four heads of two key/value heads, biases, and a vocabulary that cannot be divided."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), attention_bias=True, mlp_bias=True, **heads)


def make_divided(model: str, size: int) -> LLM:
    """Three slots, and memory for two of their sequences. Of more ranks each has one key/value head of the two."""
    token_bytes = TOKEN_BYTES if size == 1 else TOKEN_BYTES // 2
    return make_llm(model, PARTS, **SETTINGS, tensor_parallel_size=size, kv_cache_memory_bytes=192 * token_bytes)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def divided(model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_divided(model, request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, list[RequestOutput]]:
    with make_divided(model, 1) as llm:
        return answers(llm)


def answers(llm: LLM) -> dict[str, list[RequestOutput]]:
    """Requests for all that the scheduler does: chunks, drawing, reuse, stop strings, rows that yield memory, rest."""
    letters = SamplingParams(max_tokens=10, seed=1, logit_bias=LETTERS, ignore_eos=True)
    written = llm.generate(PROMPTS[:4], letters)
    stops = [letters.model_copy(update={"stop": [output.outputs[0].text[5:8]]}) for output in written]
    results = {
        "greedy": llm.generate(PROMPTS, GREEDY),
        "drawn": llm.generate(PROMPTS[:4], DRAWN),
        "scored": llm.generate(PROMPTS[3:4], greedy(logprobs=2, prompt_logprobs=1)),
        "structured": llm.generate(PROMPTS[:4], greedy(structured_outputs=DIGITS)),
        "stopped": llm.generate(PROMPTS[:4], stops),
    }
    core_of(llm).use_idle_time()
    llm.reset_prefix_cache()
    results["reused"] = [llm.generate([PREFIX + ending], GREEDY)[0] for ending in ENDINGS]
    results["yielding"] = llm.generate(LONG, greedy(max_tokens=24))
    core = core_of(llm)
    assert core.read_stats().totals.num_preemptions > 0
    core.check()
    results["again"] = llm.generate(PROMPTS[:1], GREEDY)
    return results


def logprobs_of(output: RequestOutput) -> list[dict[int, float]]:
    listed = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    assert len(listed) == 39 + 12
    return [{token: each.logprob for token, each in (place or {}).items()} for place in listed]


def test_two_and_four_ranks_answer_as_one_does(divided: LLM, expected: dict[str, list[RequestOutput]]) -> None:
    found = answers(divided)
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs), name
        assert [each.num_cached_tokens for each in found[name]] == [each.num_cached_tokens for each in outputs], name
    assert [each.num_cached_tokens for each in expected["reused"]] == [0, 60, 60, 60]
    assert all(re.fullmatch("[0-9]{3}-[0-9]{2}|none", each.outputs[0].text) for each in found["structured"])
    for own, other in zip(*(logprobs_of(each["scored"][0]) for each in (found, expected)), strict=True):
        assert list(own) == list(other)
        assert own == pytest.approx(other, abs=1e-4)


def test_ranks_make_the_vectors_that_one_makes(divided: LLM, model: str) -> None:
    with make_divided(model, 1) as llm:
        expected = llm.embed(PROMPTS[:4])
    for own, other in zip(divided.embed(PROMPTS[:4]), expected, strict=True):
        assert own.embedding == pytest.approx(other.embedding, abs=1e-4)


def test_ranks_of_a_recurrent_model_answer_as_one_does_and_find_its_states(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes = {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 3}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    path = make_tiny_checkpoint(tmp_path, model_type="qwen3_5_text", layer_types=kinds, **heads, **sizes)
    found = []
    for size in (1, 2):
        with make_llm(path, PARTS, **SETTINGS, tensor_parallel_size=size, kv_cache_memory_bytes=2**21) as llm:
            outputs = llm.generate(LONG, GREEDY)
            turn = [*LONG[-1], *tokens_of(outputs)[-1], 7, 8, 9]
            outputs += llm.generate([turn], GREEDY)
            found.append((tokens_of(outputs), outputs[-1].num_cached_tokens))
            core_of(llm).check()
    assert found[0] == found[1]
    assert found[0][1] == len(turn) - 4


def test_ranks_that_guess_tokens_and_verify_them_answer_as_one_does(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verse = random_prompts(8, [12], VOCAB_SIZE)[0] * 4
    params = greedy(max_tokens=24)
    with make_divided(model, 1) as llm:
        expected = tokens_of(llm.generate([verse, *PROMPTS[:2]], params))
    guessing = SETTINGS | {"batch_invariant": True, "speculation": "ngram"}
    with make_llm(model, PARTS, **guessing, tensor_parallel_size=2) as llm:
        core = core_of(llm)
        # As if every step took as long, however many tokens it verifies. The other ranks believe it.
        monkeypatch.setattr(core._journal, "note_launch", lambda plan, _: plan.num_steps / 1000)
        assert tokens_of(llm.generate([verse, *PROMPTS[:2]], params)) == expected
        assert core.read_stats().totals.num_accepted_tokens > 10


def test_a_request_that_is_refused_or_left_changes_nothing_on_any_rank(divided: LLM) -> None:
    core = core_of(divided)
    expected = tokens_of(divided.generate(PROMPTS[:3], GREEDY))
    (request,) = divided.inputs.prepare("twice", PROMPTS[1], GREEDY).requests
    core.add(request)
    with pytest.raises(ValueError, match="already here"):
        core.add(request)
    core.step()
    assert core.abort(request.request_id) is not None
    assert core.abort("nobody") is None
    assert tokens_of(divided.generate(PROMPTS[:3], GREEDY)) == expected


def test_an_interrupted_step_ends_the_ranks(divided: LLM) -> None:
    pids = pids_of_ranks(core_of(divided))
    assert len(pids) == divided.config.tensor_parallel_size - 1
    with failing(divided, "launch", KeyboardInterrupt(), after=0), pytest.raises(KeyboardInterrupt):
        divided.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineDead, match="a step ended with KeyboardInterrupt, so that the ranks no longer agree"):
        divided.generate(PROMPTS, GREEDY)
    assert not any(map(psutil.pid_exists, pids))


def test_a_rank_that_is_killed_in_a_step_ends_all_with_an_error(model: str) -> None:
    with make_divided(model, 2) as llm:
        (pid,) = pids_of_ranks(core_of(llm))
        num_launches = count(1)

        def kill_at_third(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
            if next(num_launches) == 3:
                os.kill(pid, signal.SIGKILL)
            return launch(plan)

        for _ in range(2):
            with hooked(llm, kill_at_third), pytest.raises(EngineDead, match="rank 1 was killed by signal 9"):
                llm.generate(PROMPTS, GREEDY)
        assert not psutil.pid_exists(pid)


async def test_a_rank_that_is_killed_while_nothing_runs_is_noticed(model: str) -> None:
    async with make_async_llm(model, PARTS, **SETTINGS, tensor_parallel_size=2) as llm:
        outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY)]
        assert len(outputs[-1].outputs[0].token_ids) == 12
        (pid,) = pids_of_ranks(core_of(llm))
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(llm.died.wait(), DEADLINE_S)
        assert not llm.is_healthy
        with pytest.raises(EngineDead, match="the engine died: rank 1 was killed by signal 9"):
            await llm.generate(PROMPTS[0], GREEDY).__anext__()


@pytest.mark.slow
def test_a_server_has_ranks_which_end_with_it_however_it_ends(model: str) -> None:
    with running(SERVE, model, "-tp", "2", "--attention-backend", "torch", "--dtype", "float32") as server:
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 4
        children = psutil.Process(server.popen.pid).children()
        (rank,) = (each for each in children if "chairlift.engine.follower" in " ".join(each.cmdline()))
        server.popen.kill()
        rank.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not work with this model: its 4 attention heads"),
        ({"attention_backend": "cpu"}, "attention_backend cpu works with tensor_parallel_size 1 only; choose torch"),
        ({"quantization": "int8"}, "quantization int8 works with tensor_parallel_size 1 only; leave one of the two"),
        ({"quantization": "fp8", "device": "cpu"}, "quantization fp8 needs a GPU that multiplies bfloat16, and Triton"),
        ({"device": "cuda:1"}, "device cuda:1 is a single one, and tensor_parallel_size is 2; choose cpu or cuda"),
    ],
)
def test_what_does_not_work_over_ranks_is_refused_at_start(model: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_llm(model, **{"tensor_parallel_size": 2, **settings})
