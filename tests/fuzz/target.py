"""Serves a checkpoint as far as its first token, and tells a refusal from a defect.

Two outcomes are right: it is served, or one line says what is wrong with it. Any other exception is a defect, and so is
a refusal that is really a failed allocation: somebody believed a number.
"""

from collections.abc import Iterator
from pathlib import Path

from chairlift import LLM
from chairlift.config import DType
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import ConfigurationError, InvalidRequest
from chairlift.models import load_adapted, load_model, open_checkpoint
from chairlift.models.config import AdaptedConfig
from chairlift.models.loader import grouped_size
from chairlift.params import RequestOutput, SamplingParams
from tests.fuzz.runner import Defect

_CACHE_BYTES = 2**20
_MAX_SEQ_LEN = 16  # tokens: no model of the corpus has fewer positions
_MOST_OF_MESSAGE = 1500  # characters
_FAILED_ALLOCATIONS = ("alloc", "out of memory", "Cannot allocate")
_PROMPT = [1, 2, 3]
_CONVERSATION = [{"role": "user", "content": "Is the hill high?"}]
_ONE_TOKEN = SamplingParams(max_tokens=1)


def attempt(path: Path) -> str | None:
    """Serves the checkpoint. Returns None if that works, or the message of its refusal. Defect for all else."""
    try:
        return serve(path)
    except Exception as error:
        raise Defect(f"{type(error).__module__}.{type(error).__qualname__}: {error}") from error


def serve(path: Path) -> str | None:
    """As `attempt`, whatever memory it takes and whatever it raises."""
    try:
        with LLM(str(path), device="cpu", kv_cache_memory_bytes=_CACHE_BYTES, max_batch_size=1) as model:
            _check_answer(model.generate([_PROMPT], _ONE_TOKEN, use_tqdm=False))
            _try_chat(model)
    except (ConfigurationError, InvalidRequest) as error:
        return _checked(error)
    return None


def load(path: Path) -> str | None:
    """Loads the checkpoint's weights and its tokenizer, and computes nothing. Returns what `serve` does."""
    try:
        checkpoint = open_checkpoint(str(path))
        grouped_size(checkpoint)
        if isinstance(checkpoint.config, AdaptedConfig):
            load_adapted(checkpoint, DType.FLOAT32, "cpu")
        else:
            load_model(checkpoint, DType.FLOAT32, "cpu", _MAX_SEQ_LEN, keeps_groups=True)
        Tokenizer(path)
    except (ConfigurationError, InvalidRequest) as error:
        return _checked(error)
    return None


def _try_chat(model: LLM) -> None:
    """A conversation may be refused: by the template, or since the vocabulary lacks its tokens."""
    try:
        model.chat(_CONVERSATION, _ONE_TOKEN, use_tqdm=False)
    except InvalidRequest as error:
        _checked(error)


def _check_answer(outputs: list[RequestOutput]) -> None:
    if not outputs[0].outputs[0].finish_reason:
        raise Defect("a request did not end")


def _checked(error: Exception) -> str:
    """The message. Defect if it is no short printable line, or if the error is really about memory."""
    message = str(error)
    if not message or not message.isprintable() or len(message) > _MOST_OF_MESSAGE:
        raise Defect(f"refused with what is no line: {message[:_MOST_OF_MESSAGE]!r}")
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or any(sign in str(cause) for sign in _FAILED_ALLOCATIONS):
            raise Defect(f"an allocation failed: {message}") from error
    return message


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
