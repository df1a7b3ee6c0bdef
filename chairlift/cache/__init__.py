"""Cache slots: their owners and lengths (`pool`), their launches (`ledger`), their share of memory (`budget`), an index
of their tokens (`prefixes`), what layers keep in them (`layout`), their tensors (`manager`), the memory of these
(`memory`), recurrent states (`states`), how far each of these has come (`state_books`), and those kept for later
prompts (`snapshots`).

The public names are loaded on first use, so that the scheduler can import the ledger without importing torch.
"""

from typing import TYPE_CHECKING, Any

from chairlift.errors import CacheFull

if TYPE_CHECKING:
    from chairlift.cache.layout import KVCacheParams
    from chairlift.cache.manager import (
        ContinuousBatchingKVCacheCollection,
        ContinuousBatchingKVCacheManager,
        InputSymbol,
    )

__all__ = [
    "CacheFull",
    "ContinuousBatchingKVCacheCollection",
    "ContinuousBatchingKVCacheManager",
    "InputSymbol",
    "KVCacheParams",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from chairlift.cache import layout, manager

    return getattr(layout if hasattr(layout, name) else manager, name)
