"""Chairlift: a small, fast LLM serving engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.engine.llm import LLM
    from chairlift.params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "chairlift.engine.llm",
    "AsyncLLM": "chairlift.engine.async_llm",
    "EngineConfig": "chairlift.config",
    "SamplingParams": "chairlift.params",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use, so that the command line starts without torch and pydantic."""
    from importlib import import_module

    from chairlift.openmp import limit_spinning

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    limit_spinning()
    return getattr(import_module(_MODULES[name]), name)
