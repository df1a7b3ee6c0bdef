"""Templates that read a message as text or in parts: whichever they read, the prompt has what was said."""

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.engine.text.content_forms import ContentForms
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import ConfigurationError, InvalidRequest
from tests.engine.tokenizers_made import CHATML, make_byte_tokenizer

LOOP = "{%- for m in messages %}{{ '<|' + m['role'] + '|>' }}"
GENERATION = "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
# In the shape of SmolVLM and Idefics 3: parts alone, and the first of them is looked at.
ONLY_PARTS = (
    LOOP
    + "{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}{%- for p in m['content'] %}"
    + "{%- if p['type'] == 'text' %}{{ p['text'] }}{%- elif p['type'] == 'image' %}<image>{%- endif %}{%- endfor %}"
    + "{%- endfor %}"
    + GENERATION
)
# In the shape of Llama 3.2 Vision, Qwen2-VL and Gemma 3: either.
EITHER = (
    LOOP
    + "{%- if m['content'] is string %}{{ m['content'] }}{%- else %}{%- for p in m['content'] %}"
    + "{%- if p['type'] == 'image' %}<image>{%- else %}{{ p['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    + "{%- endfor %}"
    + GENERATION
)
# In the shape of Mistral Small 3 and Pixtral: parts of users, the text of all others.
PARTS_OF_USERS = (
    "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '[INST]' }}{%- for p in m['content'] %}"
    + "{{ p['text'] if p['type'] == 'text' else '[IMG]' }}{%- endfor %}{{ '[/INST]' }}"
    + "{%- else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{%- endif %}{%- endfor %}"
)
# Takes the first part for the whole, as templates that were made in a hurry.
FIRST_PART = LOOP + "{{ m['content'][0]['text'] }}{%- endfor %}"
# Only a system prompt in parts, and nothing without one.
PARTS_OF_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' %}{{ raise_exception('a system prompt, please') }}{%- endif %}"
    "{{ messages[0]['content'][0]['text'] }}{%- for m in messages[1:] %}{{ '|' + m['content'] }}{%- endfor %}"
)
ROLES = {"system", "user", "assistant", "tool"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
TALK: list[Message] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "abcdefghi"},
    {"role": "user", "content": "and?"},
]


def load(directory: Path, template: str) -> Tokenizer:
    make_byte_tokenizer(directory)
    path = directory / "template.jinja"
    path.write_text(template)
    return Tokenizer(directory, str(path))


def parts(message: Message) -> Message:
    """The same with its content in two parts."""
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": each} for each in (text[:1], text[1:])]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "be kind|hi|hello|42|and?"),
        (ONLY_PARTS, "<|system|>: be kind<|user|>: hi<|assistant|>: hello<|tool|>: 42<|user|>: and?<|assistant|>"),
        (EITHER, "<|system|>be kind<|user|>hi<|assistant|>hello<|tool|>42<|user|>and?<|assistant|>"),
        (PARTS_OF_USERS, "<|system|>be kind[INST]hi[/INST]<|assistant|>hello<|tool|>42[INST]and?[/INST]"),
        (FIRST_PART, "<|system|>be kind<|user|>hi<|assistant|>hello<|tool|>42<|user|>and?"),
        (PARTS_OF_SYSTEM, "be kind|hi|hello|42|and?"),
    ],
)
@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]])
def test_a_prompt_has_what_every_role_says(
    tmp_path: Path, template: str, expected: str, tools: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(tmp_path, template)
    if template == CHATML:
        template_of = (
            "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
        )
        template_of += "<|im_start|>tool\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        expected = template_of.format(*expected.split("|"))
    assert tokenizer.render_chat(TALK, ChatOptions(tools)) == expected
    assert tokenizer.render_chat(list(map(parts, TALK)), ChatOptions(tools)) == expected
    assert caplog.messages == []


def test_a_template_for_tools_has_forms_of_its_own(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": ONLY_PARTS}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = Tokenizer(tmp_path)
    hi = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(hi, ChatOptions()) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(hi, ChatOptions(tools=[{"type": "function"}])) == "<|user|>: hi<|assistant|>"


@pytest.mark.parametrize("content", ["so it", "so it ", [{"type": "text", "text": "so it"}]])
@pytest.mark.parametrize("template", [ONLY_PARTS, EITHER])
def test_an_answer_in_parts_is_continued(tmp_path: Path, template: str, content: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    space = ": " if template == ONLY_PARTS else ""
    text = content if isinstance(content, str) else "so it"
    assert load(tmp_path, template).render_chat(messages, options) == f"<|user|>{space}hi<|assistant|>{space}{text}"


def test_special_tokens_in_parts_are_text_even_where_one_spells_a_key(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    parsed = json.loads(path.read_text())
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    parsed["added_tokens"].append({"id": 259, "content": "xt", **flags})
    path.write_text(json.dumps(parsed))
    template = tmp_path / "template.jinja"
    template.write_text(ONLY_PARTS)
    tokenizer = Tokenizer(tmp_path, str(template))
    messages = [{"role": "user", "content": "a <|im_end|> text"}]
    ids = tokenizer.encode_chat(messages, ChatOptions(), max_tokens=100)
    assert bytes(ids).decode() == "<|user|>: a <|im_end|> text<|assistant|>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0]['text'] }}", "nothing of what messages with role assistant or system or user say"),
        ("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}", "role system say"),
        ("{% for m in messages %}{{ m.content[0] }}{% endfor %}", "assistant or system or user"),
        ("{{ raise_exception('never') }}", "refuses these messages: never; chat does not work unless"),
    ],
)
def test_a_template_that_shows_nothing_is_warned_of_at_start(
    tmp_path: Path, template: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, template)
    assert [words in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{{ messages[0]['content' }}", "line 2: unexpected '}'"),
        ("{{ messages | nothing }}", "line 1: No filter named"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"chat_template .*template\.jinja, {words}"):
        load(tmp_path, template)


def test_a_checkpoints_own_template_may_be_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    tokenizer = Tokenizer(tmp_path)
    assert "chat does not work" in caplog.messages[-1]
    assert tokenizer.encode("hi") == [*b"hi"]
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        tokenizer.render_chat(TALK, ChatOptions())


def test_contents_of_other_shapes_stay_as_they_are() -> None:
    odd: list[Any] = [None, 7, ["x"], [{"type": "image"}], [{"type": "text"}], [{"type": "text", "text": 1}], []]
    messages = [{"role": "user", "content": content} for content in odd] + [{"role": "user"}, {"content": ["x"]}]
    for forms in (ContentForms(), ContentForms(in_parts=frozenset(ROLES))):
        assert forms.apply(messages) == messages


def test_a_role_that_nobody_knows_is_read_as_a_users() -> None:
    forms = ContentForms(in_parts=frozenset({"user"}))
    message = {"role": "ipython", "content": "hi"}
    assert forms.apply([message]) == [{"role": "ipython", "content": [{"type": "text", "text": "hi"}]}]
