"""The settings: what is refused, and in what words; and what is left open until the test begins."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from chairlift.bench import BenchConfig


def messages(**settings: object) -> list[str]:
    """What is said against these settings, as `field: message`."""
    with pytest.raises(ValidationError) as caught:
        BenchConfig.model_validate(settings)
    return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in caught.value.errors()]


def test_every_field_has_a_description_since_it_is_the_help_of_its_flag() -> None:
    assert [name for name, field in BenchConfig.model_fields.items() if not field.description] == []


def test_defaults_are_a_valid_test() -> None:
    config = BenchConfig()
    assert (config.num_requests, config.warmup, config.token_range) == (None, 1, (32, 127))
    assert (config.temperature, config.ignore_eos, config.is_chat) == (0.0, True, False)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        BenchConfig().num_requests = 3  # type: ignore[misc]


def test_an_unknown_setting_is_refused_by_name() -> None:
    assert messages(concurency=3) == ["concurency: Extra inputs are not permitted"]


@pytest.mark.parametrize("name", ["num_requests", "concurrency", "num_prefixes", "turns"])
def test_counts_are_positive(name: str) -> None:
    assert messages(prefix_tokens=8, **{name: 0}) == [f"{name}: Input should be greater than 0"]


@pytest.mark.parametrize("name", ["request_rate", "timeout"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "Input should be greater than 0"),
        (float("inf"), "Input should be a finite number"),
    ],
)
def test_rates_and_times_are_positive_and_finite(name: str, value: float, said: str) -> None:
    assert messages(**{name: value}) == [f"{name}: {said}"]


@pytest.mark.parametrize("name", ["warmup", "seed", "temperature"])
def test_some_numbers_may_be_zero_but_not_negative(name: str) -> None:
    BenchConfig.model_validate({name: 0})
    assert messages(**{name: -1}) == [f"{name}: Input should be greater than or equal to 0"]


def test_an_unknown_endpoint_is_refused_with_the_known_ones() -> None:
    assert messages(endpoint="embeddings") == ["endpoint: Input should be 'completions' or 'chat'"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"request_rate": 1.0, "ramp": (1, 2)}, "give either --request-rate or --ramp, not both"),
        ({"request_rate": 1.0, "trace": "t"}, "give either --request-rate or --trace, not both"),
        ({"trace": "t", "messages": "m"}, "give either --trace or --messages, not both"),
        ({"trace": "t", "prompt_tokens": 5}, "give either --trace or --prompt-tokens, not both"),
        ({"trace": "t", "output_tokens": 5}, "give either --trace or --output-tokens, not both"),
        ({"messages": "m", "conversations": "c"}, "give either --messages or --conversations, not both"),
        ({"messages": "m", "prefix_tokens": 5}, "give either --messages or --prefix-tokens, not both"),
        ({"conversations": "c", "turns": 2}, "give either --conversations or --turns, not both"),
        ({"endpoint": "completions", "turns": 2}, "give either --endpoint completions or --turns, not both"),
        ({"endpoint": "completions", "messages": "m"}, "give either --endpoint completions or --messages, not both"),
        ({"burstiness": 0.5}, "--burstiness needs --request-rate or --ramp or --sweep rate"),
        ({"trace_speedup": 2.0}, "--trace-speedup needs --trace"),
        ({"num_prefixes": 2}, "--num-prefixes needs --prefix-tokens"),
        ({"think_time": 2.0}, "--think-time needs --turns or --conversations"),
        ({"sweep": "rate=1,2"}, "--sweep needs --goodput"),
        ({"goodput": "ttft:5", "goodput_share": 0.5}, "--goodput-share needs --sweep"),
        ({"goodput": "ttft:5", "sweep": "rate=1", "ramp": (1, 2)}, "give either --sweep or --ramp, not both"),
        (
            {"goodput": "ttft:5", "sweep": "concurrency=1", "concurrency": 2},
            "give either --sweep concurrency or --concurrency, not both",
        ),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings: dict[str, object], said: str) -> None:
    assert messages(**settings) == [f": Value error, {said}"]


def test_everything_that_is_wrong_is_said_at_once() -> None:
    assert messages(num_prefixes=2, think_time=1.0) == [
        ": Value error, --num-prefixes needs --prefix-tokens; --think-time needs --turns or --conversations"
    ]


def test_a_rate_may_have_a_most_in_flight() -> None:
    config = BenchConfig(concurrency=4, request_rate=2.0)
    assert (config.is_open_loop, config.resolved("m").concurrency) == (True, 4)


@pytest.mark.parametrize("settings", [{"turns": 2}, {"messages": "m"}, {"conversations": "c"}, {"endpoint": "chat"}])
def test_messages_go_to_the_chat_endpoint(settings: dict[str, object]) -> None:
    config = BenchConfig.model_validate({"url": "http://host", **settings})
    assert config.endpoint_url == "http://host/v1/chat/completions"
    assert config.resolved("m").endpoint == "chat"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("goodput", "ttft500", "cannot read the limit 'ttft500': limits are of ttft, tpot, e2el"),
        ("sweep", "rate", "cannot read the sweep 'rate': it must look like rate=1,2,4,8"),
        ("prompt_tokens", "some", "cannot read the length 'some': it must be N, uniform:LOW,HIGH"),
        ("output_tokens", 0, "cannot read the length 0: it must be N"),
        ("report", "report.pdf", "must end in .html or .png, unlike 'report.pdf'"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, value: object, said: str) -> None:
    [message] = messages(**{name: value})
    assert message.startswith(f"{name}: Value error, {said}")


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_the_url_may_end_in_v1_or_a_slash(url: str) -> None:
    assert BenchConfig(url=url).endpoint_url == "http://host:8000/v1/completions"


def test_the_chat_endpoint_keeps_a_path_prefix() -> None:
    config = BenchConfig(url="https://host/openai/v1", endpoint="chat")
    assert config.endpoint_url == "https://host/openai/v1/chat/completions"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "must look like http://host:port or https://host, not 'localhost:8000'"),
        ("ftp://host", "must look like http://host:port or https://host, not 'ftp://host'"),
        ("http://", "must look like http://host:port or https://host, not 'http://'"),
        ("http://host?key=1", "must have no query or fragment, unlike 'http://host?key=1'"),
        ("http://a..b", "must name a host, unlike 'http://a..b'"),
        ("http://host:0", "must not name port 0, unlike 'http://host:0'"),
        ("http://host:99999", "Port out of range 0-65535"),
    ],
)
def test_what_is_no_http_url_is_refused(url: str, said: str) -> None:
    assert messages(url=url) == [f"url: Value error, {said}"]


def test_an_empty_token_range_is_refused() -> None:
    assert messages(token_range=(50, 50)) == [
        "token_range: Value error, LOW must be less than HIGH, but got 50,50",
    ]


def test_a_json_file_that_cannot_be_written_is_refused_before_the_test(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "result.json"
    for name, path in [("json_file", missing), ("json_file", tmp_path), ("report", tmp_path / "missing" / "a.html")]:
        assert messages(**{name: path}) == [
            f"{name}: Value error, cannot write {path}: it must be a file in an existing directory"
        ]


def test_the_json_file_goes_by_the_short_name_of_its_flag_too(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert BenchConfig.model_validate({"json": path}).json_file == path


def test_the_api_key_does_not_show() -> None:
    config = BenchConfig.model_validate({"api_key": "sk-secret"})
    assert "sk-secret" not in repr(config)
    assert config.model_dump(mode="json")["api_key"] == "**********"


def test_resolving_fills_in_the_model_and_the_concurrency() -> None:
    resolved = BenchConfig().resolved("tiny")
    assert (resolved.model, resolved.concurrency, resolved.request_rate) == ("tiny", 8, None)


def test_resolving_keeps_a_given_concurrency() -> None:
    assert BenchConfig(concurrency=3).resolved("tiny").concurrency == 3


def test_resolving_gives_a_rate_no_concurrency() -> None:
    assert BenchConfig(request_rate=2.0).resolved("tiny").concurrency is None
