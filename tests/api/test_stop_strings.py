"""Stop strings that spell special tokens, at every endpoint. A script says what the model wants to write."""

from typing import Any

import pytest

from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, chunks_of, post, user
from tests.support.scripted_model import install

USER = "<|user|>"  # a special token of the bundled model, which ends nothing by itself
STOPS = [USER, f"{USER}more", f"there{USER}more"]
SAID = f"hi there{USER}more"


@pytest.fixture(autouse=True)
def _follow_script(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    script.token_ids = server.llm.inputs.tokenizer.encode(SAID, add_special_tokens=False)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": user("hi")}), (COMPLETIONS, {"prompt": "hi"})])
async def test_an_answer_ends_at_a_special_token_that_a_stop_string_spells(
    server: Server, path: str, prompt: dict[str, Any], stop: str
) -> None:
    body = {**prompt, "stop": [stop], "max_tokens": 40, "n": 2, "temperature": 0}
    for choice in (await post(server, path, body))["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert (text, choice["finish_reason"], choice["stop_reason"]) == (SAID.split(stop)[0], "stop", stop)
    streamed = [choice for chunk in await chunks_of(server, path, body) for choice in chunk["choices"]]
    assert [choice["stop_reason"] for choice in streamed if choice["finish_reason"]] == [stop, stop]


@pytest.mark.parametrize("stop", STOPS)
async def test_a_message_names_the_stop_sequence(server: Server, stop: str) -> None:
    body = {"model": "bundled", "messages": user("hi"), "max_tokens": 40, "stop_sequences": ["no", stop]}
    reply = await post(server, "/v1/messages", body)
    assert reply["content"][0]["text"] == SAID.split(stop)[0]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)


async def test_a_stop_token_of_a_stop_string_comes_after_min_tokens(server: Server) -> None:
    body = {"prompt": "hi", "stop": USER, "max_tokens": 20, "temperature": 0}
    unchecked, later = [await post(server, COMPLETIONS, {**body, "min_tokens": size}) for size in (0, 16)]
    assert unchecked["usage"]["completion_tokens"] == len("hi there") + 1
    assert later["usage"]["completion_tokens"] > 16
