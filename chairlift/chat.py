"""`chairlift chat`: a conversation in the terminal, with a model in this process or with a server.

Ctrl-C ends an answer and keeps the text so far; at the prompt it discards the line. Ctrl-D or /bye leaves.
"""

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from chairlift.config import EngineConfig
from chairlift.errors import ConfigurationError
from chairlift.reachability import require_server, unreachable
from chairlift.word_wrap import WordWrap

HELP = '''\
  /system TEXT   set the system message (without TEXT: remove it)
  /save FILE     write the conversation so far as JSON
  /clear         begin a new conversation
  /help          show this
  /bye           leave, as ctrl-D does
  """            begins and ends a message of several lines
  ctrl-C         ends the answer, not the program
'''
_PROMPT, _MORE, _QUOTES = "> ", ". ", '"""'
_EVENT = "data: "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Message = dict[str, str]


class SamplingConfig(BaseModel):
    """Says how to sample an answer; unset fields take the model's defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="most new tokens of an answer; unset: all that fit"
    )
    temperature: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="0 is greedy; unset: the model's own default"
    )

    @property
    def sampling(self) -> dict[str, Any]:
        return self.model_dump(include={"max_tokens", "temperature"}, exclude_none=True)


class AnswerConfig(SamplingConfig):
    """Settings of `chairlift generate` beside the engine's."""

    prompt: str = Field("-", description="what to say to the model; -, or nothing: what is read from standard input")
    raw: bool = Field(False, description="continue the prompt as plain text, without the model's chat template")


class ChatConfig(SamplingConfig):
    """Settings of `chairlift chat` beside the engine's."""

    url: str | None = Field(None, description="server to talk with; unset: a model in this process")
    api_key: SecretStr | None = Field(None, description="key for the server")
    system: str | None = Field(None, description="system message")


class Speaker(Protocol):
    """A model, in this process or on a server."""

    def answer(self, messages: list[Message]) -> AsyncGenerator[tuple[str, str]]:
        """Yields ("thought" or "text", new piece). `ConnectionError` if the server cannot be reached or fails."""
        ...

    async def check(self) -> None:
        """ServerUnreachable if nobody answers there."""
        ...

    async def close(self) -> None: ...


class OwnModel:
    """A model in this process. Thoughts are shown as the model writes them."""

    def __init__(self, config: ChatConfig, engine: EngineConfig) -> None:
        from chairlift.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM(**engine.model_dump())
        self._params = self._llm.inputs.default_chat_params.model_copy(update=config.sampling)

    async def answer(self, messages: list[Message]) -> AsyncGenerator[tuple[str, str]]:
        """See `Speaker`. Closing the generator aborts the request."""
        num_told = 0
        async with contextlib.aclosing(self._llm.chat(messages, self._params)) as outputs:
            async for output in outputs:
                text = output.outputs[0].text
                yield "text", text[num_told:]
                num_told = len(text)

    async def check(self) -> None:
        """Does nothing: the model is here."""

    async def close(self) -> None:
        await self._llm.close()


