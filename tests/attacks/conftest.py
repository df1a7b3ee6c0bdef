"""One server for all attacks; a new one where an attack has done damage."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.attacks.harness import Target, under_attack


@pytest.fixture(scope="session")
def _targets() -> Iterator[Callable[[], Target]]:
    with ExitStack() as stack:
        current: list[Target] = []

        def trusted_target() -> Target:
            if not current or not current[0].is_trusted or not current[0].is_alive:
                stack.close()
                current[:] = [stack.enter_context(under_attack())]
            return current[0]

        yield trusted_target


@pytest.fixture
def target(_targets: Callable[[], Target]) -> Target:
    return _targets()
