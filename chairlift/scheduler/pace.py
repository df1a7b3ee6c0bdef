"""How fast the queue moves: what to tell those who are turned away."""

from collections import deque

_NUM_SEEN = 64
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 600.0


class Pace:
    """The time from one request that gets a slot to the next, as long as somebody waits for it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_SEEN)
        self._last: float | None = None  # when a request got a slot

    def note(self, since: float, now: float) -> None:
        """A request that waits since then gets a slot. What passed before it came is not the queue's time."""
        if self._last is not None and since <= self._last:
            self._seconds.append(now - self._last)
        self._last = now

    def wait_for(self, num_places: int, since: float, now: float) -> float:
        """Seconds until about so many requests more will have got slots, between a second and ten minutes.

        `since`: from when on somebody has been waiting. A queue that stands still counts as slower the longer it does.
        """
        standing = now - since if self._last is None else now - max(since, self._last)
        seconds_each = (sum(self._seconds) + standing) / (len(self._seconds) + 1)
        return min(max(num_places * seconds_each, _MIN_WAIT_S), _MAX_WAIT_S)
