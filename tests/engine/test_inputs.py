"""Tests what a caller may write and what not; seeds, end tokens and defaults that come from the checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chairlift import SamplingParams
from chairlift.config import GenerationDefaults
from chairlift.engine.sampling.token_rules import RuleFilter
from chairlift.engine.text.chat_template import ChatOptions
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from chairlift.params import StructuredOutputs
from tests.engine.support import END_TOKEN, VOCAB_SIZE, resolved_config
from tests.engine.tokenizers_made import make_byte_tokenizer

HI = [{"role": "user", "content": "hi"}]


def make_inputs(
    path: Path, generation: str | dict[str, Any] | None = None, model: dict[str, Any] | None = None, **config: Any
) -> InputProcessor:
    """Reads a checkpoint with the byte tokenizer and these configurations: of generation, and of the model."""
    make_byte_tokenizer(path)
    (path / "config.json").write_text(json.dumps(model or {}))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (path / "generation_config.json").write_text(text)
    return InputProcessor(resolved_config(path, **config), VOCAB_SIZE)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def refusal(inputs: InputProcessor, prompt: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        inputs.prepare("r", prompt, SamplingParams(**{"max_tokens": 1, **fields}))
    return caught.value


def refusal_of_chat(inputs: InputProcessor, messages: Any, options: ChatOptions | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        inputs.encode_chat(messages, options or ChatOptions())
    return caught.value


def test_a_text_is_tokenized_and_kept_and_token_ids_are_taken_as_they_are(inputs: InputProcessor) -> None:
    text, tokens = (inputs.prepare("r", prompt, SamplingParams()) for prompt in ("hé", [0, END_TOKEN]))
    assert (text.request_id, text.prompt, text.prompt_token_ids) == ("r", "hé", [104, 195, 169])
    assert (tokens.prompt, tokens.prompt_token_ids) == (None, [0, END_TOKEN])


@pytest.mark.parametrize(
    ("fields", "is_expected"),
    [
        ({}, False),
        ({"stop": ["x"]}, True),
        ({"stop": ["<|im_start|>"]}, False),
        ({"stop": ["<|im_start|>", "x"]}, True),
    ],
)
def test_an_answer_may_end_early_if_its_end_is_found_in_text(
    inputs: InputProcessor, fields: dict[str, Any], is_expected: bool
) -> None:
    (request,) = inputs.prepare("r", "hi", SamplingParams(**fields)).requests
    assert request.text_may_end_early is is_expected


NO_PROMPTS = [[1, True], [1, "2"], [1.0], [None], 7, None, {"prompt": "x"}, b"x", [[1]]]
NO_TOKENS = [-1, 259, 10**30]
TOO_LONG = "This model's maximum context length is 64 tokens. However, "
ONLY_ENDS = {"allowed_token_ids": [1, 1, END_TOKEN], "min_tokens": 1, "stop_token_ids": [1]}


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "words"),
    [
        ("", {}, "prompt", ["the prompt is empty"]),
        ([], {}, "prompt", ["the prompt is empty"]),
        *((prompt, {}, "prompt", ["a string or a list of token ids"]) for prompt in NO_PROMPTS),
        ("half a pair: \ud83d", {}, "prompt", ["not valid Unicode"]),
        ("x" * 70, {}, "prompt", [TOO_LONG, "70 tokens, 7 too many"]),
        ("x" * 10_000, {"max_tokens": 5}, "prompt", [TOO_LONG]),
        ([1] * 64, {}, "prompt", [TOO_LONG, "1 too many"]),
        ([1] * 60, {"max_tokens": 5}, "max_tokens", [TOO_LONG, "max_tokens 5 does not fit", "60 tokens", "leaves 4"]),
        ([1] * 60, {"max_tokens": 16}, "max_tokens", [TOO_LONG]),
        ([1] * 60, {"max_tokens": None, "min_tokens": 5}, "min_tokens", [TOO_LONG, "min_tokens 5", "leaves 4"]),
        ("x" * 100, {"truncate_prompt_tokens": -1, "max_tokens": 64}, "max_tokens", [TOO_LONG]),
        ("x" * 100, {"truncate_prompt_tokens": 64}, "prompt", [TOO_LONG]),
        *(([5, wrong, 6], {}, "prompt", [f"token id {wrong} ", "[0, 259)"]) for wrong in NO_TOKENS),
        *(("x", {"logit_bias": {3: 1.0, n: 1.0}}, "logit_bias", [f"token id {n} ", "259"]) for n in (-1, 259)),
        *(("x", {"stop_token_ids": [3, n]}, "stop_token_ids", [f"token id {n} ", "259"]) for n in (-1, 259)),
        *(("x", {"allowed_token_ids": [3, n]}, "allowed_token_ids", [f"token id {n} "]) for n in NO_TOKENS),
        ("x", {"allowed_token_ids": [END_TOKEN], "min_tokens": 1}, "allowed_token_ids", []),
        ("x", ONLY_ENDS, "allowed_token_ids", ["can be sampled"]),
        ("x", {"allowed_token_ids": [*b"ab"], "bad_words": ["a", "b"]}, "allowed_token_ids", []),
        ("x", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", []),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field_and_the_reason(
    inputs: InputProcessor, prompt: Any, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    error = refusal(inputs, prompt, **fields)
    assert error.param == param
    assert [each for each in words if each not in str(error)] == []
    assert isinstance(error, ContextLengthExceeded) == (TOO_LONG in words) == ("Please reduce " in str(error))


def test_max_tokens_is_what_was_asked_for_and_left_open_the_room_in_the_slot_bounds_it(inputs: InputProcessor) -> None:
    def max_tokens(num_prompt_tokens: int, **fields: int | None) -> int:
        return inputs.prepare("r", [1] * num_prompt_tokens, SamplingParams(**fields)).requests[0].max_tokens

    assert [max_tokens(63, max_tokens=1), max_tokens(60, max_tokens=4)] == [1, 4]
    assert [max_tokens(10), max_tokens(60)] == [16, 4]
    assert [max_tokens(10, max_tokens=None), max_tokens(63, max_tokens=None)] == [54, 1]


NO_MESSAGES = [{}, {"role": "user"}, {"role": "user", "content": None}, {"content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        *(([wrong], "must be a list of") for wrong in (7, "hi", None, [], HI)),
        *(([wrong], "refuses these messages") for wrong in NO_MESSAGES),
        ([{"role": "user", "content": "half a pair: \ud83d"}], "not valid Unicode"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(inputs: InputProcessor, messages: Any, words: str) -> None:
    error = refusal_of_chat(inputs, messages)
    assert words in str(error)
    assert error.param == "messages"


def test_a_role_that_the_template_refuses_is_an_invalid_request_with_the_templates_words(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('only users speak here') }}{% endif %}"
    template.write_text(refuses + "{{ messages[0].content }}")
    inputs = make_inputs(tmp_path, chat_template=str(template))
    assert inputs.encode_chat(HI) == [*b"hi"]
    error = refusal_of_chat(inputs, [{"role": "system", "content": "hi"}])
    assert "only users speak here" in str(error)
    assert error.param == "messages"


STRICT_ABOUT_IDS = """{% for message in messages %}{% if message.role == 'tool' %}{% set id = message.tool_call_id %}
{% elif message.tool_calls %}{% set id = message.tool_calls[0].id %}{% else %}{% set id = '' %}{% endif %}
{% if id and id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}{{ id }}{% endfor %}"""


@pytest.mark.parametrize(("call_id", "shown"), [("call_1", "74196fe72"), ("aB3dE6gH9", "aB3dE6gH9"), ("", "e3b0c4429")])
def test_a_template_that_wants_ids_of_nine_letters_gets_them(tmp_path: Path, call_id: str, shown: str) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(STRICT_ABOUT_IDS)
    inputs = make_inputs(tmp_path, chat_template=str(template))
    function = {"name": "f", "arguments": {}}
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    told = {"role": "tool", "content": "done", "tool_call_id": call_id}
    text = bytes(inputs.encode_chat([*HI, said, told])).decode()
    assert text.split() == [shown * 2]


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert "no chat template" in str(refusal_of_chat(InputProcessor(resolved_config(tmp_path), VOCAB_SIZE), HI))


def seeds_of(inputs: InputProcessor, params: SamplingParams) -> list[int]:
    return [request.seed for request in inputs.prepare("r", "x", params).requests]


@pytest.mark.parametrize("seed", [None, 0, -5, 2**63 - 1, -(2**63)])
def test_each_choice_has_a_seed_of_its_own_the_first_that_asked_for(inputs: InputProcessor, seed: int | None) -> None:
    seeds = seeds_of(inputs, SamplingParams(n=4, seed=seed))
    assert len(set(seeds)) == 4
    assert seed in (None, seeds[0])


def test_minus_one_asks_for_a_new_seed_each_time(inputs: InputProcessor) -> None:
    first, second = (seeds_of(inputs, SamplingParams(seed=-1)) for _ in range(2))
    assert first != second
    assert [-1] not in (first, second)


def test_no_two_sequences_share_an_id_even_if_the_callers_ids_are_alike(inputs: InputProcessor) -> None:
    generations = [inputs.prepare(name, "x", SamplingParams(n=3)) for name in ("r", "r", "r-0", "r-0-0", "r-1", "")]
    assert [generation.request_id for generation in generations] == ["r", "r", "r-0", "r-0-0", "r-1", ""]
    assert len({request.request_id for generation in generations for request in generation.requests}) == 18


NAMED_TEMPLATES = {"default": "plain {{ messages[0].content }}", "tool_use": "with {{ tools | length }} tools"}


@pytest.mark.parametrize("is_in_one_file", [False, True])
def test_of_several_templates_that_for_tools_is_used_where_there_are_any(tmp_path: Path, is_in_one_file: bool) -> None:
    """In files beside the tokenizer, or in its configuration as older checkpoints have them."""
    make_byte_tokenizer(tmp_path)
    if is_in_one_file:
        path = tmp_path / "tokenizer_config.json"
        templates = [{"name": name, "template": text} for name, text in NAMED_TEMPLATES.items()]
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    else:
        (tmp_path / "chat_template.jinja").write_text(NAMED_TEMPLATES["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED_TEMPLATES["tool_use"])
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.render_chat(HI, ChatOptions()) == "plain hi"
    assert tokenizer.render_chat(HI, ChatOptions(tools=[{"type": "function"}])) == "with 1 tools"
    assert set(tokenizer.chat_template.split("\n")) == set(NAMED_TEMPLATES.values())  # calls are looked for in both


def test_default_params_come_from_the_generation_config(tmp_path: Path) -> None:
    fields = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    inputs = make_inputs(tmp_path, {**fields, "do_sample": True, "max_new_tokens": 30, "transformers_version": "5"})
    assert inputs.default_params == SamplingParams(**fields)
    assert inputs.default_chat_params == SamplingParams(**fields, max_tokens=None)
    assert inputs.prepare("r", "x", None).params == inputs.default_params
    assert inputs.prepare("r", "x", SamplingParams()).params.temperature == 1.0
    for params, prompt_size, expected in [
        (inputs.default_chat_params, 10, 30),
        (inputs.default_chat_params, 50, 14),  # the room in a slot of 64
        (inputs.default_chat_params.model_copy(update={"max_tokens": 40}), 10, 40),
        (inputs.default_chat_params.model_copy(update={"min_tokens": 40}), 10, 40),
        (inputs.default_params, 10, 16),
        (None, 60, 4),
    ]:
        assert inputs.prepare("r", [1] * prompt_size, params).requests[0].max_tokens == expected
    assert make_inputs(tmp_path, {"do_sample": False, "temperature": 0.6}).default_params.is_greedy


def test_the_generation_config_can_be_left_out_of_account_but_for_end_tokens(tmp_path: Path) -> None:
    fields = {"temperature": 0.6, "top_k": 20, "do_sample": False, "max_new_tokens": 5, "eos_token_id": [9, 10]}
    inputs = make_inputs(tmp_path, fields, generation_config=GenerationDefaults.NONE)
    assert inputs.default_params == make_inputs(tmp_path / "bare").default_params == SamplingParams()
    (request,) = inputs.prepare("r", [1] * 10, inputs.default_chat_params).requests
    assert (request.max_tokens, set(request.eos_token_ids)) == (54, {9, 10, END_TOKEN})


BROKEN_FIELDS = ['{"max_new_tokens": 0}', '{"temperature": -1}', '{"top_p": "high"}']


@pytest.mark.parametrize("broken", ["{", "[1, 2]", '"text"', *BROKEN_FIELDS])
def test_a_broken_generation_config_is_a_checkpoint_error_that_names_the_file(tmp_path: Path, broken: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        make_inputs(tmp_path, broken)


@pytest.mark.parametrize("text", ["x" * 100, "x" * 10_000, "<|im_end|>" * 100])
def test_a_conversation_that_does_not_fit_is_refused_in_the_same_words(inputs: InputProcessor, text: str) -> None:
    with pytest.raises(ContextLengthExceeded, match=re.escape(TOO_LONG) + r".*\. Please reduce ") as caught:
        inputs.prepare("r", inputs.encode_chat([{"role": "user", "content": text}]), SamplingParams(), "messages")
    assert caught.value.param == "messages"


def test_what_is_far_too_long_is_refused_unrendered(inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object) -> str:
        raise AssertionError("it was rendered")

    many = [{"role": "user", "content": ""}] * 10_000
    long = [{"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}]
    properties = {f"property_{index}": {"type": "string"} for index in range(100_000)}
    little: list[Any] = [{"type": "function", "function": {"name": "f", "description": "x" * 10_000}}]
    assert inputs.encode_chat(HI, ChatOptions(tools=little))  # of which the template shows little
    monkeypatch.setattr(Tokenizer, "render_chat", render)
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    errors = [refusal_of_chat(inputs, many), refusal_of_chat(inputs, long)]
    errors.append(refusal_of_chat(inputs, HI, ChatOptions(tools=tools)))
    assert [type(error) for error in errors] == [ContextLengthExceeded] * 3
    assert [error.param for error in errors] == ["messages", "messages", "tools"]


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
def test_what_is_nested_too_deeply_is_refused(inputs: InputProcessor, depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    for message in ({**HI[0], "extra": nested}, {"role": "user", "content": nested}):
        assert refusal_of_chat(inputs, [message]).param == "messages"
    if depth > 1000:
        outputs = StructuredOutputs(json={})
        object.__setattr__(outputs, "json", {"items": nested})  # without a look at its depth
        with pytest.raises(InvalidRequest, match="too deeply nested"):
            inputs.prepare("r", "x", SamplingParams.model_construct(structured_outputs=outputs, max_tokens=5))


def test_texts_to_tokenize_and_tokens_to_decode_have_a_limit_of_their_own(inputs: InputProcessor) -> None:
    assert len(inputs.tokenize("x" * 1000)) == 1000  # longer than a prompt
    with pytest.raises(InvalidRequest, match="send at most 524288") as caught:
        inputs.tokenize("x" * (2**19 + 1))
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="send at most 524288") as caught:
        inputs.decode([1] * (2**19 + 1))
    assert caught.value.param == "tokens"


@pytest.mark.parametrize(
    ("fields", "num_kept"),
    [
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": 1000, "max_tokens": 1}, 50),
        ({"max_tokens": 20}, 44),
        ({"max_tokens": None, "min_tokens": 30}, 34),
        ({}, 50),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept(inputs: InputProcessor, fields: dict[str, Any], num_kept: int) -> None:
    text = "".join(map(chr, range(ord("0"), ord("0") + 50)))
    for prompt in (text, list(text.encode())):
        generation = inputs.prepare("r", prompt, SamplingParams(**{"truncate_prompt_tokens": -1, **fields}))
        assert bytes(generation.prompt_token_ids).decode() == text[-num_kept:]
        assert generation.requests[0].prompt_token_ids == tuple(generation.prompt_token_ids)


@pytest.mark.parametrize(("max_tokens", "num_kept"), [(0, 64), (1, 63), (None, 63), (63, 1)])
def test_any_prompt_can_be_cut_to_what_fits(inputs: InputProcessor, max_tokens: int | None, num_kept: int) -> None:
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
    for prompt in ("x" * 9_999 + "y", [*[1] * 10_000, ord("y")]):
        kept = inputs.prepare("r", prompt, params).prompt_token_ids
        assert (len(kept), kept[-1]) == (num_kept, ord("y"))


def test_a_conversation_is_truncated_after_it_is_rendered(inputs: InputProcessor) -> None:
    for content in ("x" * 10_000 + "yz", "<|im_end|>" * 1_000 + "yz"):
        ids = inputs.encode_chat([{"role": "user", "content": content}], truncates=True)
        kept = inputs.prepare("r", ids, SamplingParams(truncate_prompt_tokens=14), "messages").prompt_token_ids
        assert kept == [*b"z", 258, ord("\n"), 257, *b"assistant\n"]


def test_a_stop_string_that_is_a_special_token_is_a_stop_token_too(inputs: InputProcessor) -> None:
    params = SamplingParams(stop=["<|im_start|>", "a<|endoftext|>", "<|im_", "x"], stop_token_ids=[7], n=2)
    generation = inputs.prepare("r", "x", params)
    assert [request.params.stop_token_ids for request in generation.requests] == [[7, 257], [7, 257]]
    assert generation.params is params
    assert refusal(inputs, "x", stop="<|im_start|>", min_tokens=1, allowed_token_ids=[257]).param == "allowed_token_ids"


def test_a_bad_word_that_is_a_special_token_forbids_that_token(inputs: InputProcessor) -> None:
    assert refusal(inputs, "x", bad_words=["<|im_start|>"], allowed_token_ids=[257]).param == "allowed_token_ids"
    assert inputs.prepare("r", "x", SamplingParams(bad_words=["<|im_start|>"], allowed_token_ids=[257, ord("<")]))


def test_what_is_prepared_for_parameters_is_shared_by_choices_and_prompts(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    params = SamplingParams(n=3, stop=["x"], bad_words=["ab"])
    first, second = inputs.prepare("r", "x", params), inputs.prepare("s", "y", params)
    assert first.stops is second.stops
    new_filters = [request.new_token_filter for request in (*first.requests, *second.requests)]
    filters = [new() for new in new_filters if new is not None]
    assert len({id(each) for each in filters}) == 6
    assert len({id(each.rules) for each in filters if isinstance(each, RuleFilter)}) == 1
    others = [inputs.prepare("r", "x", params.model_copy(update={"n": 1})) for _ in range(10)]
    assert len({id(each.stops) for each in [first, *others]}) == 11
    assert len(inputs._prepared) == 4
