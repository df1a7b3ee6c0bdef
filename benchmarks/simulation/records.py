"""What became of every request: columns of numbers, so that a million of them fit into memory."""

from array import array
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Fate(IntEnum):
    """How a request ended."""

    FINISHED = 0  # an end token, or its length
    LEFT = 1  # its client went away
    TIMED_OUT = 2  # in a slot
    EXPIRED = 3  # before it had one
    REFUSED = 4  # the queue was full


@dataclass(frozen=True, slots=True)
class Ending:
    """One request that has ended. Times are seconds of the simulation; what never happened is not a number."""

    fate: Fate
    tenant: int
    priority: int
    arrival: float
    admission: float
    first_token: float
    end: float
    ideal: float  # seconds it takes with the machine to itself and nothing cached
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


class Records:
    """Endings in columns, in the order in which they came."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in Ending.__slots__}

    def __len__(self) -> int:
        return len(self._columns["fate"])

    def append(self, ending: Ending) -> None:
        """Takes one more."""
        for name, column in self._columns.items():
            column.append(getattr(ending, name))

    def column(self, name: str) -> NDArray[np.float64]:
        """A copy of one field of all endings, float64."""
        return np.array(self._columns[name], dtype=np.float64)
