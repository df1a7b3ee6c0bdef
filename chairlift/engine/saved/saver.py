"""Chooses what of the warm slots is copied next, to be written.

A warm slot is saved segment by segment from its beginning, those of most worth first: tokens times uses. The engine's
thread copies a segment between two steps, and the writer's thread does the rest. While the engine works, copying and
writing together get a hundredth of its time, so no step takes longer for them than its own jitter; at rest they get
all of it. Layers with recurrent states can go on only from a state, so nothing behind a slot's last state is saved.
"""

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.cache.prefixes import count_tokens, cut_tokens
from chairlift.disk.folder import Item, PrefixFolder, segment_item
from chairlift.disk.keys import SEGMENT_TOKENS, PrefixKeys
from chairlift.disk.writer import PrefixWriter, Save
from chairlift.engine.ranks import Computer
from chairlift.plan import SlotRange
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.worth import WarmPrefix

_BUSY_SHARE = 0.01  # of the time in which the engine works
_MAX_BALANCE_S = 0.05
_FRESH_NS = 60 * 10**9  # a file that was used in this time is not dated again


@dataclass(slots=True)
class _Plan:
    """Says what is left to save of a warm slot that holds these tokens."""

    prefix: WarmPrefix
    keys: PrefixKeys
    items: deque[Item]
    used_ns: int


class Saver:
    """Saves the warm slots of one engine. Belongs to its thread, but for `spend`."""

    def __init__(
        self, folder: PrefixFolder, writer: PrefixWriter, cache: ContinuousBatchingKVCacheManager, computer: Computer
    ) -> None:
        self._folder = folder
        self._writer = writer
        self._cache = cache
        self._computer = computer
        self._plans: dict[int, _Plan] = {}  # by slot
        self._num_releases = -1  # of the placement, when everything was saved
        self._balance_s = 0.0  # that may be spent beside steps

    def earn(self, seconds: float) -> None:
        """Notes that the engine has worked so long."""
        self._balance_s = min(self._balance_s + _BUSY_SHARE * seconds, _MAX_BALANCE_S)

    def spend(self, seconds: float) -> None:
        """Notes that saving has taken so long. From any thread: what is lost in a race is no matter."""
        self._balance_s -= seconds

    def can_save_beside(self, placement: Placement) -> bool:
        """Returns true if something may be left to save, and there is time for it beside the steps."""
        is_affordable = self._balance_s > 0.0 and self._writer.has_room
        return is_affordable and placement.worth.num_releases != self._num_releases and not self._writer.is_paused

    def save_next(self, placement: Placement) -> bool:
        """Copies the next segment or state. False if there is none, or the disk has failed.

        Pending work on the cache must have been performed.
        """
        if self._num_releases == placement.worth.num_releases or self._writer.is_paused:
            return False
        begin = time.perf_counter()
        for prefix in placement.worth.warm_prefixes():
            plan = self._plan_of(prefix, placement)
            while plan.items:
                item = plan.items.popleft()
                if self._save(item, plan, placement):
                    self.spend(time.perf_counter() - begin)
                    return True
        self._num_releases = placement.worth.num_releases
        return False

    def forget(self) -> None:
        """Forgets what was to be saved: all warm slots are about to be emptied."""
        self._plans.clear()

    def _plan_of(self, prefix: WarmPrefix, placement: Placement) -> _Plan:
        known = self._plans.get(prefix.slot)
        if known is not None and known.prefix == prefix:
            return known
        tokens = cut_tokens(prefix.tokens, prefix.num_valid)
        keys = self._folder.keys.of_segments(tokens, prefix.salt)
        items = [segment_item(keys, index) for index in range(keys.num_segments)]
        if self._cache.states is not None:
            positions = [] if placement.states is None else placement.states.positions(prefix.slot, tokens, prefix.salt)
            del items[max(positions, default=0) // SEGMENT_TOKENS :]
            items += [self._folder.state_item(keys, position) for position in sorted(positions, reverse=True)]
        now = time.time_ns()
        stale = [item for item in items if self._folder.used_before(item, now - _FRESH_NS)]
        if stale:
            self._writer.call(partial(self._folder.touch, stale, now))
        missing = deque(item for item in items if not self._folder.has(item))
        plan = self._plans[prefix.slot] = _Plan(prefix, keys, missing, now)
        return plan

    def _save(self, item: Item, plan: _Plan, placement: Placement) -> bool:
        """False if it needs no copy, or if its state is gone."""
        if self._folder.has(item) or self._writer.is_queued(item):
            return False
        slot, start = plan.prefix.slot, item.depth * SEGMENT_TOKENS
        row: int | None = None
        if item.has_state:
            tokens = cut_tokens(plan.keys.tokens, start + item.num_tokens)
            row = None if placement.states is None else placement.states.row_after(slot, tokens, plan.prefix.salt)
            if row is None:
                return False
        assert start + item.num_tokens <= count_tokens(plan.keys.tokens), "only valid tokens are saved"
        content = self._computer.copy_out(SlotRange(slot, start, start + item.num_tokens, row))
        num_bytes = self._computer.count_bytes(item.num_tokens, has_state=item.has_state)
        self._writer.submit(Save(item, content.wait, num_bytes, plan.used_ns))
        return True
