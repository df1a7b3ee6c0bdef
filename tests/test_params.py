"""The parameters of sampling and the configuration: defaults, limits, and what is refused in which words."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.loadtest import BenchConfig
from chairlift.params import CompletionOutput, FinishReason, RequestOutput


def refused(**fields: Any) -> list[tuple[str, str]]:
    """Field and message of everything that is wrong with these."""
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    assert isinstance(caught.value, ValueError)
    return [(".".join(map(str, error["loc"])), error["msg"]) for error in caught.value.errors()]


def test_defaults_are_those_of_vllm() -> None:
    vllms: dict[str, Any] = {"n": 1, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0}
    vllms |= {"top_k": 0, "min_p": 0.0}
    vllms |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    vllms |= {"seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False}
    assert SamplingParams().model_dump(include=set(vllms)) == vllms


NAN, INFINITY = float("nan"), float("inf")
BAD_VALUES: dict[str, dict[Any, str]] = {
    "n": {0: "greater than or equal to 1", 129: "less than or equal to 128", 1.5: "valid integer"},
    "max_tokens": {-1: "greater than or equal to 0"},
    "min_tokens": {-1: "greater than or equal to 0"},
    "temperature": {-0.1: "greater than or equal to 0", NAN: "finite", INFINITY: "finite", "warm": "valid number"},
    "top_p": {0.0: "greater than 0", 1.1: "less than or equal to 1", NAN: "less than or equal to 1"},
    "top_k": {-2: "greater than or equal to -1"},
    "min_p": {-0.1: "greater than or equal to 0", 1.1: "less than or equal to 1"},
    "presence_penalty": {-2.1: "greater than or equal to -2", 2.1: "less than or equal to 2"},
    "frequency_penalty": {-2.1: "greater than or equal to -2", 2.1: "less than or equal to 2"},
    "repetition_penalty": {0.0: "greater than or equal to 0.01", INFINITY: "less than or equal to 100"},
    "seed": {2**63: "less than or equal to", -(2**63) - 1: "greater than or equal to"},
    "ignore_eos": {"perhaps": "valid boolean"},
    "stop": {3: "valid list"},
    "stop_token_ids": {3: "valid list"},
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_a_bad_field_is_named_with_its_bound(field: str) -> None:
    for value, said in BAD_VALUES[field].items():
        ((name, message),) = refused(**{field: value})
        assert name == field
        assert said in message


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("stop", ["a", ""], "stop.1"),
        ("stop", "", "stop.0"),
        ("stop", ["a", 3], "stop.1"),
        ("stop_token_ids", [1, "x"], "stop_token_ids.1"),
        ("logit_bias", {"x": 1.0}, "logit_bias.x.[key]"),
        ("logit_bias", {3: "much"}, "logit_bias.3"),
        *(("logit_bias", {7: 0.0, 8: bias}, "logit_bias.8") for bias in (100.5, -100.5, NAN, INFINITY)),
    ],
)
def test_a_bad_element_is_named_with_its_place(field: str, value: object, where: str) -> None:
    assert [name for name, _ in refused(**{field: value})] == [where]


def test_more_tokens_at_least_than_at_most_are_refused_with_both_numbers() -> None:
    ((_, message),) = refused(min_tokens=9, max_tokens=8)
    assert "min_tokens 9 is above max_tokens 8" in message
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


def test_unknown_fields_and_several_mistakes_are_named_together() -> None:
    for name in ("temprature", "max_token", "best_of", "use_beam_search"):
        assert refused(**{name: 1}) == [(name, "Extra inputs are not permitted")]
    assert [name for name, _ in refused(n=0, top_p=2.0, temprature=1.0)] == ["n", "top_p", "temprature"]


@pytest.mark.parametrize(("stop", "meant"), [("END", ["END"]), (["a", "b"], ["a", "b"]), (None, []), ([], [])])
def test_stop_may_be_one_string_several_or_none(stop: Any, meant: list[str]) -> None:
    assert SamplingParams(stop=stop).stop == meant


def test_values_on_the_bounds_are_taken() -> None:
    for bounds in (
        {"n": 128, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 1.0, "presence_penalty": -2.0},
        {"frequency_penalty": 2.0, "seed": 2**63 - 1, "logit_bias": {7: 100.0, 8: -100.0}},
        {"seed": -(2**63)},
        {"seed": -2},
    ):
        assert SamplingParams.model_validate(bounds).model_dump(include=set(bounds)) == bounds


@pytest.mark.parametrize("value", [-1, None])
def test_a_seed_of_minus_one_is_none(value: int | None) -> None:
    assert SamplingParams(seed=value) == SamplingParams()
    assert SamplingParams(seed=value).seed is None


def test_a_temperature_of_zero_is_greedy_and_the_length_is_open_unless_the_caller_names_it() -> None:
    assert [SamplingParams(temperature=temperature).is_greedy for temperature in (0.0, 0.01)] == [True, False]
    params = [SamplingParams(), SamplingParams(max_tokens=None), SamplingParams(max_tokens=16)]
    assert [each.is_max_tokens_open for each in params] == [True, True, False]


def test_an_output_is_finished_when_every_choice_is() -> None:
    output = RequestOutput("a", "prompt", [1, 2], [CompletionOutput(0), CompletionOutput(1)])
    assert not output.finished
    output.outputs[1].finish_reason = FinishReason.STOP
    assert not output.finished
    output.outputs[0].finish_reason = FinishReason.LENGTH
    assert output.finished


MISTAKES = [("dtype", "float8"), ("attention_backend", "paged"), ("quantization", "int3"), ("quantization", "auto")]
MISTAKES += [("load_format", "pickle"), ("max_seq_len", "long"), ("kv_cache_memory_bytes", "much")]
ZEROS = ("max_batch_size", "max_seq_len", "max_steps_per_launch", "kv_cache_memory_bytes", "num_threads")
NEGATIVES = ("max_num_batched_tokens", "max_queue_size", "seed")


@pytest.mark.parametrize(
    ("field", "value"),
    [*MISTAKES, *((name, 0) for name in ZEROS), *((name, -1) for name in NEGATIVES), ("max_batchsize", 4)],
)
def test_a_setting_that_makes_no_sense_or_does_not_exist_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.model_validate({field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


@pytest.mark.parametrize("model", [SamplingParams, EngineConfig, BenchConfig])
def test_every_field_has_a_description_and_none_can_be_changed(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
    with pytest.raises(ValidationError, match="frozen"):
        model().seed = 3  # type: ignore[attr-defined]
