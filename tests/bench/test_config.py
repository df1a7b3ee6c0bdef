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
    assert (config.num_requests, config.warmup, config.token_range) == (100, 1, (32, 127))
    assert (config.temperature, config.ignore_eos, config.endpoint) == (0.0, True, "completions")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        BenchConfig().num_requests = 3  # type: ignore[misc]


def test_an_unknown_setting_is_refused_by_name() -> None:
    assert messages(concurency=3) == ["concurency: Extra inputs are not permitted"]


@pytest.mark.parametrize("name", ["num_requests", "concurrency", "prompt_tokens", "output_tokens"])
def test_counts_are_positive(name: str) -> None:
    assert messages(**{name: 0}) == [f"{name}: Input should be greater than 0"]


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


def test_concurrency_and_rate_exclude_each_other() -> None:
    assert messages(concurrency=4, request_rate=2.0) == [
        ": Value error, give either concurrency or request_rate, not both"
    ]


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


def test_too_few_possible_prompts_are_refused_with_the_way_out() -> None:
    assert messages(num_requests=95, warmup=1, prompt_tokens=1) == [
        ": Value error, 96 requests (with warmup) need as many distinct prompts, but 95 choices for each of "
        "1 prompt_tokens allow only 95: raise prompt_tokens, or lower num_requests, or for completions "
        "widen token_range"
    ]
    BenchConfig(num_requests=95, warmup=0, prompt_tokens=1)
    BenchConfig(num_requests=95, warmup=1, prompt_tokens=1, token_range=(32, 128))


def test_chat_prompts_are_limited_by_the_list_of_words_not_by_the_token_range() -> None:
    BenchConfig(endpoint="chat", num_requests=50, prompt_tokens=1, token_range=(32, 33))


def test_a_json_file_that_cannot_be_written_is_refused_before_the_test(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "result.json"
    for path in (missing, tmp_path):
        assert messages(json_file=path) == [
            f"json_file: Value error, cannot write {path}: it must be a file in an existing directory"
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
