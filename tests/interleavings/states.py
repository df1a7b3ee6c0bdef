"""States as values: a world as bytes, from which it can be made again, and a fingerprint of all that matters of it.

A fingerprint covers every attribute of every object that the world reaches, except for those named below, each with the
reason why nothing that happens later depends on it. So a field that is added to the engine makes more states, never
fewer: to forget it here costs time, not truth.
"""

import io
import itertools
import marshal
import pickle
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from types import FunctionType
from typing import Any

from chairlift.params import RequestOptions, SamplingParams
from chairlift.scheduler import Policy, Request
from chairlift.scheduler.lazy_heap import LazyHeap
from tests.interleavings.scope import Case, Oracle, Scope
from tests.interleavings.world import World

_CONSTANT = {Case, Oracle, Policy, Request, RequestOptions, SamplingParams, Scope, FunctionType, partial}
_LOCK = type(threading.RLock())
_ATOMS = {type(None), bool, int, float, str, bytes}

# By class: attributes on which nothing depends that happens later.
_LEFT_OUT = {
    "SlotLedger": {"_lock"},
    # Sums of the others.
    "TokenBudget": {"num_chunks", "is_ample", "_max_seq_len", "_num_claimed", "_num_warm", "_num_backed"},
    # The trees follow from the entries, which `check` compares with them; numbers are for drafters that search slots.
    "PrefixIndex": {"_roots", "_num_inserted"},
    "_Entry": {"number"},
    # Told to observers.
    "StateReuse": {"_distances"},
    "Restoring": {"_origins"},
    # Told to whoever saves.
    "SlotWorth": {"_slots", "_index", "num_releases", "_releases", "_uses"},
    # Set for good, or, in what speculation learns, without effect on oracles.
    "Scheduler": {"_clock", "_max_num_batched_tokens", "_max_num_running", "_max_steps_per_launch", "speculation"},
    # Counts for observers, and the rate at which requests start, which is told to those that are refused.
    "WaitingQueue": {"_policy", "_clock", "_starts", "num_preemptions", "_max_size"},
    "_Level": {"_last_turn", "_places"},  # the first is kept so that it need not be computed again
    "RequestState": {
        # Given by the request.
        *("params", "options", "max_tokens", "min_tokens", "seed", "prompt_task", "eos_token_ids", "end_token_ids"),
        "is_prompt_only",
        *("num_prompt_tokens", "key", "token_filter", "repetition", "has_rules", "drafter"),
        *("needs_each_token", "needs_newest_token"),
        *("num_cached_tokens", "num_drafted", "num_accepted"),  # only told to clients
        "guess",  # set for each row that has one, and read when its launch is over
    },
    # The results of a launch are taken with its rows' slots and guesses, and with what was expected of them.
    "StepPlan": {"num_decode_rows", "num_steps", "jobs", "reservation"},
    "RowPlan": {"key", "start", "input_ids", "num_output_tokens", "work"},
}
# Turns among tenants, where there is one.
_OF_TENANTS = {"_Level": {"_counter"}, "_Tenant": {"counter", "place"}}
# Dictionaries that are never walked through in an order that matters.
_UNORDERED = {
    "SlotLedger": {"_lengths", "_in_flight", "_loaded"},
    "PrefixIndex": {"_entries"},
    "Placement": {"_owners"},
    "Finder": {"_owners"},
    "WaitingQueue": {"_requests", "_num_by_tenant"},
    "FairQueue": {"_levels"},
    "World": {"epoch_of"},
}


class _Pickler(pickle.Pickler):
    """Pickles a world. What never changes is not copied: all worlds share it."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _CONSTANT and obj is not _share:
            assert kind is not FunctionType or obj.__closure__ is None, f"{obj} may hold a part of the world"
            _shared[id(obj)] = obj
            return _share, (id(obj),)
        if kind is _LOCK:
            return threading.RLock, ()
        if kind is itertools.count:
            return itertools.count, (int(repr(obj)[len("count(") : -1]),)
        if kind is weakref.ref:
            return weakref.ref, (obj(),) if obj() is not None else (_Nobody(),)
        return NotImplemented


class _Nobody:
    """Whom a weak reference meant that nobody else holds."""


_shared: dict[int, Any] = {}


def _share(number: int) -> Any:
    return _shared[number]


def freeze(world: World) -> bytes:
    """The world as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
    return buffer.getvalue()


