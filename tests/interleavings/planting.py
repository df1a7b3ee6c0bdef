"""Defects that are planted in the engine, and what the search must say of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from tests.interleavings.scope import Scope
from tests.interleavings.search import Counterexample, search

Plant = Callable[[pytest.MonkeyPatch], None]
"""Plants a defect."""


class Defect(NamedTuple):
    """A defect, where it shows, and what is said of it."""

    plant: Plant
    scope: Scope
    message: str


def each_of(defects: Sequence[Defect]) -> pytest.MarkDecorator:
    """Runs a test with each of them as its `defect`."""
    return pytest.mark.parametrize("defect", defects, ids=[defect.plant.__name__ for defect in defects])


def assert_found(defect: Defect, patch: pytest.MonkeyPatch, most_actions: int = 8) -> None:
    """Plants a defect, which the search must find in a few actions."""
    defect.plant(patch)
    with pytest.raises(Counterexample, match=defect.message) as found:
        search(defect.scope)
    assert len(found.value.actions) <= most_actions
