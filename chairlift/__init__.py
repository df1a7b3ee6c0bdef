"""Chairlift: a small, fast LLM serving engine."""

from typing import TYPE_CHECKING, Any

from chairlift.config import EngineConfig
from chairlift.params import SamplingParams

if TYPE_CHECKING:
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.engine.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {"LLM": "chairlift.engine.llm", "AsyncLLM": "chairlift.engine.async_llm"}


def __getattr__(name: str) -> Any:
    """Loads the engine (and with it torch) on first use, so that the command line and the load test start at once."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
