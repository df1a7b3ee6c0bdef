"""Finds out whether a server answers, and says in one line why it does not."""

import os
from typing import TYPE_CHECKING

from chairlift.errors import ServerUnreachable

if TYPE_CHECKING:
    import aiohttp


def unreachable(url: str, error: Exception) -> ServerUnreachable:
    """Makes the error for a server that does not answer. `error`: what aiohttp or the system raised."""
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if isinstance(error, TimeoutError):
        reason = "it does not answer in time"
    elif isinstance(number, int) and number > 0:
        reason = os.strerror(number).lower()
    else:  # names that are not found have negative numbers
        reason = getattr(cause, "strerror", None) or str(cause) or type(error).__name__
    return ServerUnreachable(f"no server answers at {url} ({' '.join(reason.split())})")


async def require_server(session: "aiohttp.ClientSession", url: str) -> None:
    """ServerUnreachable if nothing speaks HTTP at the address; any reply will do. `url`: without /v1."""
    import aiohttp

    try:
        async with session.get(f"{url}/v1/models"):
            return
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise unreachable(url, error) from error
