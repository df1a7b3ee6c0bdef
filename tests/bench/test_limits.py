"""Limits: how they are written, and which requests keep them."""

from dataclasses import replace

import pytest

from chairlift.bench.failures import Failure, FailureKind
from chairlift.bench.limits import Limits
from chairlift.bench.records import RequestRecord

# TTFT 500 ms, TPOT 250 ms, E2EL 1,000 ms.
THREE_TOKENS = RequestRecord(index=0, intended_at=10.0, sent_at=10.0, ended_at=11.0, chunk_times=(10.5, 10.75, 11.0))


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft:500", Limits(ttft=500.0)),
        ("ttft:500,tpot:50", Limits(ttft=500.0, tpot=50.0)),
        (" tpot:0.5 , e2el:2e3", Limits(tpot=0.5, e2el=2000.0)),
    ],
)
def test_limits_are_read(text: str, limits: Limits) -> None:
    assert Limits.parse(text) == limits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot read the limit '': limits are of ttft, tpot, e2el, each at most once, as in ttft:500,tpot:50"),
        ("500", "cannot read the limit '500': limits are of"),
        ("itl:5", "cannot read the limit 'itl:5': limits are of"),
        ("ttft:5,ttft:6", "cannot read the limit 'ttft:6': limits are of"),
        ("ttft:5,", "cannot read the limit '': limits are of"),
        ("ttft", "cannot read the limit 'ttft': milliseconds above 0 must follow the colon, as in ttft:500,tpot:50"),
        ("ttft:soon", "cannot read the limit 'ttft:soon': milliseconds"),
        ("ttft:0", "cannot read the limit 'ttft:0': milliseconds"),
        ("ttft:-1", "cannot read the limit 'ttft:-1': milliseconds"),
        ("tpot:nan", "cannot read the limit 'tpot:nan': milliseconds"),
        ("tpot:inf", "cannot read the limit 'tpot:inf': milliseconds"),
    ],
)
def test_a_limit_that_cannot_be_read_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="cannot read the limit") as caught:
        Limits.parse(text)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("limits", "are_kept"),
    [
        ("ttft:500", True),
        ("ttft:499", False),
        ("tpot:250", True),
        ("tpot:249", False),
        ("e2el:1000", True),
        ("e2el:999", False),
        ("ttft:500,tpot:250,e2el:1000", True),
        ("ttft:500,tpot:249,e2el:1000", False),
    ],
)
def test_a_request_is_good_at_or_below_every_limit(limits: str, are_kept: bool) -> None:
    assert Limits.parse(limits).are_kept(THREE_TOKENS) is are_kept


def test_a_single_token_keeps_every_limit_on_the_time_per_token() -> None:
    single = replace(THREE_TOKENS, chunk_times=(11.0,))
    assert Limits(tpot=0.001).are_kept(single)


def test_a_failed_request_is_never_good() -> None:
    failed = replace(THREE_TOKENS, chunk_times=(), failure=Failure(FailureKind.TIMEOUT, ""))
    assert not Limits(e2el=1e9).are_kept(failed)


def test_limits_as_text() -> None:
    assert str(Limits(ttft=500.0, e2el=2.5)) == "ttft 500 ms, e2el 2.5 ms"
