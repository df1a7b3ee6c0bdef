"""The command line: help, flags, errors; and `chairlift chat`."""

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

import chairlift
from chairlift.__main__ import COMMANDS, main
from chairlift.api import ServerConfig
from chairlift.chat import ChatConfig, Message, Server, converse
from chairlift.config import EngineConfig
from chairlift.errors import ConfigurationError
from chairlift.flags import fields_of, read_settings
from chairlift.word_wrap import WordWrap
from tests.api.conftest import serving
from tests.support.scripted_model import END_TOKEN, HYBRID, install, make_thinking_checkpoint

Printed = pytest.CaptureFixture[str]


def complaints(arguments: list[str], capsys: Printed) -> list[str]:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return [line.removeprefix("chairlift: error: ") for line in printed.err.splitlines()]


def serve_settings(*flags: str) -> tuple[EngineConfig, ServerConfig]:
    engine, server = read_settings(COMMANDS["serve"], flags)
    return engine, server


def help_of(command: str, capsys: Printed, flag: str = "--help") -> str:
    with pytest.raises(SystemExit) as caught:
        main([command, flag])
    assert caught.value.code == 0
    return capsys.readouterr().out


SIZE = "a number of bytes, such as 512MiB or 8GB"
DTYPES = "float32, bfloat16, float16 or auto"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["srve"], "unknown command srve; did you mean serve?"),
        (["fly"], "unknown command fly; see chairlift --help"),
        (["--port", "80"], "unknown flag --port; see chairlift --help"),
        (["serve", "--max-bach-size", "3"], "unknown flag --max-bach-size; did you mean --max-batch-size?"),
        (["serve", "--batch-size=3"], "unknown flag --batch-size; did you mean --max-batch-size?"),
        (["bench", "--no-ignore-eso"], "unknown flag --no-ignore-eso; did you mean --no-ignore-eos?"),
        (["serve", "--zzz"], "unknown flag --zzz; see chairlift serve --help"),
        (["serve", "--max"], "unknown flag --max; see chairlift serve --help"),  # no abbreviations: they change meaning
        (["serve", "--port"], "--port needs a value; one that begins with a dash is written --port=VALUE"),
        (["serve", "--port", "70000"], "--port must be at most 65535, not '70000'"),
        (["serve", "--port", "http"], "--port must be a whole number, not 'http'"),
        (["serve", "--max-batch-size", "0"], "--max-batch-size must be at least 1 or auto, not '0'"),
        (["serve", "--queue-timeout", "0"], "--queue-timeout must be above 0, not '0'"),
        (["serve", "--log-interval", "-1"], "--log-interval must be at least 0, not '-1'"),
        (["serve", "--log-interval", "nan"], "--log-interval must be a finite number, not 'nan'"),
        (["serve", "--log-format", "xml"], "--log-format must be text or json, not 'xml'"),
        (["serve", "--dtype", "flot32"], f"--dtype must be {DTYPES}, not 'flot32'; did you mean float32?"),
        (["serve", "a", "b"], "unexpected argument 'b'; see chairlift serve --help"),
        (["serve", "a", "--model", "b"], "both 'a' and --model are given; leave one of them out"),
        (["serve", "--port", "1", "--dtype", "float32", "--port=2"], "--port is given twice; leave one of them out"),
        (
            ["serve", "-tp", "1", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size is given twice; leave one of them out",
        ),
        (
            ["serve", "--share-prefixes", "--no-share-prefixes"],
            "--share-prefixes is given twice; leave one of them out",
        ),
        (["serve", "--kv-cache-memory-bytes", "8XB"], f"--kv-cache-memory-bytes must be {SIZE} or auto, not '8XB'"),
        (["serve", "--max-body-bytes", "8Gi"], f"--max-body-bytes must be {SIZE}, not '8Gi'"),
        (["serve", "--max-body-bytes", "0.1"], "--max-body-bytes must be at least 1, not '0.1'"),
        (["compare", "a"], "CANDIDATE is missing"),
        (["generate", "--raw=1", "a"], "--raw: ignored explicit argument '1'"),
        (["bench", "--ramp", "1"], "--ramp must be X,X, not '1'"),
        (["bench", "--ramp", "1,x"], "--ramp must be a number or X,X, not '1,x'"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_change(arguments: list[str], line: str, capsys: Printed) -> None:
    assert complaints(arguments, capsys) == [line]


def test_every_mistake_has_its_line(capsys: Printed) -> None:
    arguments = ["serve", "--port", "x", "--max-seq-len", "long", "--host", ""]
    assert complaints(arguments, capsys) == [
        "--max-seq-len must be a whole number or auto, not 'long'",
        "--host: String should have at least 1 character",
        "--port must be a whole number, not 'x'",
    ]


@pytest.mark.parametrize("flags", [["some/model"], ["--model", "some/model"], ["--port", "9000", "some/model"]])
def test_a_model_is_named_with_or_without_its_flag(flags: list[str]) -> None:
    assert serve_settings(*flags)[0].model == "some/model"


def test_a_prompt_may_come_through_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    for arguments in (["generate"], ["generate", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is 17 + 25?\n"))
        assert main(arguments) == 0
        assert capsys.readouterr().out == "17 + 25 = 42.\n"


class Terminal(io.StringIO):
    """A terminal at which nothing is typed."""

    def isatty(self) -> bool:
        return True


def test_no_prompt_at_a_terminal_is_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    (line,) = complaints(["generate", "--model", "/nowhere"], capsys)
    assert line.startswith("there is no prompt: ")


def test_flags_become_settings_and_the_rest_keeps_its_defaults() -> None:
    engine, server = serve_settings(
        *("--dtype", "float32", "--max-batch-size", "4", "--no-enable-prefix-caching"),
        *("--allowed-origin", "https://a.example", "--allowed-origin=https://b.example", "--api-key-file", "keys"),
    )
    assert engine == EngineConfig(dtype="float32", max_batch_size=4, enable_prefix_caching=False)
    assert server.allowed_origin == ["https://a.example", "https://b.example"]
    assert (server.api_key_file, server.port) == (Path("keys"), 8000)
    # A prompt may begin like a flag.
    answer, _ = read_settings(COMMANDS["generate"], ["--max-tokens", "5", "--", "-5 + 7?"])
    assert (answer.prompt, answer.max_tokens, answer.raw) == ("-5 + 7?", 5, False)


@pytest.mark.parametrize(
    ("written", "num_bytes"), [("8GB", 8_000_000_000), ("1.5 gib", 1_610_612_736), ("8 G", 8_000_000_000), ("77", 77)]
)
def test_sizes_have_units(written: str, num_bytes: int) -> None:
    engine, server = serve_settings("--kv-cache-memory-bytes", written, "--max-body-bytes", written)
    assert (engine.kv_cache_memory_bytes, server.max_body_bytes) == (num_bytes, num_bytes)
    assert EngineConfig(kv_cache_memory_bytes=written).kv_cache_memory_bytes == num_bytes


@pytest.mark.parametrize(
    ("flags", "model", "names"),
    [
        (["m", "--served-model-name", "a", "b"], "m", ["a", "b"]),
        (["--model", "m", "--served-model-name", "a", "b"], "m", ["a", "b"]),
        (["--served-model-name", "a", "m"], "m", ["a"]),  # the last word names the model if nothing else does
        (["--served-model-name", "a", "m", "--port", "1"], "m", ["a"]),
        (["--served-model-name=a", "m"], "m", ["a"]),
        (["--served-model-name", "a", "--served-model-name", "b,c", "--", "m"], "m", ["a", "b", "c"]),
        (["--served-model-name", "a"], "bundled", ["a"]),
    ],
)
def test_a_list_takes_several_words_beside_the_model(flags: list[str], model: str, names: list[str]) -> None:
    engine, server = serve_settings(*flags)
    assert (engine.model, server.served_model_name) == (model, names)


def test_variables_are_settings_that_flags_override(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"MAX_BATCH_SIZE": "16", "ENABLE_PREFIX_CACHING": "false", "DTYPE": "float16"}
    given = {f"CHAIRLIFT_SERVE__{name}": value for name, value in variables.items()}
    for name, value in (given | {"chairlift_serve__port": "9000", "CHAIRLIFT_BENCH__RAMP": "1,2"}).items():
        monkeypatch.setenv(name, value)
    engine, server = serve_settings("--dtype", "float32")
    assert (engine.max_batch_size, engine.enable_prefix_caching, engine.dtype) == (16, False, "float32")
    assert server.port == 9000
    assert read_settings(COMMANDS["bench"], [])[0].ramp == (1.0, 2.0)


def test_a_wrong_variable_is_named_and_no_obstacle_to_help(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    port, prot = "CHAIRLIFT_SERVE__PORT", "CHAIRLIFT_SERVE__PROT"
    for name, line in [
        (port, f"{port} must be a whole number, not 'x'"),
        (prot, f"unknown environment variable {prot}; did you mean {port}?"),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            with pytest.raises(ConfigurationError) as caught:
                serve_settings()
            assert str(caught.value) == line
            assert help_of("serve", capsys).startswith("usage: chairlift serve [MODEL] [flags]")


def test_a_variable_with_one_underscore_or_two_spellings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    port = "CHAIRLIFT_SERVE__PORT"
    for names, line in [
        (["CHAIRLIFT_SERVE_PORT"], f"unknown environment variable CHAIRLIFT_SERVE_PORT; did you mean {port}?"),
        ([port, port.lower()], f"{port} and {port.lower()} are the same; unset one of them"),
    ]:
        with monkeypatch.context() as patch:
            for name in names:
                patch.setenv(name, "9000")
            with pytest.raises(ConfigurationError) as caught:
                serve_settings()
            assert str(caught.value) == line
    # Kubernetes sets this where a service is called chairlift-serve.
    monkeypatch.setenv("CHAIRLIFT_SERVE_PORT", "tcp://10.0.0.1:80")
    assert serve_settings()[1].port == 8000


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_setting_once_in_its_group(name: str, capsys: Printed) -> None:
    settings = fields_of(COMMANDS[name])
    assert set(COMMANDS[name].groups.values()) <= set(settings)
    text = help_of(name, capsys)
    assert "\nexamples:\n" in text
    assert "==SUPPRESS==" not in text
    for setting in settings:
        assert f"  --{setting.replace('_', '-')}" in text or setting in COMMANDS[name].positionals


def test_choices_are_shown_as_they_are_typed(capsys: Printed) -> None:
    text = help_of("serve", capsys, "-h")
    for shown in ("--load-format safetensors|dummy", "--dtype float32|bfloat16|float16|auto", "--max-seq-len N|auto"):
        assert f"  {shown}" in text


def test_help_and_version_need_no_command(capsys: Printed) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"chairlift {chairlift.__version__}\n"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().out == text
    assert [name for name in COMMANDS if f"  {name} " in text] == list(COMMANDS)


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(
    ("arguments", "slow_modules"),
    [
        (["--help"], ["pydantic", "asyncio", "torch"]),
        (["--version"], ["pydantic", "asyncio", "torch"]),
        (["serve", "--help"], ["aiohttp", "transformers", "torch"]),
        (["serve", "--hlep"], ["aiohttp", "transformers", "torch"]),
        (["serve", "--host", "256.0.0.1"], ["transformers", "torch"]),
        (["generate", "--help"], ["aiohttp", "transformers", "torch"]),
        (["bench", "--help"], ["transformers", "torch"]),
    ],
)
def test_an_answer_about_flags_waits_for_no_slow_import(arguments: list[str], slow_modules: list[str]) -> None:
    script = (
        "import sys\nfrom chairlift.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('imported', [name for name in {slow_modules} if name in sys.modules])"
    )
    assert output_of(script, *arguments).splitlines()[-1] == "imported []"


def test_the_package_loads_its_public_names_on_first_use() -> None:
    script = "import sys, chairlift; chairlift.EngineConfig, chairlift.SamplingParams; print('torch' in sys.modules)"
    assert output_of(script) == "False\n"
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        chairlift.Engine  # noqa: B018


REQUEST = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}\n'
QUESTION: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}]


class Echo:
    """Answers with what the system and the user say, after a thought; the user's words decide how it ends."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.is_closed = False

    async def check(self) -> None: ...

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


def talk(*lines: str | type[BaseException], system: str | None = None, code: int = 0) -> Echo:
    """Types these lines, and ctrl-C where one is KeyboardInterrupt, until the input ends."""
    typed: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(_: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    speaker = Echo()
    with asyncio.Runner() as runner:
        assert converse(speaker, system, runner, read) == code
    assert speaker.is_closed
    return speaker


def test_answers_are_written_behind_their_thoughts_and_remembered(capsys: Printed) -> None:
    speaker = talk("a", "", "b", system="s")
    assert capsys.readouterr().out == "Hm.\n\n[s][a]\nHm.\n\n[s][a][b]\n"
    said = [(message["role"], message["content"]) for message in speaker.asked[1]]
    assert said == [("system", "s"), ("user", "a"), ("assistant", "[s][a]"), ("user", "b")]


def test_ctrl_c_ends_the_answer_and_not_the_program(capsys: Printed) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    try:
        speaker = talk("stop", KeyboardInterrupt, "refuse", "b", code=1)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert "(ended)" in capsys.readouterr().err
    contents = [message["content"] for message in speaker.asked[-1]]
    assert contents == ["stop", "[stop]", "b"]  # what was said is kept, and what was refused was not said


def test_commands_change_the_conversation_and_save_it(capsys: Printed, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = ("/system be brief", "a", "/system", "/clear", '"""one', "/two", 'three"""', f"/save {path}")
    speaker = talk(*lines, f"/save {tmp_path}", "/save", "/sing", "/help", "/bye", "never")
    contents = [[message["content"] for message in asked] for asked in speaker.asked]
    assert contents == [["be brief", "a"], ["one\n/two\nthree"]]
    question, answer = ("user", "one\n/two\nthree"), ("assistant", "[one\n/two\nthree]")
    assert json.loads(path.read_text()) == [{"role": role, "content": text} for role, text in (question, answer)]
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == ["the system message is set", "the system message is removed", "a new conversation begins"]
    assert told[3:5] == [f"written to {path}", f"{tmp_path} cannot be written: Is a directory"]
    assert told[5:7] == ["name a file: /save FILE", "unknown command /sing; /help lists the commands"]
    assert "  /save FILE     write the conversation so far as JSON" in told


def test_a_model_of_its_own_answers(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    typed = f"What is 17 + 25?\n{'a' * 3000}\n/bye\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", "--dtype", "float32", "--max-seq-len", "256", "--num-threads", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "17 + 25 = 42.\n"
    assert "error: This model's maximum context length is 256 tokens." in printed.err


def test_settings_of_an_engine_are_the_servers_where_there_is_one(capsys: Printed) -> None:
    complaint = "--dtype is a setting of the server; leave it out, or leave --url out"
    assert complaints(["chat", "--url", "http://127.0.0.1:1", "--dtype", "float32"], capsys) == [complaint]


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
    with pytest.raises(ConnectionError, match="no server answers at"):
        await said(Server(ChatConfig(url=server.url), None))


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat"],
        ["bench"],
        ["compare", "bundled", "http://127.0.0.1:1"],
        ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_server_that_is_not_there_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(REQUEST)
    url = [] if arguments[0] == "compare" else ["--url", "http://127.0.0.1:1"]
    assert main([*arguments, *url]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "chairlift: error: no server answers at http://127.0.0.1:1 (connection refused)"
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()


def in_lines(*pieces: str, width: int = 12) -> str:
    wrap = WordWrap(width)
    return "".join(map(wrap.push, pieces)) + wrap.end()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["The quick bro", "wn fox jumps."], "The quick\nbrown fox\njumps."),
        (["one", " two\n\n  three fours"], "one two\n\n  three\nfours"),
        (["twelve chars"], "twelve chars"),
        (["a " + "b" * 15 + " c"], "a\n" + "b" * 15 + " c"),
        (["```\na long line of code\n```\nand more text"], "```\na long line of code\n```\nand more\ntext"),
        (["日本語の 文字"], "日本語の\n文字"),
    ],
)
def test_an_answer_breaks_between_words(pieces: list[str], lines: str) -> None:
    assert in_lines(*pieces) == lines
