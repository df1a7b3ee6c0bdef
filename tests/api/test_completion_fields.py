"""Each field of a completion: what it does, and that those which must not change a continuation do not."""

from typing import Any

import pytest

from tests.api.conftest import Server
from tests.api.contract import COMPLETIONS, check_completion, chunks_of, counts, error_of, post

GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0}

ACCEPTED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "safety_identifier": "c",
    "store": False,
    "service_tier": "default",
    "prompt_cache_key": "d",
    "prompt_cache_retention": "in_memory",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
}


async def text_of(server: Server, **fields: Any) -> str:
    reply = check_completion(await post(server, COMPLETIONS, {**GREEDY, **fields}))
    return reply.choices[0].text


async def test_accepted_fields_change_nothing(server: Server) -> None:
    plain = await post(server, COMPLETIONS, GREEDY)
    for name, value in {**ACCEPTED, "best_of": 1, "n": 1, "echo": False}.items():
        reply = await post(server, COMPLETIONS, {**GREEDY, name: value})
        assert (reply["choices"], counts(reply["usage"])) == (plain["choices"], counts(plain["usage"])), name


async def test_best_of_may_repeat_what_n_says(server: Server) -> None:
    reply = await post(server, COMPLETIONS, {**GREEDY, "n": 2, "best_of": 2})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert (await error_of(server, COMPLETIONS, {**GREEDY, "n": 2, "best_of": 3}))["param"] == "best_of"


@pytest.mark.parametrize("has_usage", [False, True])
async def test_chunks_have_the_shape_and_the_order_of_the_specification(server: Server, has_usage: bool) -> None:
    body = {"prompt": ["1 + 1 =", "Once"], "n": 2, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    whole = await post(server, COMPLETIONS, body)
    raw = await chunks_of(server, COMPLETIONS, {**body, "stream_options": {"include_usage": has_usage}})
    for chunk in raw:
        check_completion(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in raw}) == 1
    assert raw[0]["id"].startswith("cmpl-")
    if has_usage:
        usage = raw.pop()
        assert usage["choices"] == []
        assert counts(usage["usage"]) == counts(whole["usage"]) == (len("1 + 1 =Once"), 20, 31)
    assert all(chunk.get("usage") is None and len(chunk["choices"]) == 1 for chunk in raw)
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in raw if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]


async def test_the_end_token_can_be_ignored_or_be_any_token(server: Server) -> None:
    body = {"prompt": [259, *b"Hello!", 257, 260], "temperature": 0, "max_tokens": 50}
    ended = await post(server, COMPLETIONS, body)
    assert ended["choices"][0]["finish_reason"] == "stop"
    longer = await post(server, COMPLETIONS, {**body, "ignore_eos": True})
    assert longer["usage"]["completion_tokens"] == 50
    assert longer["choices"][0]["text"].startswith(ended["choices"][0]["text"])
    first = ended["choices"][0]["text"][0]
    (stopped,) = (await post(server, COMPLETIONS, {**body, "stop_token_ids": [ord(first)]}))["choices"]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", ord(first))


async def test_prompts_that_are_the_same_are_answered_the_same_in_every_form(server: Server) -> None:
    tokens = list(b"Once upon a time")
    texts = [await text_of(server, prompt=prompt) for prompt in ("Once upon a time", tokens, [tokens])]
    several = await post(server, COMPLETIONS, {**GREEDY, "prompt": [tokens, tokens]})
    assert {*texts, *(choice["text"] for choice in several["choices"])} == {texts[0]}
    assert several["usage"]["prompt_tokens"] == 2 * len(tokens)
    assert several["usage"]["completion_tokens"] == 32
