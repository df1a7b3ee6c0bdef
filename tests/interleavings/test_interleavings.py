"""Every order of what may happen to a few requests: each ends once, in time, and with the tokens that it has alone."""

import pytest

from tests.interleavings.scope import Scope
from tests.interleavings.scopes import EVERYDAY, FULL, GUESSES, MEMORY, SALTS
from tests.interleavings.scopes_of_disks import DISKS, SHORT, SPOILT
from tests.interleavings.scopes_of_states import JUNCTIONS, REPLAYS, STATES, SURPLUS, WAYPOINTS
from tests.interleavings.search import search

MOST_STEPS = 20  # until the end of all requests of a scope, if nothing else comes


def names(scopes: tuple[Scope, ...]) -> list[str]:
    return [scope.name for scope in scopes]


_SMALLEST = (*EVERYDAY, WAYPOINTS, SURPLUS, SHORT, SPOILT)


@pytest.mark.parametrize("scope", _SMALLEST, ids=names(_SMALLEST))
def test_every_state_of_a_small_scope_is_sound(scope: Scope) -> None:
    found = search(scope)
    assert found.is_complete
    assert found.longest_way <= MOST_STEPS


_COMPARED = (GUESSES, MEMORY, SALTS, JUNCTIONS, REPLAYS, SHORT)
_FURTHER = tuple(scope for scope in (*FULL, *STATES, *DISKS) if scope not in (*_SMALLEST, *_COMPARED))


@pytest.mark.slow
@pytest.mark.parametrize("scope", _FURTHER, ids=names(_FURTHER))
def test_every_state_of_a_further_scope_is_sound(scope: Scope) -> None:
    found = search(scope)
    assert found.is_complete
    assert found.longest_way <= MOST_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("scope", _COMPARED, ids=names(_COMPARED))
def test_every_state_is_sound_and_equal_states_lead_to_equal_states(scope: Scope) -> None:
    found = search(scope, compare_every=4)
    assert found.is_complete
    assert found.longest_way <= MOST_STEPS
    assert found.num_compared >= 50
