"""Every exception that Chairlift raises on purpose.

ChairliftError
├── InvalidRequest (ValueError)      the caller's input cannot be served; `param` names the field
│   └── ModelNotFound                a request names a model that is not served here
├── ConfigurationError (ValueError)  a setting that cannot work on this machine or with this model
│   └── CheckpointError              a checkpoint that is missing, damaged or not a supported model
├── CacheFull (ValueError)           more slots asked for than are free
├── InvalidApiKey                    a request without a key that this server knows
├── QueueFull                        the bounded waiting queue has no place left
├── QueueTimeout                     the request waited longer for a slot than it may
├── EngineClosed                     the engine was closed, or is draining; nothing new is taken
├── RequestFailed                    this one request could not be computed; the others go on
└── EngineDead                       a step failed or hung; the engine serves nothing any more
    └── EngineHung                   a step did not come back within its limit
"""


class ChairliftError(Exception):
    """Base of all of them: `except ChairliftError` catches what this package raises on purpose."""


class InvalidRequest(ChairliftError, ValueError):
    """The caller's input cannot be served. The message says what to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not have."""


class InvalidApiKey(ChairliftError):
    """The request brings no key, or none that this server knows."""

    def __init__(self) -> None:
        super().__init__("no valid API key: send one of this server's as 'Authorization: Bearer KEY'")


class ConfigurationError(ChairliftError, ValueError):
    """A setting that cannot work on this machine or with this model."""


class CheckpointError(ConfigurationError):
    """A checkpoint that is missing, damaged, or of a kind that is not supported."""


class CacheFull(ChairliftError, ValueError):
    """More slots were asked for than are free. Nothing was claimed."""

    def __init__(self, num_asked: int, num_free: int) -> None:
        super().__init__(f"asked for {num_asked} cache slots, {num_free} are free")
        self.num_asked = num_asked
        self.num_free = num_free


class QueueFull(ChairliftError):
    """The waiting queue has no place left; try again in about `retry_after` seconds."""

    def __init__(self, max_queue_size: int, retry_after: float = 1.0) -> None:
        super().__init__(f"the waiting queue is full ({max_queue_size} requests); try again later")
        self.retry_after = retry_after


class QueueTimeout(ChairliftError):
    """The request waited longer for a slot than it may; the queue may be shorter in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosed(ChairliftError):
    """The engine was closed or is draining; nothing new is taken."""


class RequestFailed(ChairliftError):
    """This one request could not be computed; the others go on."""


class EngineDead(ChairliftError):
    """A step failed or hung and the engine stopped; what ran then ended with this error."""


class EngineHung(EngineDead):
    """A step did not come back within its limit, or the engine's thread is gone."""
