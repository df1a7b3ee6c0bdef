"""Fixtures of the load test's tests."""

import socket
from collections.abc import AsyncIterator

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
def dead_url() -> str:
    """A URL at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
