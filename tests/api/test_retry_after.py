"""Refused for now: statuses, codes, and when to come back, in whole seconds and never at once."""

import pytest

from chairlift.api.errors import error_reply
from chairlift.errors import EngineClosed, QueueFull, QueueTimeout


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (7.0, "7"), (59.5, "60")]
)
def test_estimates_are_rounded_up_to_whole_seconds(seconds: float, header: str) -> None:
    full = error_reply(QueueFull("full", retry_after=seconds)).response()
    late = error_reply(QueueTimeout("waited 5 s for a slot", retry_after=seconds)).response()
    assert (full.status, full.headers["Retry-After"]) == (429, header)
    assert (late.status, late.headers["Retry-After"]) == (503, header)


def test_a_request_that_waited_too_long_says_so() -> None:
    detail = error_reply(QueueTimeout("waited 5 s for a slot; try again later")).detail
    assert (detail.message, detail.type) == ("waited 5 s for a slot; try again later", "server_error")
    assert (detail.param, detail.code) == (None, "queue_timeout")


def test_where_nobody_knows_when_it_is_one_second() -> None:
    assert error_reply(EngineClosed("the server is shutting down")).response().headers["Retry-After"] == "1"
