"""Plain tokenizers and chat templates do without transformers, and give what transformers gives."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift.engine.text.chat_rendering import RESERVED, ChatRenderer
from chairlift.engine.text.tokenizer_files import read_plain
from chairlift.models.checkpoint import find_model
from tests.engine.tokenizers_made import CORPUS, make_byte_level_bpe, make_byte_tokenizer, make_llama2_like

TEXTS = [*CORPUS, "", "<|im_start|>a <|im_end|>", "</s>b <unk>"]
THOUGHTS = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content is defined }};{% endfor %}"
OPEN = "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
LEFT = {
    "another class": ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
    "a field that is not known": ("tokenizer_config.json", {"add_prefix_space": True}),
    "a special token that is to be added": ("tokenizer_config.json", {"pad_token": "<pad>"}),
    "another model": ("config.json", {"model_type": "phi3"}),
    "a map of special tokens": ("special_tokens_map.json", {"eos_token": "</s>"}),
}
ANSWER = "from chairlift.__main__ import main; main(['generate', '2 + 3 =', '--max-tokens', '2']); import sys; "


@pytest.mark.parametrize("make", [make_byte_tokenizer, make_byte_level_bpe, make_llama2_like])
def test_a_plain_tokenizer_is_the_one_that_transformers_reads(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours, theirs = read_plain(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for special in (True, False):
        encoded = [ours.backend.encode(text, add_special_tokens=special).ids for text in TEXTS]
        assert encoded == [theirs.encode(text, add_special_tokens=special) for text in TEXTS]
    assert (ours.special_tokens, ours.eos_token_id) == (theirs.special_tokens_map, theirs.eos_token_id)
    assert (ours.chat_template, ours.class_name) == (theirs.chat_template, type(theirs).__name__)


def test_the_bundled_tokenizer_is_plain() -> None:
    ours, theirs = read_plain(find_model("bundled")), AutoTokenizer.from_pretrained(find_model("bundled"))
    assert ours is not None
    assert ours.backend.encode("<|user|>ä 5").ids == theirs.encode("<|user|>ä 5")
    assert (ours.special_tokens, ours.eos_token_id) == (theirs.special_tokens_map, 257)


@pytest.mark.parametrize(("file", "fields"), LEFT.values(), ids=LEFT.keys())
def test_transformers_reads_a_tokenizer_with(tmp_path: Path, file: str, fields: dict[str, Any]) -> None:
    make_byte_level_bpe(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
    assert read_plain(tmp_path) is None


@pytest.mark.parametrize(
    ("template", "messages", "is_open"),
    [
        (THOUGHTS, [{"role": "user", "content": None, "reasoning": "so"}, {"role": "user", "thinking": "x"}], False),
        (OPEN, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}], True),
        ("{{ messages[0].content | trim }}.", [{"role": "assistant", "content": " b "}], True),
        ("{{ messages[0].content[1].text }}.", [{"role": "user", "content": [{}, {"text": "b"}, {"type": "x"}]}], True),
        ("{{ tools | tojson(indent=1) }}{{ 'ü<' | tojson }}", [{"role": "user", "content": "a"}], False),
    ],
    ids=["fields", "an open end", "a stripped end", "a part that is open", "json"],
)
def test_a_chat_is_rendered_as_transformers_renders_it(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], is_open: bool
) -> None:
    make_llama2_like(tmp_path)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path, chat_template=template)
    options = {"add_generation_prompt": False, "continue_final_message": is_open}
    tools = [{"name": "f", "π": [1]}]
    ours = ChatRenderer(template, theirs.special_tokens_map).render(messages, tools, **options, arguments={})
    assert ours == theirs.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    assert ours


def test_what_transformers_takes_itself_is_no_variable_of_a_template() -> None:
    assert inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.keys() <= RESERVED


@pytest.mark.parametrize("name", ["transformers", "torch._dynamo", "huggingface_hub", "aiohttp", "gguf"])
def test_what_a_plain_model_does_not_need_is_not_imported(name: str, imported: set[str]) -> None:
    assert name not in imported


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Returns what an answer of the bundled model imports."""
    done = subprocess.run(
        [sys.executable, "-c", f"{ANSWER}print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())
