"""API keys: asked for where there are any, compared whole, never needed for health; and where they come from."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from aiohttp import ClientSession
from openai import AsyncOpenAI

from chairlift.api import ServerConfig
from chairlift.api.http.access import KeyLimits, KeyRing, gather_keys, read_keys
from chairlift.commands import serve_command
from chairlift.errors import ConfigurationError
from chairlift.flags import read_settings
from tests.api.conftest import serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    """A server that knows two keys."""
    config = ServerConfig.model_validate({"api_key": ["first key", "zweiter-Schlüssel"]})
    async with serving(config, max_batch_size=1, max_seq_len=64) as server:
        yield server.url


async def test_a_known_key_is_let_in_and_another_is_a_401(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="first key", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["bundled"]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="first", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert "first key" not in str(caught.value)


async def test_every_path_asks_for_a_key_but_health_metrics_version_the_page_and_the_description(url: str) -> None:
    async with ClientSession() as http:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/watch", "/page/nowhere", "/nowhere"):
            async with http.get(url + path) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        for path in ("/health", "/metrics", "/version", "/docs", "/openapi.json", "/", "/page/page.js"):
            async with http.get(url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic first key", "first key"])
async def test_a_header_that_is_no_bearer_key_is_a_401(url: str, header: str) -> None:
    async with ClientSession() as http, http.get(f"{url}/v1/models", headers={"Authorization": header}) as response:
        assert response.status == 401


def test_a_ring_knows_its_keys_whole() -> None:
    ring = KeyRing(dict.fromkeys(["abc", "dé"], KeyLimits.parse()))
    assert [ring.knows(key) for key in ("abc", "dé", "ab", "abcd", "", "ABC")] == [True, True] + [False] * 4


def test_keys_are_read_from_a_file_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    assert list(read_keys(path)) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(ConfigurationError, match="contains no key"):
        read_keys(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys(tmp_path / "nowhere")


def test_a_key_in_a_file_may_have_limits_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("usual\nwith spaces queue=0.25\nurgent priority=-10:10\nboth priority=-1:1\tqueue=1\nYWJj=\n")
    assert read_keys(path) == {
        "usual": KeyLimits(0, 100, 0.5),
        "with spaces": KeyLimits(0, 100, 0.25),
        "urgent": KeyLimits(-10, 10, 0.5),
        "both": KeyLimits(-1, 1, 1.0),
        "YWJj=": KeyLimits(0, 100, 0.5),
    }


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("priority=3", "priority must be LOWEST:HIGHEST, such as -10:10, not '3'"),
        ("priority=high", "such as -10:10, not 'high'"),
        ("priority=3:2", "such as -10:10, not '3:2'"),
        ("queue=0", "queue must be above 0 and at most 1, not '0'"),
        ("queue=nan", "queue must be above 0"),
        ("queue=all", "queue must be above 0 and at most 1, not 'all'"),
        ("prio=1:2", "prio= is unknown or given twice"),
        ("queue=1 queue=1", "queue= is unknown or given twice"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_its_line_without_the_key(tmp_path: Path, limits: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"one\nsecret {limits}\n")
    with pytest.raises(ConfigurationError, match=f"keys, line 2: .*{words}") as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_text_does_not_show_in_the_complaint(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"secret\xff\n")
    with pytest.raises(ConfigurationError, match=r"it is not UTF-8$"):
        read_keys(path)


def test_the_keys_of_flags_file_and_environment_are_all_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("of-the-file\n")
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "of-the-environment, another one")
    config = ServerConfig.model_validate({"api_key": [" of-a-flag "], "api_key_file": path})
    assert list(gather_keys(config)) == ["of-a-flag", "of-the-environment", "another one", "of-the-file"]


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_a_variable_without_a_key_does_not_open_the_server(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_API_KEY", value)
    with pytest.raises(ConfigurationError, match="CHAIRLIFT_API_KEY is set but contains no key"):
        gather_keys(ServerConfig())


@pytest.mark.parametrize("keys", [[""], ["one", "  "]])
def test_an_empty_key_is_refused(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="api_key is empty"):
        gather_keys(ServerConfig.model_validate({"api_key": keys}))


@pytest.mark.parametrize(
    ("flags", "variables", "keys"),
    [
        (["--api-key", "key-1", "--api-key", "[key-2"], {}, ["key-1", "[key-2"]),
        ([], {"CHAIRLIFT_SERVE__API_KEY": "key-1,key-2"}, ["key-1", "key-2"]),  # as every flag has its variable
        (["--api-key", "key-3"], {"CHAIRLIFT_SERVE__API_KEY": "key-1,key-2"}, ["key-3"]),
        (["--api-key", "key-3"], {"CHAIRLIFT_API_KEY": "key-1,key-2"}, ["key-3", "key-1", "key-2"]),
        ([], {}, []),
    ],
)
def test_keys_come_through_the_command_line(
    flags: list[str], variables: dict[str, str], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, config = read_settings(serve_command(), flags)
    assert list(gather_keys(config)) == keys
    assert "key-" not in repr(config)
