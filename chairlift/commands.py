"""What `chairlift serve | generate | bench` do, and how their flags are grouped in the help."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from chairlift.flags import Command, read_settings

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

Groups = dict[str, tuple[str, ...]]  # the settings under each title of the help

_LAST_THREADS_S = 3.0

ENGINE_GROUPS: Groups = {
    "model": (
        "model",
        "tokenizer",
        "chat_template",
        "generation_config",
        "load_format",
        "served_model_name",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "computation": (
        *("device", "dtype", "attention_backend", "quantization", "num_threads", "batch_invariant", "seed"),
        "step_timeout",
    ),
    "memory": ("max_batch_size", "max_seq_len", "num_spare_slots", "memory_fraction", "enable_prefix_caching"),
    "scheduling": (
        *("max_num_batched_tokens", "max_steps_per_launch", "max_queue_size", "queue_timeout", "priority_ageing"),
        *("preempt_after", "preempt_levels"),
    ),
}
SERVER_GROUPS: Groups = {
    "server": ("host", "port", "drain_timeout"),
    "security": (
        *("api_key", "api_key_file", "key_priority_range", "key_queue_share", "share_prefixes", "allowed_origin"),
        *("allowed_host", "ssl_certfile", "ssl_keyfile"),
    ),
    "limits": (
        *("max_body_bytes", "header_timeout", "body_timeout", "idle_timeout"),
        *("write_timeout", "keep_alive_interval"),
    ),
    "logging": ("log_format", "log_interval"),
}
ANSWER_GROUPS: Groups = {"answer": ("prompt", "raw", "max_tokens", "temperature")}
BENCH_GROUPS: Groups = {
    "server": ("url", "endpoint", "model", "api_key", "timeout"),
    "load": (
        *("num_requests", "concurrency", "request_rate", "burstiness", "ramp", "trace", "trace_speedup", "warmup"),
        "sweep",
    ),
    "prompts": (
        *("prompt_tokens", "output_tokens", "prefix_tokens", "num_prefixes"),
        *("conversations", "turns", "think_time", "temperature", "ignore_eos", "seed"),
    ),
    "results": ("goodput", "goodput_share", "json", "report"),
}


class AnswerConfig(BaseModel):
    """What `chairlift generate` asks the model for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(description="what to say to the model")
    raw: bool = Field(False, description="continue the prompt as plain text, without the model's chat template")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="most new tokens; unset: all that fit")
    temperature: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="0 is greedy; unset: the model's own default"
    )


def serve_command() -> Command:
    """`chairlift serve`: settings of the engine and of the server."""
    from chairlift.api.config import ServerConfig
    from chairlift.config import EngineConfig

    return Command(
        "serve",
        "Serve a model over HTTP, with an OpenAI-style API.",
        models=(EngineConfig, ServerConfig),
        groups=ENGINE_GROUPS | SERVER_GROUPS,
        positional="model",
        examples=(
            "chairlift serve path-or-hub-id --dtype bfloat16 --max-batch-size 64",
            "chairlift serve --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile cert.pem --ssl-keyfile key.pem",
        ),
    )


def generate_command() -> Command:
    """`chairlift generate`: settings of the engine, and a prompt."""
    from chairlift.config import EngineConfig

    return Command(
        "generate",
        "Answer one prompt on standard output.",
        models=(EngineConfig, AnswerConfig),
        groups=ANSWER_GROUPS | ENGINE_GROUPS,
        positional="prompt",
        examples=(
            'chairlift generate "What is the opposite of hot?"',
            'chairlift generate --model path-or-hub-id --raw --max-tokens 50 "Once upon a time"',
        ),
    )


def bench_command() -> Command:
    """`chairlift bench`: settings of the load test."""
    from chairlift.loadtest import BenchConfig

    return Command(
        "bench",
        "Load-test any OpenAI-compatible server.",
        models=(BenchConfig,),
        groups=BENCH_GROUPS,
        examples=(
            "chairlift bench --url http://127.0.0.1:8000 --concurrency 16",
            "chairlift bench --request-rate 4 --num-requests 500 --report report.html",
            "chairlift bench --sweep rate=1,2,4,8 --goodput ttft:500,tpot:50",
        ),
    )


def serve(arguments: Sequence[str]) -> int:
    """Serves until a signal or the engine's death."""
    engine_config, config = read_settings(serve_command(), arguments)
    import asyncio

    from chairlift.api.server import check
    from chairlift.api.server import serve as serve_engine
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.engine.async_llm import AsyncLLM

    set_up_logging(config.log_format)
    check(config)

    async def run() -> int:
        code = await serve_engine(AsyncLLM(**engine_config.model_dump()), config)
        # A thread that hangs, in a tokenizer perhaps, must not keep the process: a regular exit would wait for it.
        ending = threading.Timer(_LAST_THREADS_S, _exit_at_once, [code])
        ending.daemon = True
        ending.start()
        return code

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


def generate(arguments: Sequence[str]) -> int:
    """Prints one answer."""
    engine_config, answer_config = read_settings(generate_command(), arguments)
    from chairlift.api.telemetry.log import set_up_logging
    from chairlift.engine.llm import LLM

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    given = answer_config.model_dump(include={"max_tokens", "temperature"}, exclude_none=True)
    with LLM(**engine_config.model_dump()) as llm:
        params = llm.inputs.default_chat_params.model_copy(update=given)
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
    from chairlift.loadtest import run_bench

    set_up_logging()
    return run_bench(config, _loop_factory())


def _exit_at_once(code: int) -> None:
    logging.shutdown()  # writes what is in its queue
    os._exit(code)


def _loop_factory() -> Callable[[], "AbstractEventLoop"] | None:
    """uvloop's loop where it exists (not on Windows), else asyncio's own."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
