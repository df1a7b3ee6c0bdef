"""Prefixes that outlive the engine: what makes two caches the same (`identity`), the digests of weights (`weights`),
when reading pays (`costs`), and the prefixes themselves (`store`)."""

from chairlift.engine.saved.costs import SavedCounts
from chairlift.engine.saved.store import PrefixStore, open_store

__all__ = ["PrefixStore", "SavedCounts", "open_store"]
