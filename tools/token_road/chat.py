"""Serve one streamed chat in this process, and write which lines of Chairlift's functions ran meanwhile, as JSON.

    python tools/token_road/chat.py FILE

The server is the real one, on the bundled model in native code. A chat before the traced one fills the caches that
every later request finds full. Lines of modules and of class bodies run when they are imported, and are left out.
"""

import asyncio
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

import chairlift
from chairlift.api import ServerConfig
from chairlift.api.app import Api
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, start
from chairlift.engine.async_llm import AsyncLLM

MODEL = "bundled"
PACKAGE = Path(chairlift.__file__).parent
FIRST, TRACED = "Spell the word apple.", "What is 17 + 25?"


class LineTracer:
    """Collects the lines of functions below a folder that run in any thread while it is recording."""

    def __init__(self, folder: Path) -> None:
        self.lines: defaultdict[str, set[int]] = defaultdict(set)  # by path below the folder
        self._prefix = f"{folder}/"
        self._is_recording = False

    def install(self) -> None:
        """Traces this thread and every thread that starts from now on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records until the context is left, also in functions that were called before."""
        self._is_recording = True
        for newest in sys._current_frames().values():
            frame: FrameType | None = newest
            while frame is not None:
                if self._is_ours(frame):
                    frame.f_trace = self._note
                frame = frame.f_back
        try:
            yield
        finally:
            self._is_recording = False

    def _is_ours(self, frame: FrameType) -> bool:
        code = frame.f_code
        return bool(code.co_flags & CO_OPTIMIZED) and code.co_filename.startswith(self._prefix)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._note if self._is_recording and self._is_ours(frame) else None

    def _note(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not self._is_recording:
            return None
        if event == "line":
            self.lines[frame.f_code.co_filename.removeprefix(self._prefix)].add(frame.f_lineno)
        return self._note


async def chat(url: str, text: str) -> None:
    """Streams the answer to its end. RuntimeError if that is not the end of a stream."""
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": text}]}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as reply:
        received = await reply.read()
    if not received.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"the chat did not end as a stream does: {received.decode()}")


async def trace_chat(tracer: LineTracer) -> None:
    """Serves two chats, and records the second."""
    llm = AsyncLLM(attention_backend="cpu", num_threads=2)
    config = ServerConfig(port=0, served_model_name=[MODEL])
    runner = make_runner(Api(llm, config))
    with Listener(config) as listener:
        try:
            await start(runner, config, listener)
            await chat(listener.url, FIRST)
            with tracer.recording():
                await chat(listener.url, TRACED)
        finally:
            await llm.close()
            await runner.cleanup()


def main() -> None:
    """Traces a chat and writes the lines: a list of numbers by path below `chairlift/`."""
    tracer = LineTracer(PACKAGE)
    tracer.install()
    asyncio.run(trace_chat(tracer))
    sys.settrace(None)
    Path(sys.argv[1]).write_text(json.dumps({name: sorted(lines) for name, lines in sorted(tracer.lines.items())}))


if __name__ == "__main__":
    main()