class Server:
    """A server with `/v1/chat/completions`."""

    def __init__(self, config: ChatConfig, model: str | None) -> None:
        """`model`: its name on the server; None: the server's default."""
        assert config.url is not None, "a server has an address"
        self._root = config.url.rstrip("/").removesuffix("/v1")
        self._url = f"{self._root}/v1/chat/completions"
        self._body = {**config.sampling, "stream": True, **({} if model is None else {"model": model})}
        key = None if config.api_key is None else config.api_key.get_secret_value()
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def answer(self, messages: list[Message]) -> AsyncGenerator[tuple[str, str]]:
        """See `Speaker`."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http,
                http.post(self._url, json={**self._body, "messages": messages}) as response,
            ):
                if response.status != 200:
                    raise ConnectionError(f"the server says {response.status}: {_reason(await response.text())}")
                async for line in response.content:
                    for piece in _pieces(line.decode().strip()):
                        yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionError(str(unreachable(self._root, error))) from error

    async def check(self) -> None:
        """See `Speaker`."""
        import aiohttp

        async with aiohttp.ClientSession(headers=self._headers) as http:
            await require_server(http, self._root)

    async def close(self) -> None:
        """Does nothing: no connection stays open between two answers."""


def _pieces(line: str) -> list[tuple[str, str]]:
    if not line.startswith(_EVENT) or line == f"{_EVENT}[DONE]":
        return []
    event = json.loads(line.removeprefix(_EVENT))
    if "error" in event:
        raise ConnectionError(f"the server says: {event['error']['message']}")
    deltas = [choice["delta"] for choice in event.get("choices", ())]
    named = (("thought", "reasoning_content"), ("text", "content"))
    return [(kind, delta[name]) for delta in deltas for kind, name in named if delta.get(name)]


def _reason(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):  # not an error in OpenAI's format
        return body[:200]


def open_speaker(config: ChatConfig, engine: EngineConfig) -> Speaker:
    """Opens the model. `ConfigurationError` if engine settings are given for a model on a server."""
    given = engine.model_fields_set
    if config.url is None:
        return OwnModel(config, engine)
    if others := sorted(given - {"model"}):
        flag = others[0].replace("_", "-")
        raise ConfigurationError(f"--{flag} is a setting of the server; leave it out, or leave --url out")
    return Server(config, engine.model if "model" in given else None)


class Conversation:
    """The messages so far, and commands that change them."""

    def __init__(self, system: str | None) -> None:
        self.messages: list[Message] = []
        self.set_system(system or "")

    def set_system(self, text: str) -> None:
        """Replaces the system message, which comes first; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = ([{"role": "system", "content": text}] if text else []) + others

    def clear(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def obey(self, line: str) -> str:
        """Executes a line that begins with a slash; returns what to tell the user."""
        command, _, rest = line.partition(" ")
        match command, rest.strip():
            case "/system", text:
                self.set_system(text)
                return "the system message is set" if text else "the system message is removed"
            case "/save", "":
                return "name a file: /save FILE"
            case "/save", name:
                return self._save(Path(name).expanduser())
            case "/clear", "":
                self.clear()
                return "a new conversation begins"
            case "/help", "":
                return HELP.rstrip()
            case _:
                return f"unknown command {command}; /help lists the commands"

    def _save(self, path: Path) -> str:
        try:
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        return f"written to {path}"


def converse(
    speaker: Speaker, system: str | None, runner: asyncio.Runner, read_line: Callable[[str], str] = input
) -> int:
    """Answers messages from the terminal until the user leaves. Returns the exit code: 1 if one has no answer.

    ServerUnreachable if nobody answers at the beginning. `read_line`: shows a prompt and reads a line; EOFError at the
    end of the input.
    """
    with contextlib.suppress(ImportError):  # on Windows
        import readline  # noqa: F401 - gives `input` a history and an editor
    conversation = Conversation(system)
    runner.run(speaker.check())
    is_good = True
    if sys.stdin.isatty():
        _tell("/help lists the commands; ctrl-D leaves")
    try:
        while (said := _read_message(read_line)) is not None and said != "/bye":
            if said.startswith("/"):
                _tell(conversation.obey(said))
            elif said:
                is_good &= _answer(speaker, conversation, said, runner)
    finally:
        runner.run(speaker.close())
    return 0 if is_good else 1


def _answer(speaker: Speaker, conversation: Conversation, said: str, runner: asyncio.Runner) -> bool:
    """Adds a message and its answer, or neither if there is no answer at all. Returns false after an error."""
    is_good = True
    conversation.messages.append({"role": "user", "content": said})
    texts: list[str] = []
    try:
        runner.run(_show(speaker, conversation.messages, texts))
    except KeyboardInterrupt:
        _tell("\n(ended)")
    except (ConnectionError, ValueError) as error:  # ValueError: for instance, the conversation is too long
        _tell(f"error: {error}")
        is_good = False
    if texts:
        conversation.messages.append({"role": "assistant", "content": "".join(texts)})
    else:
        conversation.messages.pop()
    return is_good


async def _show(speaker: Speaker, messages: list[Message], texts: list[str]) -> None:
    """Writes the answer as it arrives, and appends its text to `texts`."""
    shown = "text"
    wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    async with contextlib.aclosing(speaker.answer(messages)) as pieces:
        async for kind, piece in pieces:
            if kind != shown:
                _write(_styled((wrap.end() if wrap else "") + ("\n\n" if shown == "thought" else ""), shown))
                shown, wrap = kind, WordWrap(wrap.width) if wrap else None
            if kind == "text":
                texts.append(piece)
            _write(_styled(wrap.push(piece) if wrap else piece, kind))
    _write(_styled(wrap.end() if wrap else "", shown) + "\n")


def _styled(text: str, kind: str) -> str:
    return f"{_DIM}{text}{_PLAIN}" if text and kind == "thought" and sys.stdout.isatty() else text


def _read_message(read_line: Callable[[str], str]) -> str | None:
    """A line, or the lines between triple quotes; None at the end of the input."""
    try:
        message = read_line(_PROMPT if sys.stdin.isatty() else "")
        if message.lstrip().startswith(_QUOTES):
            message = message.lstrip().removeprefix(_QUOTES)
            while not message.rstrip().endswith(_QUOTES):
                message += "\n" + read_line(_MORE if sys.stdin.isatty() else "")
            return message.rstrip().removesuffix(_QUOTES).strip("\n")
        return message.strip()
    except (KeyboardInterrupt, EOFError) as error:
        _tell("")
        return None if isinstance(error, EOFError) else ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
