"""Cache slots: who owns them (`ledger`, plain Python), what is in them, and the tensors behind them (`manager`).

The public names are loaded on first use, so that the scheduler can import the ledger without importing torch.
"""

from typing import TYPE_CHECKING, Any

from chairlift.errors import CacheFull

if TYPE_CHECKING:
    from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
    from chairlift.cache.manager import ContinuousBatchingKVCacheManager, InputSymbol
    from chairlift.cache.params import KVCacheParams

__all__ = [
    "CacheFull",
    "ContinuousBatchingKVCacheCollection",
    "ContinuousBatchingKVCacheManager",
    "InputSymbol",
    "KVCacheParams",
]

_HOMES = {
    "ContinuousBatchingKVCacheCollection": "collection",
    "ContinuousBatchingKVCacheManager": "manager",
    "InputSymbol": "manager",
    "KVCacheParams": "params",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
