"""`chairlift chat` as it is typed: answers as they come, commands, several lines, ctrl-C, servers."""

import asyncio
import builtins
import json
import signal
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from chairlift.__main__ import main
from chairlift.api import ServerConfig
from chairlift.chat import ChatConfig, Message, Server, converse
from tests.api.conftest import serving
from tests.support.scripted_model import END_TOKEN, HYBRID, install, make_thinking_checkpoint

QUESTION: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}]


class Echo:
    """Answers with what the system and the user say, after a thought; the user's words decide how it ends."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.is_closed = False

    async def answer(self, messages: list[Message]) -> AsyncGenerator[tuple[str, str]]:
        self.asked.append([dict(message) for message in messages])
        if messages[-1]["content"] == "refuse":
            raise ConnectionError("no")
        yield "thought", "Hm."
        for message in messages:
            if message["role"] != "assistant":
                yield "text", f"[{message['content']}]"
        if messages[-1]["content"] == "stop":
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException], system: str | None = None) -> Echo:
    """Types these lines, and ctrl-C where one is KeyboardInterrupt, until the input ends."""
    typed: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(_: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    speaker = Echo()
    with asyncio.Runner() as runner:
        assert converse(speaker, system, runner) == 0
    assert speaker.is_closed
    return speaker


def test_answers_are_written_behind_their_thoughts_and_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = talk(monkeypatch, "a", "", "b", system="s")
    assert capsys.readouterr().out == "Hm.\n\n[s][a]\nHm.\n\n[s][a][b]\n"
    assert speaker.asked[1] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "[s][a]"},
        {"role": "user", "content": "b"},
    ]


def test_ctrl_c_ends_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    try:
        speaker = talk(monkeypatch, "stop", KeyboardInterrupt, "refuse", "b")
    finally:
        signal.signal(signal.SIGINT, usual)
    assert "(ended)" in capsys.readouterr().err
    contents = [message["content"] for message in speaker.asked[-1]]
    assert contents == ["stop", "[stop]", "b"]  # what was said is kept, and what was refused was not said


def test_commands_change_the_conversation_and_save_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    lines = ("/system be brief", "a", "/system", "/clear", '"""one', "/two", 'three"""', f"/save {path}")
    speaker = talk(monkeypatch, *lines, f"/save {tmp_path}", "/save", "/sing", "/help", "/bye", "never")
    assert [[message["content"] for message in asked] for asked in speaker.asked] == [
        ["be brief", "a"],
        ["one\n/two\nthree"],
    ]
    assert json.loads(path.read_text()) == [
        {"role": "user", "content": "one\n/two\nthree"},
        {"role": "assistant", "content": "[one\n/two\nthree]"},
    ]
    told = capsys.readouterr().err.splitlines()
    assert told[:4] == [
        "the system says so from here on",
        "the system says nothing from here on",
        "a new conversation",
        f"written to {path}",
    ]
    assert told[4:7] == [
        f"{tmp_path} cannot be written: Is a directory",
        "say where to: /save FILE",
        "/sing is unknown here; /help shows what there is",
    ]
    assert "  /save FILE     write the conversation so far as JSON" in told


def test_a_model_of_its_own_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = iter(["What is 17 + 25?", "a" * 3000, "/bye"])
    monkeypatch.setattr(builtins, "input", lambda _: next(typed))
    assert main(["chat", "--dtype", "float32", "--max-seq-len", "256", "--num-threads", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "17 + 25 = 42.\n"
    assert "error: This model's maximum context length is 256 tokens." in printed.err


def test_settings_of_an_engine_are_the_servers_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--dtype", "float32"]) == 2
    complaint = "chairlift: error: --dtype is the server's to set; leave it out, or leave --url out\n"
    assert capsys.readouterr().err == complaint


async def said(speaker: Server) -> list[tuple[str, str]]:
    """All text of each kind, in order."""
    pieces: dict[str, str] = {}
    async for kind, piece in speaker.answer(QUESTION):
        pieces[kind] = pieces.get(kind, "") + piece
    return list(pieces.items())


async def test_a_server_answers_with_thoughts_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    config = ServerConfig.model_validate({"api_key": ["k"]})
    async with serving(config, model=make_thinking_checkpoint(tmp_path, HYBRID)) as server:
        tokenizer = server.llm.inputs.tokenizer
        script.token_ids = [*tokenizer.encode("<think>\nHm.\n</think>\n\nFour.", add_special_tokens=False), END_TOKEN]
        for url in (server.url, f"{server.url}/v1/"):
            speaker = Server(ChatConfig(url=url, api_key=SecretStr("k"), temperature=0.0), "bundled")
            assert await said(speaker) == [("thought", "Hm."), ("text", "Four.")]
        with pytest.raises(ConnectionError, match="the server says 401: no valid API key"):
            await said(Server(ChatConfig(url=server.url), None))
    with pytest.raises(ConnectionError, match="cannot be asked"):
        await said(Server(ChatConfig(url=server.url), None))
