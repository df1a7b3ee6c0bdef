"""OpenMP's threads spin for a short time, in programs that use the package as on the command line."""

import os

import pytest

import chairlift


def test_whoever_uses_a_public_name_has_threads_that_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert chairlift.SamplingParams().max_tokens
    assert os.environ["GOMP_SPINCOUNT"] == "20000"


def test_a_count_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert chairlift.SamplingParams().max_tokens
    assert os.environ["GOMP_SPINCOUNT"] == "5"
