"""Where what is made once is kept. Who may write there is tested with the kernels (`cpu/test_build.py`)."""

from pathlib import Path

import pytest

from chairlift.models.user_cache import cache_directory


def test_the_users_cache_directory_is_taken_if_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/chairlift")
