"""Tests where answers end: end tokens from every file that names some."""

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift import SamplingParams
from chairlift.engine.text.inputs import InputProcessor
from chairlift.errors import CheckpointError, InvalidRequest
from chairlift.scheduler import RequestState
from tests.engine.support import END_TOKEN, VOCAB_SIZE, resolved_config
from tests.engine.tokenizers_made import make_byte_tokenizer

TEXT_END, TURN_START = 256, 257  # <|endoftext|> and <|im_start|>


def make_inputs(path: Path, *, tokenizer: dict[str, Any] | None = None, **files: dict[str, Any]) -> InputProcessor:
    """Reads a checkpoint with the byte tokenizer, and these files beside it."""
    make_byte_tokenizer(path)
    for name, content in {"config": {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | (tokenizer or {})))
    return InputProcessor(resolved_config(path), VOCAB_SIZE)


def ends_of(inputs: InputProcessor) -> set[int]:
    (request,) = inputs.prepare("r", "x", SamplingParams()).requests
    assert inputs.vocabulary.eos_token_ids == sorted(request.eos_token_ids)
    return set(request.eos_token_ids)


def ends(value: Any) -> dict[str, Any]:
    return {"eos_token_id": value}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {END_TOKEN}),
        ({"generation_config": ends(TEXT_END)}, {TEXT_END, END_TOKEN}),
        ({"generation_config": ends([7, 8])}, {7, 8, END_TOKEN}),
        ({"generation_config": ends(0)}, {0, END_TOKEN}),
        ({"generation_config": ends(7), "config": ends([TEXT_END, 257])}, {7, TEXT_END, 257, END_TOKEN}),
        ({"generation_config": {}, "config": ends(9)}, {9, END_TOKEN}),
        ({"config": {"text_config": ends(TEXT_END)}}, {TEXT_END, END_TOKEN}),
        ({"config": {"text_config": None, **ends(None)}, "generation_config": ends(None)}, {END_TOKEN}),
    ],
)
def test_end_tokens_are_those_of_all_files_together(
    tmp_path: Path, files: dict[str, Any], expected: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert ends_of(make_inputs(tmp_path, **files)) == expected
    assert caplog.messages == []


@pytest.mark.parametrize("value", [-1, [], None, VOCAB_SIZE, [-1, 10**12]])
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_what_is_no_token_leaves_the_other_ends_and_is_said(
    tmp_path: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert ends_of(make_inputs(tmp_path, **{name: ends(value)})) == {END_TOKEN}
    wrong = sorted(value) if isinstance(value, list) else [value]
    if value in ([], None):
        assert caplog.messages == []
    else:
        reason = "the model's vocabulary is [0, 259)"
        assert caplog.messages == [f"{tmp_path / name}.json: eos_token_id {wrong} is ignored: {reason}"]


def test_a_stale_end_that_is_ordinary_text_ends_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Configurations of the Llama kind have 2 unless somebody changes it, whatever token 2 is."""
    files = {"generation_config": ends(TEXT_END), "config": ends([2, TURN_START])}
    assert ends_of(make_inputs(tmp_path, **files)) == {TEXT_END, TURN_START, END_TOKEN}
    assert caplog.messages == [
        f"{tmp_path}/config.json: eos_token_id [2] is ignored: it is ordinary text, and another file names others"
    ]


@pytest.mark.parametrize("value", ["end", True, 2.0, [258, "258"], {"id": 258}])
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_a_field_that_holds_no_ids_is_a_checkpoint_error_that_names_the_file(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}\.json: eos_token_id must be a token id or a list of them"):
        make_inputs(tmp_path, **{name: ends(value)})


def test_a_model_without_any_end_token_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs(tmp_path, generation_config=ends(-1), tokenizer={"eos_token": None})
    assert ends_of(inputs) == set()
    assert "names no end token, so answers go on up to max_tokens" in caplog.messages[-1]


def test_an_end_that_the_tokenizer_alone_has_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer adds it, beyond the model's rows."""
    inputs = make_inputs(tmp_path, generation_config=ends(TEXT_END), tokenizer={"eos_token": "<nowhere>"})
    assert ends_of(inputs) == {TEXT_END}
    assert "the tokenizer: eos_token_id [259] is ignored" in caplog.messages[-1]


def test_options_that_concern_end_tokens_concern_all_of_them(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, generation_config=ends(TEXT_END))
    (request,) = inputs.prepare("r", "x", SamplingParams(ignore_eos=True)).requests
    assert RequestState(request, arrival_time=0.0).end_token_ids == set()
    with pytest.raises(InvalidRequest, match="an end token below min_tokens"):
        inputs.prepare("r", "x", SamplingParams(min_tokens=2, allowed_token_ids=[TEXT_END, END_TOKEN]))
