"""Speculation changes nothing but the time: tokens, texts, ends, log-probabilities are the same with and without it."""

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar, GrammarLimits, Patience
from chairlift.engine.text.deltas import CumulativeOutput
from chairlift.engine.text.grammar import CompilerLimits
from chairlift.engine.text.inputs import Generation
from chairlift.engine.text.outputs import GenerationState
from chairlift.errors import ConfigurationError
from chairlift.models import open_checkpoint
from chairlift.params import CompletionOutput, RequestOptions, StructuredOutputs
from chairlift.scheduler import Request
from tests.support.engines import ahead, core_of, grammars_limited
from tests.support.gguf_files import write_model
from tests.support.kernels import needs_kernels

NATIVE: dict[str, Any] = {"attention_backend": "cpu"}
BACKENDS: dict[str, dict[str, Any]] = {
    "native bfloat16": NATIVE | {"dtype": "bfloat16"},
    "native int8": NATIVE | {"dtype": "bfloat16", "quantization": "int8"},
    "torch float32": {"attention_backend": "torch", "dtype": "float32", "batch_invariant": True},
}
# Few slots and a small budget: prompts are computed in chunks beside rows that decode, and urgent ones take slots.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "max_seq_len": 256,
    "max_batch_size": 5,
    "preempt_after": 6,
    "max_num_batched_tokens": 40,
}
SONG = "One two three, said the crow. One two three, said the cow. "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_crow": {"type": "string", "maxLength": 8},
        "number_of_the_cows": {"type": "integer", "maximum": 99, "minimum": 0},
        "is_one_of_the_three": {"type": "boolean"},
    },
    "required": ["name_of_the_crow", "number_of_the_cows", "is_one_of_the_three"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1, "presence_penalty": 0.4, "logprobs": 2},
    {"temperature": 0.3, "seed": 2, "n": 3, "top_k": 8},
    {"temperature": 0.0, "stop": ["cow", "ee,"], "min_tokens": 3},
    {"temperature": 0.0, "logprobs": 3, "min_tokens": 12},
    {"temperature": 1.0, "seed": 3, "min_p": 0.1, "top_p": 0.9, "logit_bias": {40: 1.5}},
    {"temperature": 0.0, "bad_words": ["crow"]},
    {"temperature": 0.0, "structured_outputs": {"regex": "(one two )*three"}},
    {"temperature": 0.9, "seed": 4, "structured_outputs": {"json": SCHEMA}, "n": 2, "logprobs": 1},
    {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
    {"temperature": 0.0, "prompt_logprobs": 1},
]

Answer = tuple[list[int], str, object, object, object]


def answer(output: CompletionOutput) -> Answer:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, logprobs


def make_prompt(rng: random.Random) -> list[int] | str:
    if rng.random() < 0.5:
        return SONG * rng.randrange(1, 3)
    return [rng.randrange(10, 200) for _ in range(rng.randrange(2, 40))] * rng.randrange(1, 4)


class Run:
    """Serves requests, and aborts others that come between them."""

    def __init__(self, num_requests: int, **config: Any) -> None:
        rng = random.Random(5)
        self.answers: list[list[Answer]] = []
        with LLM(**(ENGINE | config)) as llm:
            core = core_of(llm)
            assert core is not None
            states: list[GenerationState] = []
            doomed = deque[Request]()
            for step in range(100 * num_requests):
                if step % 4 == 0 and len(states) < num_requests:  # urgent ones come while others have the slots
                    generation = self._next(llm, len(states), rng)
                    states.append(llm._outputs.open(generation))
                    core.add(*generation.requests)
                    doomed += llm.inputs.prepare("doomed", SONG, SamplingParams(max_tokens=90, seed=1)).requests
                    core.add(doomed[-1])
                for request_id in llm._outputs.process(core.step()).to_abort:
                    core.abort(request_id)
                if doomed and step % 4 == 3:
                    core.abort(doomed.popleft().request_id)
                if not core.has_work and len(states) == num_requests:
                    break
            assert not core.has_work
            core.check()
            self.answers = [
                [answer(output) for output in CumulativeOutput(state.generation).add(state.take()).outputs]
                for state in states
            ]
            self.stats = core.read_stats()

    def _next(self, llm: LLM, index: int, rng: random.Random) -> Generation:
        params = SamplingParams(max_tokens=rng.randrange(12, 70), **KINDS[index % len(KINDS)])
        options = RequestOptions(priority=-(index % 3), prediction=SONG if index % 4 == 0 else "")
        return llm.inputs.prepare(f"r{index}", make_prompt(rng), params, options=options)


def compare(num_requests: int, backend: str, num_guessed: int | str, **more: Any) -> Run:
    """Asserts that all is the same with speculation, and returns that run."""
    config = BACKENDS[backend] | more
    without = Run(num_requests, **config)
    run = Run(num_requests, **config, speculation="ngram", num_speculative_tokens=num_guessed)
    for own, other in zip(run.answers, without.answers, strict=True):
        assert own == other
    assert without.stats.totals.num_drafted_tokens == 0
    return run


