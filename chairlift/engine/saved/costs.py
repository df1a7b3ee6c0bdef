"""Learns what it costs to read a prefix and to compute it, and what the saved ones have been good for."""

import threading
from collections import deque
from dataclasses import dataclass, replace

_READ_WEIGHT, _COMPUTE_WEIGHT = 0.05, 0.2  # of the newest measurement: a file, a launch
_MIN_TOKENS = 32  # of a launch that counts: those of fewer tokens take as long as one token
_UNKNOWN_S = 60.0  # how long a prefix is waited for before it is known what computing it takes
_MIN_PATIENCE_S = 2.0
_MAX_UNPRICED = 1000


@dataclass(frozen=True, slots=True)
class SavedCounts:
    """Counts of saved prefixes. All but the last only grow."""

    num_reads: int = 0  # prompts of which a part was read
    num_tokens_read: int = 0  # prompt tokens that were not computed because of that
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    seconds_saved: float = 0.0  # that computing those tokens would have taken beyond reading them
    num_bytes_held: int = 0  # by this cache's files


class Costs:
    """Measures as the engine runs. Any thread may note something."""

    def __init__(self, seconds_per_byte: float) -> None:
        """`seconds_per_byte`: of reading, measured at start."""
        self._lock = threading.Lock()
        self._seconds_per_byte = seconds_per_byte
        self._seconds_per_token: float | None = None
        self._counts = SavedCounts()
        # Of prompts read before that was known: tokens, and seconds of waiting.
        self._unpriced = deque[tuple[int, float]](maxlen=_MAX_UNPRICED)

    @property
    def counts(self) -> SavedCounts:
        """The counts so far, but for the bytes held."""
        return self._counts

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """Counts a file that was read."""
        with self._lock:
            newest = seconds / max(1, num_bytes)
            self._seconds_per_byte += _READ_WEIGHT * (newest - self._seconds_per_byte)
            self._counts = replace(self._counts, num_bytes_read=self._counts.num_bytes_read + num_bytes)

    def note_written(self, num_bytes: int) -> None:
        """Counts a file that was written."""
        with self._lock:
            self._counts = replace(self._counts, num_bytes_written=self._counts.num_bytes_written + num_bytes)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Takes in a launch that computed so many prompt tokens, and nothing else of weight."""
        if num_tokens < _MIN_TOKENS:
            return
        with self._lock:
            newest, known = seconds / num_tokens, self._seconds_per_token
            self._seconds_per_token = newest if known is None else known + _COMPUTE_WEIGHT * (newest - known)
            for each in self._unpriced:
                self._count_saved(*each, self._seconds_per_token)
            self._unpriced.clear()

    def note_restored(self, num_tokens: int, seconds: float) -> None:
        """Counts a prompt of which `num_tokens` tokens were read, for which it waited so long.

        Before it is known what computing takes, the seconds saved are counted later.
        """
        with self._lock:
            counts = self._counts
            self._counts = replace(
                counts, num_reads=counts.num_reads + 1, num_tokens_read=counts.num_tokens_read + num_tokens
            )
            if self._seconds_per_token is None:
                self._unpriced.append((num_tokens, seconds))
            else:
                self._count_saved(num_tokens, seconds, self._seconds_per_token)

    def _count_saved(self, num_tokens: int, seconds: float, seconds_per_token: float) -> None:
        saved = max(0.0, num_tokens * seconds_per_token - seconds)
        self._counts = replace(self._counts, seconds_saved=self._counts.seconds_saved + saved)

    def pays(self, num_tokens: int, num_bytes: int) -> bool:
        """Returns true if reading is expected to take less time than computing, or if that is not known yet."""
        per_token = self._seconds_per_token
        return per_token is None or num_bytes * self._seconds_per_byte < num_tokens * per_token

    def patience_for(self, num_tokens: int) -> float:
        """Returns the seconds after which the tokens had better be computed."""
        per_token = self._seconds_per_token
        return max(_MIN_PATIENCE_S, _UNKNOWN_S if per_token is None else num_tokens * per_token)
