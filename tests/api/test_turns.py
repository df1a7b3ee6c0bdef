"""Conversations of agents, whose templates take one system message, at the beginning, and speakers in turn."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from chairlift.api.turns import TURNS_WARNING, speakers_in_turn
from tests.api.conftest import Server, serving
from tests.api.contract import COUNT_TOKENS, MESSAGES, posted
from tests.support.scripted_model import HYBRID, install_plan, make_thinking_checkpoint

# As the templates of Qwen3.5 and Mistral check.
STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif -%}
{%- if not loop.first and message.role == 'user' and loop.previtem.role == 'user' -%}
{{ raise_exception('Roles must alternate.') }}
{%- endif -%}
{%- endfor -%}"""
HEADER = f'299 - "{TURNS_WARNING}"'
PROMPT = "<|system|>a\n\nb<|im_end|><|user|>c\n\nd\n\ne<|im_end|>"
PROMPT += "<|assistant|>f<|im_end|><|user|>g\n\nh<|im_end|><|assistant|>"
SAID = [("system", "a"), ("system", "b"), ("user", "c"), ("user", "d"), ("system", "e"), ("assistant", "f")]
SAID += [("user", "g"), ("system", "h")]
CHAT = [{"role": role, "content": content} for role, content in SAID]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Server, list[str]]]:
    """A server whose template is strict, and the prompts that its model has read."""
    model = make_thinking_checkpoint(tmp_path_factory.mktemp("strict"), STRICT + HYBRID)
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Yes."

    with pytest.MonkeyPatch.context() as patch:
        install_plan(patch, model, answer)
        async with serving(model=model) as server:
            yield server, prompts


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"instructions": "a", "input": [{**each, "type": "message"} for each in CHAT[1:]]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_system_messages_of_an_agent_are_joined_or_shown_as_the_users(
    strict: tuple[Server, list[str]], path: str
) -> None:
    server, prompts = strict
    async with posted(server, BODIES[path], path) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Warning"] == HEADER
    assert prompts[-1] == PROMPT


async def test_claude_codes_system_message_behind_the_users_is_counted_and_answered(
    strict: tuple[Server, list[str]],
) -> None:
    server, prompts = strict
    body = {"system": "a", "messages": CHAT[2:], "max_tokens": 9}
    async with posted(server, body) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Warning"] == HEADER
        usage = (await response.json())["usage"]
    assert prompts[-1] == PROMPT.replace("\n\nb", "").replace("c\n\nd", "c\nd")  # this endpoint always joins
    async with posted(server, {"system": "a", "messages": CHAT[2:]}, COUNT_TOKENS) as response:
        assert (await response.json())["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_a_conversation_that_the_template_takes_is_shown_as_it_is(strict: tuple[Server, list[str]]) -> None:
    server, prompts = strict
    async with posted(server, {"messages": [CHAT[0], CHAT[2]]}, "/v1/chat/completions") as response:
        assert "Warning" not in response.headers
    assert prompts[-1] == "<|system|>a<|im_end|><|user|>c<|im_end|><|assistant|>"


async def test_a_conversation_in_another_order_may_be_too_long(strict: tuple[Server, list[str]]) -> None:
    server, _ = strict
    both = [*CHAT[:3], {"role": "system", "content": "b" * 600}]
    async with posted(server, {"messages": both, "max_tokens": 9}, MESSAGES) as response:
        error = (await response.json())["error"]
    assert re.match(r"prompt is too long: \d+ tokens > 511 maximum\.", error["message"])


async def test_what_the_template_refuses_in_any_order_is_told_in_its_words(strict: tuple[Server, list[str]]) -> None:
    server, _ = strict
    body = {"messages": [*CHAT[:3], CHAT[-1]], "chat_template_kwargs": {"tools": 1}}
    async with posted(server, body, "/v1/chat/completions") as response:
        assert (await response.json())["error"]["message"] == "chat_template_kwargs must not set tools"


def test_calls_and_results_stay_apart() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    results = [{"role": "tool", "content": each, "tool_call_id": each} for each in "12"]
    rest = [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert speakers_in_turn([call, *results, *rest]) == [call, *results, *rest]