def thaw(frozen: bytes) -> World:
    """A world equal to the frozen one, with nothing mutable in common."""
    world = pickle.loads(frozen)
    assert isinstance(world, World)
    return world


def fingerprint(world: World) -> bytes:
    """Equal for two worlds in which the same can happen with the same outcome."""
    has_tenants = len({case.request.options.tenant for case in world.scope.cases.values()}) > 1
    return blake2b(marshal.dumps(_Walk(has_tenants).of(world), 2), digest_size=16).digest()


class _Walk:
    """One walk through the objects that a world reaches. An object that is met again is named by its number."""

    def __init__(self, has_tenants: bool) -> None:
        self._left_out = {} if has_tenants else _OF_TENANTS
        self._attributes = _ATTRIBUTES[has_tenants]
        self._numbers: dict[int, int] = {}

    def of(self, obj: Any) -> Any:
        """Turns an object into numbers, strings and tuples of these."""
        kind = type(obj)
        if kind in _ATOMS:
            return obj
        if kind in (list, tuple, deque):
            return _packed(obj) or tuple([each if type(each) in _ATOMS else self.of(each) for each in obj])
        if isinstance(obj, dict):
            items = obj.items()
            return tuple([(key, value if type(value) in _ATOMS else self.of(value)) for key, value in items])
        if kind in _CONSTANT:
            return id(obj)
        known = _WAYS.get(kind)
        if known is not None:
            return known(self, obj)
        return obj.value if isinstance(obj, Enum) else self._of_object(obj)

    def _of_object(self, obj: Any) -> Any:
        known = self._numbers.get(id(obj))
        if known is not None:
            return known
        self._numbers[id(obj)] = len(self._numbers)
        kind: type = type(obj)
        parts: list[Any] = [kind.__name__]
        for each, is_unordered in self._attributes_of(kind, tuple(getattr(obj, "__dict__", ()))):
            value: Any = getattr(obj, each, None)
            if type(value) not in _ATOMS:
                value = self.of(dict(sorted(value.items())) if is_unordered else value)
            elif each == "num_preemptions":  # whether there were any is all that counts
                value = bool(value)
            parts.append(value)
        return tuple(parts)

    def _attributes_of(self, kind: type, in_dict: tuple[str, ...]) -> list[tuple[str, bool]]:
        """Names the attributes of an object that matter, each with whether its order does not."""
        known = self._attributes.get((kind, in_dict))
        if known is None:
            left_out = _LEFT_OUT.get(kind.__name__, _NOTHING) | self._left_out.get(kind.__name__, _NOTHING)
            unordered = _UNORDERED.get(kind.__name__, _NOTHING)
            names = (*_slots_of(kind), *in_dict)
            known = [(each, each in unordered) for each in names if each not in left_out]
            self._attributes[kind, in_dict] = known
        return known

    def _of_heap(self, heap: LazyHeap[Any]) -> Any:
        """The members in their order. Keys of entries, and entries of members that have left, have no effect."""
        keys = ((heap._key_of(member), serial, member) for _, serial, member in heap._entries)
        live = sorted((each for each in keys if each[0] is not None), key=lambda each: each[:2])
        return tuple((key, self.of(member)) for key, _, member in live)


_NOTHING: set[str] = set()
# By whether there are tenants: the attributes that matter, by class and by what its instance has in its dictionary.
_ATTRIBUTES: dict[bool, dict[tuple[type, tuple[str, ...]], list[tuple[str, bool]]]] = {False: {}, True: {}}
_WAYS: dict[type, Callable[[_Walk, Any], Any]] = {
    set: lambda _, obj: tuple(sorted(obj)),
    frozenset: lambda _, obj: tuple(sorted(obj)),
    array: lambda _, obj: obj.tobytes(),
    itertools.count: lambda _, __: None,  # what it counts stands beside it, in order
    weakref.ref: lambda walk, obj: walk.of(obj()),
    LazyHeap: _Walk._of_heap,
}


def _packed(numbers: Sequence[Any]) -> bytes | None:
    """Many integers in little room; None if these are something else."""
    if len(numbers) < _MIN_PACKED or type(numbers[0]) is not int:
        return None
    return array("q", numbers).tobytes()


_MIN_PACKED = 16


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    names = [name for base in kind.__mro__ for name in _as_tuple(base.__dict__.get("__slots__", ()))]
    return tuple(name for name in names if name != "__weakref__")


def _as_tuple(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
