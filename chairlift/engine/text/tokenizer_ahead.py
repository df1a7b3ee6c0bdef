"""Reads the tokenizer of a GGUF file in a thread of its own, while another one loads the weights of the same file.

Both read the header, which the first to come reads for both. Loading spends its time in native code, beside which the
interpreter makes the tokenizer. No other kind of checkpoint is read ahead: its reader may import transformers, and two
threads that do so at once may see each other's modules half made. A GGUF file's reader does so only for a rule of
splitting that is not in `PATTERNS`.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from chairlift.config import EngineConfig
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.models.checkpoint import find_model
from chairlift.models.gguf import is_gguf, open_gguf

_SWITCH_INTERVAL_S = 0.0001  # in which a thread lets another one run that has come back from native code


def read_tokenizer_of(config: EngineConfig) -> Tokenizer:
    """Reads the tokenizer that a configuration names. CheckpointError if there is none that can be read."""
    return Tokenizer(find_model(config.tokenizer or config.model), config.chat_template)


@contextmanager
def reading_ahead(config: EngineConfig) -> Iterator["Future[Tokenizer] | None"]:
    """Begins to read the tokenizer, and keeps the header of its file until the end; None if it is not read ahead."""
    path = None if config.tokenizer else _local_file(config.model)
    if path is None:
        yield None
        return
    threads = ThreadPoolExecutor(1, "chairlift-tokenizer")
    try:
        with _short_switch_interval():
            header = threads.submit(open_gguf, path)  # whose result it holds
            yield threads.submit(read_tokenizer_of, config)
            del header
    finally:
        threads.shutdown(wait=False)


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shortens the interpreter's switch interval. Who finds it short, as beside another load, leaves it as it is."""
    before = sys.getswitchinterval()
    is_long = before > _SWITCH_INTERVAL_S
    if is_long:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        if is_long:
            sys.setswitchinterval(before)


def _local_file(model: str) -> Path | None:
    """Finds a GGUF file without a look at the network."""
    path = Path(model).expanduser()
    return path if path.is_file() and is_gguf(path) else None
