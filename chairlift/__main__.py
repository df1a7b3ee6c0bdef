"""The command line: `chairlift serve`, `chat`, `generate`, `run-batch`, `bench`, `compare`, `cache` and `models`.

Slow imports wait until needed.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift import __version__
from chairlift.errors import ChairliftError, ConfigurationError, ServerUnreachable

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Coroutine

    from chairlift.api import ServerConfig
    from chairlift.batch import BatchConfig
    from chairlift.chat import AnswerConfig, ChatConfig
    from chairlift.compare.config import CompareConfig
    from chairlift.config import EngineConfig
    from chairlift.disk.config import CacheConfig
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.loadtest import BenchConfig
    from chairlift.local_models import ModelsConfig

EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

_LAST_THREADS_S = 3.0
_NURSE = "from chairlift.__main__ import nurse; nurse({})"


class Command(NamedTuple):
    """A command of the program. Its settings are the fields of `models`, which the help lists in this order."""

    run: Callable[..., int]  # takes an instance of each model, and returns the exit code
    name: str
    summary: str
    models: tuple[str, ...]  # pydantic models, each as module:name
    groups: Mapping[str, str]  # titles in the help, each with the first setting below it
    examples: tuple[str, ...]
    positionals: tuple[str, ...] = ()  # settings whose flags may be left out


def serve(
    engine_config: "EngineConfig",
    config: "ServerConfig",
    make_llm: Callable[["EngineConfig"], "AsyncLLM"] | None = None,
) -> int:
    """Serves until a signal comes or the engine dies. Access and listener are checked before torch loads.

    `make_llm`: makes an engine of other parts than the defaults.
    """
    from chairlift.api.batches import claim_directory
    from chairlift.api.http.access import check_access
    from chairlift.api.http.listening import Listener
    from chairlift.api.telemetry.log import set_up_logging

    set_up_logging(config.log_format, config.log_file)
    check_access(config)
    with Listener(config) as listener, claim_directory(config) as config:
        from chairlift.api import workers
        from chairlift.api.server import serve as serve_alone
        from chairlift.engine.async_llm import AsyncLLM

        async def run() -> int:
            with contextlib.ExitStack() as stack:
                nursery = None if config.api_workers in ("auto", 1) else stack.enter_context(workers.Nursery(_NURSE))
                llm = make_llm(engine_config) if make_llm else AsyncLLM(**engine_config.model_dump())
                size = workers.choose_size(config, llm.config)
                if size == 1:
                    return await serve_alone(llm, config, listener)
                nursery = nursery or stack.enter_context(workers.Nursery(_NURSE))
                return await workers.Crew(llm, config, listener, nursery, size).serve()

        return _run_to_code(run())


def nurse(fd: int) -> None:
    from chairlift.api.workers import nurse as fork_workers

    fork_workers(fd, _run_to_code)


def chat(config: "ChatConfig", engine_config: "EngineConfig") -> int:
    import asyncio

    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.chat import converse, open_speaker

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return converse(open_speaker(config, engine_config), config.system, runner)


def generate(config: "AnswerConfig", engine_config: "EngineConfig") -> int:
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.engine.llm import LLM

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    prompt = config.prompt
    if prompt == "-":
        if sys.stdin.isatty():
            raise ConfigurationError('there is no prompt: chairlift generate "What is 17 + 25?", or a pipe that has it')
        prompt = sys.stdin.read()
    with LLM(**engine_config.model_dump()) as llm:
        params = llm.inputs.default_chat_params.model_copy(update=config.sampling)
        if llm.inputs.tokenizer.has_chat_template and not config.raw:
            outputs = llm.chat([{"role": "user", "content": prompt}], params)
        else:
            outputs = llm.generate(prompt, params)
    sys.stdout.write(outputs[0].outputs[0].text + "\n")
    return 0


def run_batch(config: "BatchConfig", engine_config: "EngineConfig") -> int:
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.batch.command import run

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    return run(config, engine_config, _loop_factory())


def bench(config: "BenchConfig") -> int:
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.loadtest.command import run

    set_up_logging()
    return run(config, _loop_factory())


def compare(config: "CompareConfig") -> int:
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.compare.command import run

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    return run(config)


def models(config: "ModelsConfig") -> int:
    from chairlift.local_models import run

    return run(config)


def cache(config: "CacheConfig") -> int:
    from chairlift.disk.command import run

    return run(config)


def _run_to_code(main: "Coroutine[Any, Any, int]") -> int:
    """Runs a server's loop. The process exits at most `_LAST_THREADS_S` after the loop's end, even if a thread hangs,
    for instance in a tokenizer: a regular exit would wait for it.
    """
    import asyncio

    async def run() -> int:
        code = await main
        ending = threading.Timer(_LAST_THREADS_S, _exit_at_once, [code])
        ending.daemon = True
        ending.start()
        return code

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


def _exit_at_once(code: int) -> None:
    logging.shutdown()  # writes what is in its queue
    os._exit(code)


def _loop_factory() -> Callable[[], "AbstractEventLoop"] | None:
    """uvloop's loop where it exists (not on Windows), else asyncio's own."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


