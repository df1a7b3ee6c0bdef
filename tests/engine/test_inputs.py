"""What a caller may write and what not; seeds, end tokens and defaults that come from the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift import SamplingParams
from chairlift.engine.inputs import InputProcessor
from chairlift.errors import CheckpointError, InvalidRequest
from tests.engine.support import END_TOKEN, VOCAB_SIZE, resolved_config
from tests.engine.tokenizers_made import make_byte_tokenizer

RAISING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users speak here') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def make_directory(
    path: Path, generation: str | dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """The files of a checkpoint that inputs need: the byte tokenizer's and the configurations."""
    make_byte_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (path / "generation_config.json").write_text(text)
    return path


def make_inputs(path: Path, generation: dict[str, Any] | None = None, **config: Any) -> InputProcessor:
    return InputProcessor(resolved_config(make_directory(path, generation), **config), VOCAB_SIZE)


@pytest.fixture
def inputs(tmp_path: Path) -> InputProcessor:
    return make_inputs(tmp_path)


def refusal(inputs: InputProcessor, prompt: Any, params: SamplingParams | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        inputs.prepare("r", prompt, params or SamplingParams(max_tokens=1))
    return caught.value


# --- prompts


def test_a_text_is_tokenized_and_kept(inputs: InputProcessor) -> None:
    generation = inputs.prepare("r", "hé", SamplingParams())
    assert (generation.request_id, generation.prompt, generation.prompt_token_ids) == ("r", "hé", [104, 195, 169])


def test_token_ids_are_taken_as_they_are(inputs: InputProcessor) -> None:
    generation = inputs.prepare("r", [0, END_TOKEN], SamplingParams())
    assert (generation.prompt, generation.prompt_token_ids) == (None, [0, END_TOKEN])


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(inputs: InputProcessor, prompt: str | list[int]) -> None:
    error = refusal(inputs, prompt)
    assert error.param == "prompt"
    assert "the prompt is empty" in str(error)


def test_a_prompt_that_fills_the_slot_is_refused_and_told_by_how_much(inputs: InputProcessor) -> None:
    error = refusal(inputs, "x" * 70)
    assert error.param == "prompt"
    assert "70 tokens, 7 too many" in str(error)
    assert "64 tokens" in str(error)
    assert "1 too many" in str(refusal(inputs, [1] * 64))
    assert inputs.prepare("r", [1] * 63, SamplingParams(max_tokens=1)).requests[0].max_tokens == 1


@pytest.mark.parametrize("wrong", [-1, 259, 10**30])
def test_a_token_id_out_of_the_vocabulary_is_refused_by_number(inputs: InputProcessor, wrong: int) -> None:
    error = refusal(inputs, [5, wrong, 6])
    assert error.param == "prompt"
    assert f"token id {wrong} " in str(error)
    assert "[0, 259)" in str(error)


@pytest.mark.parametrize("prompt", [[1, True], [1, "2"], [1.0], [None], 7, None, {"prompt": "x"}, b"x", [[1]]])
def test_what_is_neither_text_nor_token_ids_is_refused(inputs: InputProcessor, prompt: object) -> None:
    error = refusal(inputs, prompt)
    assert error.param == "prompt"
    assert "a string or a list of token ids" in str(error)


# --- lengths


def test_max_tokens_beyond_the_slot_is_refused_if_the_caller_asked_for_it(inputs: InputProcessor) -> None:
    error = refusal(inputs, [1] * 60, SamplingParams(max_tokens=5))
    assert error.param == "max_tokens"
    assert "max_tokens 5 does not fit" in str(error)
    assert "60 tokens" in str(error)
    assert "leaves 4" in str(error)
    assert refusal(inputs, [1] * 60, SamplingParams(max_tokens=16)).param == "max_tokens"


def test_max_tokens_that_just_fits_is_kept(inputs: InputProcessor) -> None:
    assert inputs.prepare("r", [1] * 60, SamplingParams(max_tokens=4)).requests[0].max_tokens == 4


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "expected"),
    [
        (SamplingParams(), 10, 16),
        (SamplingParams(), 60, 4),
        (SamplingParams(max_tokens=None), 10, 54),
        (SamplingParams(max_tokens=None), 63, 1),
    ],
)
def test_max_tokens_left_open_is_bounded_by_the_room_in_the_slot(
    inputs: InputProcessor, params: SamplingParams, num_prompt_tokens: int, expected: int
) -> None:
    assert inputs.prepare("r", [1] * num_prompt_tokens, params).requests[0].max_tokens == expected


def test_min_tokens_beyond_the_slot_is_refused(inputs: InputProcessor) -> None:
    error = refusal(inputs, [1] * 60, SamplingParams(max_tokens=None, min_tokens=5))
    assert error.param == "min_tokens"
    assert "min_tokens 5" in str(error)
    assert "4 tokens" in str(error)


@pytest.mark.parametrize("wrong", [-1, 259])
def test_ids_out_of_the_vocabulary_in_params_are_refused(inputs: InputProcessor, wrong: int) -> None:
    error = refusal(inputs, "x", SamplingParams(logit_bias={3: 1.0, wrong: 1.0}))
    assert (error.param, f"token id {wrong} " in str(error), "259" in str(error)) == ("logit_bias", True, True)
    error = refusal(inputs, "x", SamplingParams(stop_token_ids=[3, wrong]))
    assert (error.param, f"token id {wrong} " in str(error), "259" in str(error)) == ("stop_token_ids", True, True)


# --- conversations


