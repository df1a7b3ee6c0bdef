"""Plans as bytes, for the other ranks of a model."""

import copyreg
import pickle
from dataclasses import dataclass, replace
from io import BytesIO

from chairlift.plan import SamplingKey, StepPlan


@dataclass(frozen=True, slots=True)
class _KnownKey:
    """Stands for a key that the reader has."""

    number: int


class GuidedElsewhere:
    """Stands for a grammar whose masks another process applies; the row is sampled as if it had them."""

    is_ready = True
    keeps_pace = False  # the newest token is right in that process only

    def foresee(self) -> None:
        """Another process guesses."""

    def advance(self, token_id: int) -> bool:
        """Another process takes tokens."""
        raise NotImplementedError


class PlanWriter:
    """Pickles plans for other processes. The keys of sequences, which may be large, are sent once.

    A reader has the keys of the plan before; a row that rests for a step brings its key again. Grammars stay here: only
    rank 0's tokens count, and it masks its own logits.
    """

    def __init__(self) -> None:
        self._numbers: dict[SamplingKey, int] = {}  # of the keys in the last plan
        self._num_keys = 0

    def write(self, plan: StepPlan) -> bytes:
        """Returns the plan for `PlanReader.read`, which must read all plans in order."""
        known, self._numbers = self._numbers, {}
        new: dict[int, SamplingKey] = {}
        for key in (row.key for row in plan.rows):
            number = known.get(key)
            if number is None:
                number, self._num_keys = self._num_keys, self._num_keys + 1
                new[number] = key if key.grammar is None else replace(key, grammar=GuidedElsewhere())
            self._numbers[key] = number
        buffer = BytesIO()
        pickle.dump(new, buffer, pickle.HIGHEST_PROTOCOL)
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**copyreg.dispatch_table, SamplingKey: self._reduce}
        pickler.dump(plan)
        return buffer.getvalue()

    def _reduce(self, key: SamplingKey) -> tuple[type[_KnownKey], tuple[int]]:
        return _KnownKey, (self._numbers[key],)


class PlanReader:
    """Reads what a `PlanWriter` has written."""

    def __init__(self) -> None:
        self._keys: dict[int, SamplingKey] = {}

    def read(self, written: bytes) -> StepPlan:
        """Returns the next plan."""
        buffer = BytesIO(written)
        known, self._keys = self._keys | pickle.load(buffer), {}
        plan: StepPlan = pickle.load(buffer)
        for row in plan.rows:
            placeholder: object = row.key
            assert isinstance(placeholder, _KnownKey), "a key is written with a plan"
            row.key = self._keys[placeholder.number] = known[placeholder.number]
        return plan
