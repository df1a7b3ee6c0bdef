"""Conversations over HTTP with a model whose template reads parts: the prompt has what was said."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.api.conftest import Server, serving
from tests.api.contract import post

# Prompt and answer in the shape of SmolVLM.
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT = "<|system|>Be kind.<|im_end|><|user|>One two<|im_end|><|assistant|>"
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "One two"}]
PARTS = [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    async with serving(chat_template=str(path)) as server:
        yield server


@pytest.mark.parametrize("content", ["One two", PARTS])
async def test_a_conversation_becomes_the_prompt_that_the_template_makes_of_parts(
    parts_server: Server, content: Any
) -> None:
    messages = [TALK[0], {"role": "user", "content": content}]
    tokens = (await post(parts_server, "/tokenize", {"messages": messages}))["tokens"]
    assert (await post(parts_server, "/detokenize", {"tokens": tokens}))["prompt"] == PROMPT
    chat = await post(parts_server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    system = {"system": "Be kind.", "messages": TALK[1:], "model": "bundled"}
    counted = await post(parts_server, "/v1/messages/count_tokens", system)
    assert chat["usage"]["prompt_tokens"] == counted["input_tokens"] == len(tokens)


async def test_a_response_has_the_same_prompt(parts_server: Server) -> None:
    count = (await post(parts_server, "/tokenize", {"messages": TALK}))["count"]
    body = {"instructions": "Be kind.", "input": "One two", "max_output_tokens": 16, "store": False}
    assert (await post(parts_server, "/v1/responses", body))["usage"]["input_tokens"] == count