def test_a_conversation_is_rendered_with_the_models_template(inputs: InputProcessor) -> None:
    ids = inputs.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [257, *b"user\nhi", 258, ord("\n"), 257, *b"assistant\n"]


def test_no_messages_are_refused(inputs: InputProcessor) -> None:
    with pytest.raises(InvalidRequest, match="at least one message") as caught:
        inputs.encode_chat([])
    assert caught.value.param == "messages"


def test_a_role_that_the_template_refuses_is_an_invalid_request_with_the_templates_words(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(RAISING_TEMPLATE)
    inputs = make_inputs(tmp_path, chat_template=str(template))
    assert inputs.encode_chat([{"role": "user", "content": "hi"}]) == [*b"hi"]
    with pytest.raises(InvalidRequest, match="only users speak here") as caught:
        inputs.encode_chat([{"role": "system", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("message", [{}, {"role": "user"}, {"role": "user", "content": None}, {"content": "hi"}])
def test_messages_that_the_template_cannot_use_are_refused(inputs: InputProcessor, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages") as caught:
        inputs.encode_chat([message])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("message", [7, "hi", None, [], [{"role": "user", "content": "hi"}]])
def test_what_is_no_message_is_refused(inputs: InputProcessor, message: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        inputs.encode_chat([message])
    assert caught.value.param == "messages"


def test_text_that_is_not_unicode_is_refused(inputs: InputProcessor) -> None:
    assert refusal(inputs, "half a pair: \ud83d").param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        inputs.encode_chat([{"role": "user", "content": "half a pair: \ud83d"}])
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    make_directory(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        InputProcessor(resolved_config(tmp_path), VOCAB_SIZE).encode_chat([{"role": "user", "content": "hi"}])


# --- seeds and choices


def seeds_of(inputs: InputProcessor, params: SamplingParams) -> list[int]:
    return [request.seed for request in inputs.prepare("r", "x", params).requests]


def test_requests_without_a_seed_get_seeds_that_the_configurations_seed_decides(tmp_path: Path) -> None:
    def three_seeds(seed: int) -> list[int]:
        inputs = make_inputs(tmp_path, seed=seed)
        return [seeds_of(inputs, SamplingParams())[0] for _ in range(3)]

    assert three_seeds(1) == three_seeds(1)
    assert len({*three_seeds(1), *three_seeds(2)}) == 6


def test_a_seed_of_ones_own_is_used(inputs: InputProcessor) -> None:
    assert seeds_of(inputs, SamplingParams(seed=0)) == seeds_of(inputs, SamplingParams(seed=0)) == [0]
    assert seeds_of(inputs, SamplingParams(seed=-5)) == [-5]


@pytest.mark.parametrize("seed", [None, 7, 2**63 - 1, -(2**63)])
def test_each_choice_has_a_seed_and_an_id_of_its_own(inputs: InputProcessor, seed: int | None) -> None:
    generation = inputs.prepare("r", "x", SamplingParams(n=4, seed=seed))
    assert len({request.seed for request in generation.requests}) == 4
    assert len({request.request_id for request in generation.requests}) == 4


def test_no_two_sequences_share_an_id_even_if_the_callers_ids_are_alike(inputs: InputProcessor) -> None:
    generations = [inputs.prepare(name, "x", SamplingParams(n=3)) for name in ("r", "r", "r-0", "r-0-0", "r-1", "")]
    assert [generation.request_id for generation in generations] == ["r", "r", "r-0", "r-0-0", "r-1", ""]
    assert len({request.request_id for generation in generations for request in generation.requests}) == 18


# --- what the checkpoint says


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {7}),
        ({"eos_token_id": [7, 8]}, {}, {7, 8}),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, {0}),
        ({}, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": [9, 10]}, {9, 10}),
        (None, {}, {END_TOKEN}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {END_TOKEN}),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_any(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    inputs = InputProcessor(resolved_config(make_directory(tmp_path, generation, config)), VOCAB_SIZE)
    (request,) = inputs.prepare("r", "x", SamplingParams()).requests
    assert request.eos_token_ids == expected


def test_default_params_come_from_the_generation_config(tmp_path: Path) -> None:
    fields = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    inputs = make_inputs(tmp_path, {**fields, "do_sample": True, "max_new_tokens": 30, "transformers_version": "5"})
    assert inputs.default_params == SamplingParams(**fields)
    assert inputs.default_chat_params == SamplingParams(**fields, max_tokens=None)
    assert inputs.prepare("r", "x", None).params == inputs.default_params
    assert inputs.prepare("r", "x", SamplingParams()).params.temperature == 1.0


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    assert make_inputs(tmp_path, {"do_sample": False, "temperature": 0.6}).default_params.is_greedy


def test_without_a_generation_config_the_defaults_are_ours(inputs: InputProcessor) -> None:
    assert inputs.default_params == SamplingParams()


def test_default_params_fit_any_prompt(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, {"max_new_tokens": 2048})
    assert inputs.prepare("r", [1] * 60, None).requests[0].max_tokens == 4
    assert inputs.prepare("r", [1] * 10, inputs.default_chat_params).requests[0].max_tokens == 54


@pytest.mark.parametrize(
    "broken", ["{", "[1, 2]", '"text"', '{"temperature": -1}', '{"top_p": "high"}', '{"eos_token_id": "end"}']
)
def test_a_broken_generation_config_is_a_checkpoint_error_that_names_the_file(tmp_path: Path, broken: str) -> None:
    config = resolved_config(make_directory(tmp_path, broken))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        InputProcessor(config, VOCAB_SIZE)
