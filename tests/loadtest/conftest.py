"""Fixtures of the load test's tests."""

from collections.abc import AsyncIterator

import pytest_asyncio

from .null_server import NullServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NullServer]:
    """A well-behaved server, until the test gives it another answer."""
    null_server = NullServer()
    await null_server.start()
    yield null_server
    await null_server.stop()
