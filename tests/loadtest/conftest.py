"""Fixtures of the load test's tests."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from .null_server import NullServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NullServer]:
    """A well-behaved server, until the test gives it another answer."""
    null_server = NullServer()
    await null_server.start()
    yield null_server
    await null_server.stop()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A URL at which nothing listens, nor can while the test lasts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
