"""Checkpoints that bring code, and chat templates that try to get out: nothing of theirs is executed."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.text.tokenizer import ChatOptions, Tokenizer
from chairlift.errors import CheckpointError, InvalidRequest
from chairlift.models.checkpoint import find_model
from tests.engine.support import VOCAB_SIZE, resolved_config
from tests.engine.tokenizers_made import make_byte_tokenizer

OWN_CODE = {
    "AutoConfig": "evil.Config",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
}


def make_evil(directory: Path, tokenizer_config: dict[str, Any]) -> Path:
    """A tokenizer with code of its own, which leaves a file behind if it is executed."""
    make_byte_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))
    (directory / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": OWN_CODE}))
    (directory / "evil.py").write_text(
        f"open({str(directory / 'executed')!r}, 'w').close()\nTokenizer = Config = Model = object\n"
    )
    return directory


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What somebody at the terminal is asked, and agrees to."""
    asked: list[str] = []

    def agree(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", agree)
    return asked


def test_a_tokenizer_that_is_code_is_refused_and_nobody_is_asked(tmp_path: Path, questions: list[str]) -> None:
    directory = make_evil(tmp_path, {"auto_map": OWN_CODE, "tokenizer_class": "Tokenizer"})
    with pytest.raises(CheckpointError, match=r"contains custom code .* Chairlift runs no code"):
        InputProcessor(resolved_config(directory), VOCAB_SIZE)
    assert questions == []
    assert not (directory / "executed").exists()


@pytest.mark.parametrize("fields", [{}, {"auto_map": OWN_CODE}])
def test_code_that_is_not_needed_is_left_alone(tmp_path: Path, questions: list[str], fields: dict[str, Any]) -> None:
    directory = make_evil(tmp_path, fields)
    assert Tokenizer(directory).encode("hi") == [*b"hi"]
    assert questions == []
    assert not (directory / "executed").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (messages|attr('append'))(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9)|list }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ '%s %s' % 'x' }}",
    ],
)
def test_a_template_that_tries_to_get_out_is_an_invalid_request(tmp_path: Path, template: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    tokenizer = Tokenizer(find_model("bundled"), str(path))
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}], ChatOptions())


def test_a_templates_complaint_repeats_little_of_what_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ raise_exception(messages[0]['content']) }}")
    with pytest.raises(InvalidRequest) as caught:
        Tokenizer(find_model("bundled"), str(path)).render_chat(
            [{"role": "user", "content": "x" * 10**6}], ChatOptions()
        )
    assert len(str(caught.value)) < 1100
