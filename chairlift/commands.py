"""What `chairlift serve | chat | generate | bench` do. Their settings stand in the help in the order in which the
models have them; a title stands above the setting that is named with it.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from chairlift.flags import Command, read_settings

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Coroutine

_LAST_THREADS_S = 3.0
_NURSE = "from chairlift.commands import nurse; nurse({})"

_ENGINE_GROUPS = {
    "model": "model",
    "computation": "device",
    "memory": "max_batch_size",
    "scheduling": "max_num_batched_tokens",
}
_SERVER_GROUPS = {"server": "host", "security": "api_key", "limits": "max_body_bytes", "logging": "log_format"}
_BENCH_GROUPS = {"server": "url", "load": "num_requests", "prompts": "prompt_tokens", "results": "goodput"}


def serve_command() -> Command:
    """`chairlift serve`: settings of the engine and of the server."""
    from chairlift.api import ServerConfig
    from chairlift.config import EngineConfig

    return Command(
        "serve",
        "Serve a model over HTTP, with an OpenAI-style API.",
        models=(EngineConfig, ServerConfig),
        groups=_ENGINE_GROUPS | _SERVER_GROUPS,
        examples=(
            "chairlift serve smollm2",
            "chairlift serve path-or-hub-id --dtype bfloat16 --max-batch-size 64",
            "chairlift serve --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile cert.pem --ssl-keyfile key.pem",
        ),
        positional="model",
    )


def chat_command() -> Command:
    """`chairlift chat`: settings of the conversation, and of the engine if the model runs here."""
    from chairlift.chat import ChatConfig
    from chairlift.config import EngineConfig

    return Command(
        "chat",
        "Talk with a model in the terminal: one in this process, or with --url a server's.",
        models=(ChatConfig, EngineConfig),
        groups={"chat": "max_tokens"} | _ENGINE_GROUPS,
        examples=("chairlift chat smollm2", "chairlift chat --url http://127.0.0.1:8000 --system 'Answer in French.'"),
        positional="model",
    )


def generate_command() -> Command:
    """`chairlift generate`: a prompt, and settings of the engine."""
    from chairlift.chat import AnswerConfig
    from chairlift.config import EngineConfig

    return Command(
        "generate",
        "Answer one prompt on standard output.",
        models=(AnswerConfig, EngineConfig),
        groups={"answer": "max_tokens"} | _ENGINE_GROUPS,
        examples=(
            'chairlift generate "What is the opposite of hot?"',
            'chairlift generate --model path-or-hub-id --raw --max-tokens 50 "Once upon a time"',
        ),
        positional="prompt",
    )


def bench_command() -> Command:
    """`chairlift bench`: settings of the load test."""
    from chairlift.loadtest import BenchConfig

    return Command(
        "bench",
        "Load-test any OpenAI-compatible server.",
        models=(BenchConfig,),
        groups=_BENCH_GROUPS,
        examples=(
            "chairlift bench --url http://127.0.0.1:8000 --concurrency 16",
            "chairlift bench --request-rate 4 --num-requests 500 --report report.html",
            "chairlift bench --sweep rate=1,2,4,8 --goodput ttft:500,tpot:50",
        ),
    )


def serve(arguments: Sequence[str]) -> int:
    """Serves until a signal or the engine's death. What cannot work is refused before torch is imported."""
    engine_config, config = read_settings(serve_command(), arguments)
    from chairlift.api.http.access import check_access
    from chairlift.api.http.listening import Listener
    from chairlift.api.telemetry.log import set_up_logging

    set_up_logging(config.log_format)
    check_access(config)
    with Listener(config) as listener:
        from chairlift.api import workers
        from chairlift.api.server import serve as serve_alone
        from chairlift.engine.async_llm import AsyncLLM

        async def run() -> int:
            with contextlib.ExitStack() as stack:
                nursery = None if config.api_workers in ("auto", 1) else stack.enter_context(workers.Nursery(_NURSE))
                llm = AsyncLLM(**engine_config.model_dump())
                size = workers.choose_size(config, llm.config)
                if size == 1:
                    return await serve_alone(llm, config, listener)
                nursery = nursery or stack.enter_context(workers.Nursery(_NURSE))
                return await workers.Crew(llm, config, listener, nursery, size).serve()

        return _run_to_code(run())


def nurse(fd: int) -> None:
    """The program of the process that forks API workers."""
    from chairlift.api.workers import nurse as fork_workers

    fork_workers(fd, _run_to_code)


def chat(arguments: Sequence[str]) -> int:
    """Reads messages and answers them until the user leaves."""
    config, engine_config = read_settings(chat_command(), arguments)
    import asyncio

    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.chat import converse, open_speaker

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return converse(open_speaker(config, engine_config), config.system, runner)


def generate(arguments: Sequence[str]) -> int:
    """Prints one answer."""
    answer_config, engine_config = read_settings(generate_command(), arguments)
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.engine.llm import LLM

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    with LLM(**engine_config.model_dump()) as llm:
        params = llm.inputs.default_chat_params.model_copy(update=answer_config.sampling)
        if llm.inputs.tokenizer.has_chat_template and not answer_config.raw:
            outputs = llm.chat([{"role": "user", "content": answer_config.prompt}], params)
        else:
            outputs = llm.generate(answer_config.prompt, params)
    sys.stdout.write(outputs[0].outputs[0].text + "\n")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Makes a load test."""
    (config,) = read_settings(bench_command(), arguments)
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.loadtest.runner import run

    set_up_logging()
    return run(config, _loop_factory())


def _run_to_code(main: "Coroutine[Any, Any, int]") -> int:
    """Runs a server's loop. Soon after its end the process ends, even if a thread hangs, in a tokenizer perhaps: a
    regular exit would wait for it.
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
