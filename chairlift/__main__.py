"""The command line: `chairlift serve | generate | bench`.

Flags are the fields of the configuration models, with their descriptions as help; each can also be set in the
environment (`CHAIRLIFT_SERVE__PORT=9000`).
"""

import asyncio
import logging
import os
import sys
import threading
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg, CliSubCommand, SettingsConfigDict, get_subcommand

from chairlift.api.config import ServerConfig
from chairlift.api.log_format import LogFormat, set_up_logging
from chairlift.api.server import check, serve
from chairlift.bench import BenchConfig, run_bench
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_PATIENCE_S = 3.0


class ServeCommand(ServerConfig, EngineConfig):
    """Serve a model over HTTP, with an OpenAI-style API."""


class GenerateCommand(EngineConfig):
    """Answer one prompt on standard output, and leave."""

    prompt: CliPositionalArg[str] = Field(description="what to say to the model")
    raw: bool = Field(False, description="continue the prompt as plain text, without the model's chat template")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="most new tokens; left out: all that fit")
    temperature: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="0 is greedy; left out: the model's own default"
    )


class BenchCommand(BenchConfig):
    """Load-test any OpenAI-compatible server."""


class CommandLine(BaseSettings):
    """Chairlift: a small, fast LLM serving engine."""

    model_config = SettingsConfigDict(
        env_prefix="CHAIRLIFT_",
        env_nested_delimiter="__",
        cli_prog_name="chairlift",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    serve: CliSubCommand[ServeCommand] = Field(description="serve a model over HTTP, with an OpenAI-style API")
    generate: CliSubCommand[GenerateCommand] = Field(description="answer one prompt on standard output")
    bench: CliSubCommand[BenchCommand] = Field(description="load-test any OpenAI-compatible server")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        parsed = CliApp.run(CommandLine, cli_args=sys.argv[1:] if arguments is None else arguments)
        command = get_subcommand(parsed, is_required=False)
        set_up_logging(command.log_format if isinstance(command, ServeCommand) else LogFormat.TEXT)
        match command:
            case ServeCommand():
                return _serve(command)
            case GenerateCommand():
                return _generate(command)
            case BenchCommand():
                return run_bench(command, _fast_loop())
            case _:
                CliApp.print_help(CommandLine)
                return EXIT_USAGE
    except ValidationError as error:
        return _complain(*_flag_complaints(error))
    except ChairliftError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _serve(command: ServeCommand) -> int:
    from chairlift.engine.async_llm import AsyncLLM

    config = ServerConfig(**_fields_of(command, ServerConfig))
    check(config)

    async def run() -> int:
        code = await serve(AsyncLLM(**_fields_of(command, EngineConfig)), config)
        # A thread that hangs, in a tokenizer perhaps, must not keep the process: a proper end would wait for it.
        ending = threading.Timer(_PATIENCE_S, os._exit, [code])
        ending.daemon = True
        ending.start()
        return code

    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(run())


def _generate(command: GenerateCommand) -> int:
    from chairlift.engine.llm import LLM

    logging.getLogger().setLevel(logging.WARNING)
    given = command.model_dump(include={"max_tokens", "temperature"}, exclude_none=True)
    with LLM(**_fields_of(command, EngineConfig)) as llm:
        params = llm.inputs.default_chat_params.model_copy(update=given)
        if llm.inputs.tokenizer.has_chat_template and not command.raw:
            outputs = llm.chat([{"role": "user", "content": command.prompt}], params)
        else:
            outputs = llm.generate(command.prompt, params)
    sys.stdout.write(outputs[0].outputs[0].text + "\n")
    return 0


def _fields_of(command: EngineConfig | ServerConfig, model: type[EngineConfig] | type[ServerConfig]) -> dict[str, Any]:
    return command.model_dump(include=set(model.model_fields))


def _fast_loop() -> Any:
    """uvloop's loop where it exists (not on Windows), else asyncio's own."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _flag_complaints(error: ValidationError) -> list[str]:
    """One line per flag, such as `--port: Input should be a valid integer`; alternatives are joined."""
    messages: dict[str, list[str]] = {}
    for each in error.errors(include_url=False):
        names = [str(part) for part in each["loc"][1:2]]
        flag = f"--{names[0].replace('_', '-')}: " if names else ""
        messages.setdefault(flag, []).append(each["msg"])
    return [flag + ", or ".join(alternatives) for flag, alternatives in messages.items()]


def _complain(*lines: str) -> int:
    for line in lines:
        sys.stderr.write(f"chairlift: error: {line}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
