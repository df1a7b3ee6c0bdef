"""How fast the queue moves: what to tell those who are turned away."""

from collections import deque

_NUM_SEEN = 64
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 600.0


class Pace:
    """The rate at which requests lately got slots."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_NUM_SEEN)

    def note(self, now: float) -> None:
        """One request got a slot."""
        self._times.append(now)

    def wait_for(self, num_places: int, now: float) -> float:
        """Seconds until about so many requests more will have got slots, between a second and ten minutes.

        A queue that stands still counts as slower the longer it stands.
        """
        if not self._times:
            return _MIN_WAIT_S
        seconds_each = (now - self._times[0]) / len(self._times)
        return min(max(num_places * seconds_each, _MIN_WAIT_S), _MAX_WAIT_S)