_ENGINE = "chairlift.config:EngineConfig"
_ENGINE_GROUPS = {
    "model": "model",
    "computation": "device",
    "memory": "max_batch_size",
    "scheduling": "max_num_batched_tokens",
}
_COMMANDS = (
    Command(
        serve,
        "serve",
        "Serve a model over HTTP, with an OpenAI-style API.",
        models=(_ENGINE, "chairlift.api:ServerConfig"),
        groups=_ENGINE_GROUPS
        | {"server": "host", "security": "api_key", "limits": "max_body_bytes", "logging": "log_format"},
        examples=(
            "chairlift serve smollm2",
            "chairlift serve path-or-hub-id --dtype bfloat16 --max-batch-size 64",
            "chairlift serve --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile cert.pem --ssl-keyfile key.pem",
        ),
        positionals=("model",),
    ),
    Command(
        chat,
        "chat",
        "Talk with a model in the terminal: one in this process, or with --url a server's.",
        models=("chairlift.chat:ChatConfig", _ENGINE),
        groups={"chat": "max_tokens"} | _ENGINE_GROUPS,
        examples=("chairlift chat smollm2", "chairlift chat --url http://127.0.0.1:8000 --system 'Answer in French.'"),
        positionals=("model",),
    ),
    Command(
        generate,
        "generate",
        "Answer one prompt on standard output.",
        models=("chairlift.chat:AnswerConfig", _ENGINE),
        groups={"answer": "max_tokens"} | _ENGINE_GROUPS,
        examples=(
            'chairlift generate "What is the opposite of hot?"',
            "echo 'What is 17 + 25?' | chairlift generate",
            'chairlift generate --model path-or-hub-id --raw --max-tokens 50 "Once upon a time"',
        ),
        positionals=("prompt",),
    ),
    Command(
        run_batch,
        "run-batch",
        "Answer every request of a file, in the format of OpenAI's batches; goes on where it stopped.",
        models=("chairlift.batch:BatchConfig", _ENGINE),
        groups={"batch": "input_file"} | _ENGINE_GROUPS,
        examples=(
            "chairlift run-batch -i requests.jsonl -o replies.jsonl --model smollm2",
            "chairlift run-batch -i requests.jsonl -o replies.jsonl --url http://127.0.0.1:8000",
        ),
    ),
    Command(
        bench,
        "bench",
        "Load-test any OpenAI-compatible server.",
        models=("chairlift.loadtest:BenchConfig",),
        groups={"server": "url", "load": "num_requests", "prompts": "prompt_tokens", "results": "goodput"},
        examples=(
            "chairlift bench --url http://127.0.0.1:8000 --concurrency 16",
            "chairlift bench --request-rate 4 --num-requests 500 --report report.html",
            "chairlift bench --sweep rate=1,2,4,8 --goodput ttft:500,tpot:50",
        ),
    ),
    Command(
        compare,
        "compare",
        "Measure how far one model's next-token probabilities are from another's.",
        models=("chairlift.compare.config:CompareConfig",),
        groups={"measurement": "text", "results": "json"},
        examples=(
            "chairlift compare path-or-hub-id model=path-or-hub-id,quantization=int4",
            "chairlift compare model-bf16.gguf model-q4_k_m.gguf --text wiki.test.raw --json result.json",
            "chairlift compare path-or-hub-id http://127.0.0.1:8000 --max-windows 20",
        ),
        positionals=("reference", "candidate"),
    ),
    Command(
        cache,
        "cache",
        "List the prompts that servers have saved in a directory, or remove them.",
        models=("chairlift.disk.config:CacheConfig",),
        groups={"cache": "directory"},
        examples=("chairlift cache ~/.cache/prompts", "chairlift cache ~/.cache/prompts --clear --only 3f2a"),
        positionals=("directory",),
    ),
    Command(
        models,
        "models",
        "List the models on this machine, their sizes, and whether each can be served.",
        models=("chairlift.local_models:ModelsConfig",),
        groups={"models": "folder"},
        examples=("chairlift models", "chairlift models ~/models"),
        positionals=("folder",),
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}

HELP = """\
usage: chairlift COMMAND ...

Chairlift: a small, fast LLM serving engine.

commands:
  serve [MODEL]      serve a model over HTTP, with an OpenAI-style API
  chat [MODEL]       talk with a model in the terminal, its own or a server's
  generate [PROMPT]  answer one prompt, or what is piped in, on standard output
  run-batch          answer every request of a file
  bench              load-test any OpenAI-compatible server
  compare REFERENCE CANDIDATE
                     measure the divergence between two models, files, formats or servers
  cache DIRECTORY    list the prompts that servers have saved there, or remove them
  models [FOLDER]    list the models on this machine

flags:
  --help             show this, or after a command its flags, and leave
  --version          show the version and leave

examples:
  chairlift serve                                    # the bundled model on http://127.0.0.1:8000
  chairlift serve path-or-hub-id --port 9000
  chairlift chat smollm2
  chairlift generate "What is 17 + 25?"
  chairlift bench --url http://127.0.0.1:8000 --concurrency 16
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code, as docs/usage.md lists them."""
    name, *flags = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        return _run(name, flags)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChairliftError as error:
        for handler in logging.getLogger().handlers:
            handler.flush()  # what was logged earlier comes first
        for line in str(error).splitlines():
            sys.stderr.write(f"chairlift: error: {line}\n")
        return EXIT_UNREACHABLE if isinstance(error, ServerUnreachable) else EXIT_USAGE


def _run(name: str, flags: Sequence[str]) -> int:
    if name in ("", "-h", "--help"):
        sys.stdout.write(HELP)
        return 0 if name else EXIT_USAGE
    if name == "--version":
        sys.stdout.write(f"chairlift {__version__}\n")
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        kind = "flag" if name.startswith("-") else "command"
        advice = f"did you mean {close[0]}?" if close else "see chairlift --help"
        raise ConfigurationError(f"unknown {kind} {name}; {advice}")
    from chairlift.flags import read_settings
    from chairlift.openmp import limit_spinning

    limit_spinning()

    return COMMANDS[name].run(*read_settings(COMMANDS[name], flags))


if __name__ == "__main__":
    sys.exit(main())
