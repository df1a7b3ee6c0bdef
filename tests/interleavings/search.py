"""Visits every state that a scope can reach, once, nearest first, and looks for one that must never be.

States are told apart by their fingerprints. Because the nearest come first, a counterexample is as short as any. Once
all states are known, so is the way that each takes if nothing else comes; if such a way is a circle, requests starve.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chairlift.plan import StepPlan
from tests.interleavings.scope import Scope
from tests.interleavings.states import fingerprint, freeze, thaw
from tests.interleavings.violation import Violation
from tests.interleavings.world import Impossible, World
from tests.scheduler.fake_engine import assert_nothing_is_left


class Counterexample(AssertionError):
    """Holds what went wrong, and the actions that lead there."""

    def __init__(self, scope: Scope, actions: Sequence[str], error: BaseException) -> None:
        self.actions = list(actions)
        self.error = error
        name = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
        lines = tell(scope, self.actions)
        super().__init__("\n".join([f"{name}{error}", f"in the scope {scope.name!r}, after", *lines]))


@dataclass
class Found:
    """Holds what a search has seen."""

    num_states: int = 0
    num_actions: int = 0
    depth: int = 0  # actions to the state that is farthest from the first
    num_compared: int = 0  # states that were reached again and followed all the same
    longest_way: int = 0  # actions until all requests have ended, if nothing else comes
    is_complete: bool = True


@dataclass
class _Known:
    """All states so far, in the order in which they were found."""

    numbers: dict[bytes, int] = field(default_factory=dict)  # by fingerprint
    parents: list[int] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)  # the one that led to each
    depths: list[int] = field(default_factory=list)
    fair: list[int | None] = field(default_factory=list)  # the next state if nothing else comes; None at the end

    def add(self, print_: bytes, parent: int, action: str) -> int:
        number = self.numbers[print_] = len(self.numbers)
        self.parents.append(parent)
        self.actions.append(action)
        self.depths.append(self.depths[parent] + 1 if number else 0)
        self.fair.append(None)
        return number

    def path_to(self, number: int) -> list[str]:
        path = []
        while number:
            path.append(self.actions[number])
            number = self.parents[number]
        return path[::-1]


def search(scope: Scope, max_states: int | None = None, compare_every: int | None = None) -> Found:
    """Visits all states of a scope, or the nearest `max_states`. Raises the first `Counterexample`.

    `compare_every`: of so many states that are reached again, one is followed all the same, and must lead to the same
    states as when it was reached first.
    """
    known, found, first = _Known(), Found(), World(scope)
    known.add(fingerprint(first), 0, "")
    frontier = deque([(0, freeze(first))])
    again: list[tuple[int, bytes]] = []
    ways: dict[int, dict[str, int]] = {}
    while frontier:
        number, frozen = frontier.popleft()
        world = thaw(frozen)
        fair_action = world.fair_action
        if fair_action is None:
            _check_end(scope, known, number, frozen)
        for action, following in _follow(scope, known, number, frozen, world):
            found.num_actions += 1
            print_ = fingerprint(following)
            reached = known.numbers.get(print_)
            if reached is None:
                reached = known.add(print_, number, action)
                if max_states is None or reached < max_states:
                    frontier.append((reached, freeze(following)))
                else:
                    found.is_complete = False
            elif compare_every is not None and found.num_actions % compare_every == 0:
                again.append((reached, freeze(following)))
            if action == fair_action:
                known.fair[number] = reached
            if compare_every is not None:
                ways.setdefault(number, {})[action] = reached
    for number, frozen in again:
        _compare(scope, known, ways.get(number, {}), number, frozen)
    found.num_states, found.depth, found.num_compared = len(known.numbers), max(known.depths), len(again)
    found.longest_way = _longest_way(scope, known)
    return found


def _follow(scope: Scope, known: _Known, number: int, frozen: bytes, state: World) -> Iterator[tuple[str, World]]:
    """Everything that may happen in a state, and the world after each. `state`: the frozen one, which changes."""
    actions = list(state.actions())
    for left, action in zip(reversed(range(len(actions))), actions, strict=True):
        world = thaw(frozen) if left else state
        try:
            world.perform(action)
            world.check()
        except Impossible:
            continue
        except Exception as error:
            raise Counterexample(scope, [*known.path_to(number), action], error) from error
        yield action, world


def _compare(scope: Scope, known: _Known, ways: dict[str, int], number: int, frozen: bytes) -> None:
    """Checks that a state that was reached again leads where it did the first time."""
    following = _follow(scope, known, number, frozen, thaw(frozen))
    found = {action: known.numbers.get(fingerprint(world)) for action, world in following}
    differing = [action for action in {**found, **ways} if found.get(action) != ways.get(action)]
    if differing:
        error = Violation(f"states with the same fingerprint differ after {differing}")
        raise Counterexample(scope, known.path_to(number), error)


def _check_end(scope: Scope, known: _Known, number: int, frozen: bytes) -> None:
    """Without work, nothing but warm slots may be left of any request."""
    try:
        assert_nothing_is_left(thaw(frozen).scheduler)
    except AssertionError as error:
        raise Counterexample(scope, known.path_to(number), error) from error


def _longest_way(scope: Scope, known: _Known) -> int:
    """The most actions from any state to the end of all requests, if nothing else comes."""
    lengths: list[int | None] = [None] * len(known.fair)
    for start in range(len(known.fair)):
        way, number = list[int](), start
        on_way = set[int]()
        while lengths[number] is None:
            if number in on_way:
                error = Violation("requests starve: from here, steps lead back here")
                raise Counterexample(scope, known.path_to(number), error)
            on_way.add(number)
            way.append(number)
            following = known.fair[number]
            if following is None:
                lengths[number] = 0
            else:
                number = following
        length = lengths[number] or 0
        for each in reversed(way):
            if lengths[each] is None:
                length += 1
                lengths[each] = length
    return max(length or 0 for length in lengths)


def tell(scope: Scope, actions: Sequence[str]) -> list[str]:
    """The actions, a line each, with what each step computes."""
    world, lines = World(scope), list[str]()
    for number, action in enumerate(actions, 1):
        line = f"{number:3} {action}"
        try:
            plan = world.perform(action)
        except Exception as error:
            lines.append(f"{line}: {type(error).__name__}")
            break
        lines.append(line if plan is None else f"{line}: {_told(plan)}")
    return lines


def _told(plan: StepPlan) -> str:
    parts = [str(job) for job in plan.jobs]
    for row in plan.rows:
        end = row.start + row.num_new_tokens
        guess = f", {len(row.guess)} guessed" if row.guess else ""
        parts.append(f"{row.key.tag} in slot {row.slot} [{row.start}, {end}){guess}")
    steps = f", {plan.num_steps} steps" if plan.num_steps > 1 else ""
    return "; ".join(parts) + steps
