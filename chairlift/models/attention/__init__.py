"""Attention over the cache slots: one signature, several backends.

A backend's `prepare` looks at a batch once per step and returns `attend`, which every layer calls with its own
queries, keys and values: it appends keys and values to the slots in place and attends to all that each row may see.
"""

from chairlift.models.attention.batch import Attend, AttentionConfig, Backend, BatchMetadata

__all__ = ["Attend", "AttentionConfig", "Backend", "BatchMetadata"]