@pytest.mark.parametrize(
    ("backend", "num_guessed", "num_requests"),
    [
        pytest.param("native bfloat16", 7, len(KINDS), marks=needs_kernels),
        pytest.param("native bfloat16", "auto", len(KINDS), marks=needs_kernels),
        pytest.param("native int8", 3, len(KINDS), marks=needs_kernels),
        pytest.param("torch float32", 5, 6, marks=pytest.mark.slow),
    ],
)
def test_everything_is_the_same_with_speculation(backend: str, num_guessed: int | str, num_requests: int) -> None:
    stats = compare(num_requests, backend, num_guessed).stats
    totals = stats.totals
    assert totals.num_preemptions > 0
    assert totals.num_drafted_tokens >= totals.num_accepted_tokens
    assert totals.num_accepted_tokens > 10 or num_guessed == "auto"  # which depends on what steps take
    assert sum(stats.accepted_at) == totals.num_accepted_tokens
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)


@needs_kernels
def test_everything_is_the_same_with_the_weights_of_a_gguf_file(tmp_path: Path) -> None:
    bundled = open_checkpoint("bundled").path
    model = AutoModelForCausalLM.from_pretrained(bundled)
    path = write_model(model, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    run = compare(6, "native bfloat16", 5, model=str(path), tokenizer=str(bundled))
    assert run.stats.totals.num_accepted_tokens > 10


@needs_kernels
def test_a_right_prediction_is_accepted_and_a_wrong_one_is_not() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    with LLM(device="cpu", speculation="ngram", num_speculative_tokens=8, enable_prefix_caching=False) as llm:
        (plain,) = llm.generate(["A fox"], params, options=RequestOptions(speculation="off"))
        (wrong,) = llm.generate(["A fox"], params, options=RequestOptions(prediction="#!$ #!$"))
        text = plain.outputs[0].text
        (right,) = llm.generate(["A fox"], params, options=RequestOptions(prediction=text))
    assert plain.outputs[0].token_ids == wrong.outputs[0].token_ids == right.outputs[0].token_ids
    assert (plain.outputs[0].num_accepted_tokens, plain.outputs[0].num_rejected_tokens) == (0, 0)
    assert right.outputs[0].num_accepted_tokens >= 24
    assert right.outputs[0].num_accepted_tokens > wrong.outputs[0].num_accepted_tokens


@needs_kernels
def test_an_answer_that_comes_again_is_accepted_nearly_whole_but_none_behind_a_wall_is() -> None:
    """`y` has no answers, but may reuse the prompts of `x`; with another salt nobody may."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    accepted = []
    with LLM(device="cpu", speculation="ngram", num_speculative_tokens=8) as llm:
        for tenant, salt in [("x", ""), ("x", ""), ("y", ""), ("x", "s")]:
            (output,) = llm.generate(["A fox"], params, options=RequestOptions(tenant=tenant, cache_salt=salt))
            accepted.append(output.outputs[0].num_accepted_tokens)
        llm.reset_prefix_cache()
        (output,) = llm.generate(["A fox"], params, options=RequestOptions(tenant="x"))
        accepted.append(output.outputs[0].num_accepted_tokens)
    assert min(accepted[1:3]) >= 32
    assert accepted[0] == accepted[3] == accepted[4] < 20


@needs_kernels
def test_what_a_grammar_forces_is_accepted_and_changes_nothing() -> None:
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA))
    in_use = GrammarLimits(slow_s=60.0, long_foresight_s=60.0)  # so that none is too slow to guess
    limits = CompilerLimits(in_use=in_use, patience=Patience(min_s=60.0, max_s=60.0))  # however busy the machine is
    with LLM(device="cpu", speculation="ngram", num_speculative_tokens=16) as llm, grammars_limited(llm, limits):
        (plain,) = llm.generate(["A fox"], params, options=RequestOptions(speculation="off"))
        (forced,) = llm.generate(["A fox"], params)
    assert answer(plain.outputs[0]) == answer(forced.outputs[0])
    assert set(json.loads(forced.outputs[0].text)) == set(SCHEMA["properties"])
    assert forced.outputs[0].num_accepted_tokens >= 20  # of the keys: there is nothing to find them in


@needs_kernels
def test_masks_of_guesses_that_are_late_cost_the_guess_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA))
    with LLM(device="cpu", speculation="ngram", num_speculative_tokens=16) as llm:
        (punctual,) = llm.generate(["A fox"], params)
        monkeypatch.setattr(CompiledGrammar, "compute_masks", lambda *_: ())
        (late,) = llm.generate(["A fox"], params)
    assert answer(punctual.outputs[0]) == answer(late.outputs[0])
    assert late.outputs[0].num_accepted_tokens == 0
    assert late.outputs[0].num_rejected_tokens > 20


def test_where_it_would_change_what_is_generated_it_is_refused() -> None:
    said = "speculation would change what is generated with attention_backend torch; leave it out, choose cpu, or set"
    with pytest.raises(ConfigurationError, match=f"{said} batch_invariant"):
        EngineCore(EngineConfig(speculation="ngram", device="cpu", attention_backend="torch"))


def test_it_does_not_run_ahead_of_the_tokens_that_it_guesses_from() -> None:
    config = EngineConfig(device="cpu", attention_backend="torch", batch_invariant=True, speculation="ngram")
    with pytest.raises(AssertionError, match="guesses need the tokens of the launch before"):
        EngineCore(config, ahead(1))
