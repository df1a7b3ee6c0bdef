"""Every exception that Chairlift raises on purpose.

ChairliftError
├── InvalidRequest (ValueError)      the caller's input cannot be served; `param` names the field
│   ├── ContextLengthExceeded        prompt and answer together are longer than a sequence may be
│   ├── InvalidGrammar               a grammar or schema that cannot be compiled
│   └── ModelNotFound                a request names a model that is not served here
├── ConfigurationError (ValueError)  a setting that cannot work on this machine or with this model
│   └── CheckpointError              a checkpoint that is missing, damaged or not a supported model
├── CacheFull (ValueError)           more slots asked for than are free or warm
├── InvalidApiKey                    a request without a key that this server knows
├── Unserved                         the request got no slot; `retry_after` says when to try again
│   ├── QueueFull                    the waiting queue has no place for it
│   └── QueueTimeout                 it waited too long for a slot
├── ClientTooBusy                    one client has too many requests being read or checked
├── ServerTooBusy                    all clients together have too many requests being read or checked
├── GrammarsBusy                     no grammar can be compiled now: there are too many others
├── EngineClosed                     the engine was closed, or is draining; it accepts no new requests
├── ServerUnreachable                a command was told to use a server, and none answers there
├── RequestFailed                    this one request could not be computed; others continue
└── EngineDead                       a step failed or hung; the engine has stopped
    └── EngineHung                   a step took longer than its limit
"""

import re
from dataclasses import dataclass
from typing import Any


class ChairliftError(Exception):
    """Base of all exceptions that this package raises on purpose. Instances can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args), self.__dict__


def _revive(kind: type[ChairliftError], args: tuple[Any, ...]) -> ChairliftError:
    """Bypasses the constructor, whose parameters may differ from `args`."""
    return kind.__new__(kind, *args)


class InvalidRequest(ChairliftError, ValueError):
    """The caller's input cannot be served. The message says what to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class PromptExcess:
    """Compares how long a prompt is, or is at least, with how long it may be, in tokens."""

    num_tokens: int
    limit: int


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together are longer than a sequence may be; the message says how long that is.

    `excess` is None if the prompt alone fits, or if its length is not known.
    """

    def __init__(self, message: str, param: str | None = None, excess: PromptExcess | None = None) -> None:
        super().__init__(message, param)
        self.excess = excess


class InvalidGrammar(InvalidRequest):
    """The grammar or schema that an answer must follow cannot be compiled. `line` is None where unknown."""

    def __init__(self, reason: str | None, line: int | None = None) -> None:
        place = "" if line is None else f"line {line}: "
        super().__init__(f"the grammar or schema cannot be compiled: {place}{reason}", "structured_outputs")
        self.reason = reason
        self.line = line


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not have."""


class InvalidApiKey(ChairliftError):
    """The request has no key, or one that this server does not know."""

    def __init__(self) -> None:
        super().__init__(
            "no valid API key: send one of this server's as 'Authorization: Bearer KEY' (to /v1/messages also"
            " as 'x-api-key: KEY')"
        )


class ConfigurationError(ChairliftError, ValueError):
    """A setting that cannot work on this machine or with this model."""


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_./-]{1,100}")
_MOST_OF_VALUE = 60  # characters
_MOST_OF_MESSAGE = 1000


def shown(value: object) -> str:
    """A value from a file, quoted for a message and cut after `_MOST_OF_VALUE` characters."""
    text = repr(value)
    return text if len(text) <= _MOST_OF_VALUE else f"{text[:_MOST_OF_VALUE]}..."


def named(name: object) -> str:
    """A name from a file: unchanged if it looks like a name, else as `shown` formats it."""
    return str(name) if _PLAIN_NAME.fullmatch(str(name)) else shown(name)


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def sized(num_bytes: float) -> str:
    """An amount of memory in the largest unit of which it has at least one: `1.50 GiB`, `312 bytes`."""
    exponent = min(max(0, (int(abs(num_bytes)).bit_length() - 1) // 10), len(_UNITS) - 1)
    return f"{num_bytes / 1024**exponent:.{2 if exponent else 0}f} {_UNITS[exponent]}"


class CheckpointError(ConfigurationError):
    """A checkpoint that is missing, damaged, or of a kind that is not supported.

    Its files, and libraries' errors about them, may contain anything: the message becomes one line of limited length.
    """

    def __init__(self, message: str) -> None:
        if len(message) > _MOST_OF_MESSAGE:
            message = f"{message[: _MOST_OF_MESSAGE // 2]}...{message[-_MOST_OF_MESSAGE // 2 :]}"
        printable = (" " if each.isspace() else each if each.isprintable() else repr(each)[1:-1] for each in message)
        super().__init__("".join(printable))


class CacheFull(ChairliftError, ValueError):
    """More slots were asked for than are free or warm. Nothing was claimed."""

    def __init__(self, num_asked: int, num_free: int) -> None:
        super().__init__(f"asked for {num_asked} cache slots, {num_free} are free")
        self.num_asked = num_asked
        self.num_free = num_free


class Unserved(ChairliftError):
    """The request was not queued, or was removed from the queue, which may be shorter in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Unserved):
    """The waiting queue has no place for this request."""


class QueueTimeout(Unserved):
    """The request waited too long for a slot."""


class ClientTooBusy(ChairliftError):
    """One client has too many requests being read or checked."""


class ServerTooBusy(ChairliftError):
    """More requests are being read or checked than the server can hold."""


class GrammarsBusy(ChairliftError):
    """Too many grammars are being compiled, or no thread or process can be started for another one."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this grammar cannot be compiled now: {reason}; try again later")


class ServerUnreachable(ChairliftError):
    """No server answers at the address that a command was told to use. The message says why."""


class EngineClosed(ChairliftError):
    """The engine was closed or is draining; it accepts no new requests."""


class RequestFailed(ChairliftError):
    """This one request could not be computed; others continue."""


class EngineDead(ChairliftError):
    """A step failed or hung and the engine stopped; its running requests ended with this error."""


class EngineHung(EngineDead):
    """A step exceeded its time limit, or the engine's thread is gone."""
