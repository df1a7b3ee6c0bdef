"""The settings: what is refused, and in what words; and what is left open until the test begins."""

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from chairlift.__main__ import COMMANDS, EXIT_USAGE, main
from chairlift.flags import read_settings
from chairlift.loadtest import BenchConfig, Lengths, SweepValues, parse_limits


def messages(**settings: object) -> list[str]:
    """What is said against these settings, as `field: message`."""
    with pytest.raises(ValidationError) as caught:
        BenchConfig.model_validate(settings)
    return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in caught.value.errors()]


def test_every_field_has_a_description_since_it_is_the_help_of_its_flag() -> None:
    assert [name for name, field in BenchConfig.model_fields.items() if not field.description] == []


def test_an_unknown_setting_is_refused_by_name() -> None:
    assert messages(concurency=3) == ["concurency: Extra inputs are not permitted"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, 0, "greater than 0") for name in ("num_requests", "concurrency", "num_prefixes", "turns")),
        *((name, 0.0, "greater than 0") for name in ("request_rate", "timeout")),
        *((name, float("inf"), "a finite number") for name in ("request_rate", "timeout")),
        *((name, -1, "greater than or equal to 0") for name in ("warmup", "seed", "temperature")),
    ],
)
def test_numbers_have_their_limits(name: str, value: float, said: str) -> None:
    assert messages(prefix_tokens=8, **{name: value}) == [f"{name}: Input should be {said}"]


def test_an_unknown_endpoint_is_refused_with_the_known_ones() -> None:
    assert messages(endpoint="embeddings") == ["endpoint: Input should be 'completions' or 'chat'"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"request_rate": 1.0, "ramp": (1, 2)}, "give either --request-rate or --ramp, not both"),
        ({"request_rate": 1.0, "trace": "t"}, "give either --request-rate or --trace, not both"),
        ({"trace": "t", "conversations": "c"}, "give either --trace or --conversations, not both"),
        ({"trace": "t", "prompt_tokens": 5}, "give either --trace or --prompt-tokens, not both"),
        ({"trace": "t", "output_tokens": 5}, "give either --trace or --output-tokens, not both"),
        ({"conversations": "c", "prefix_tokens": 5}, "give either --conversations or --prefix-tokens, not both"),
        ({"conversations": "c", "turns": 2}, "give either --conversations or --turns, not both"),
        ({"endpoint": "completions", "turns": 2}, "give either --endpoint completions or --turns, not both"),
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


@pytest.mark.parametrize("settings", [{"turns": 2}, {"conversations": "c"}, {"endpoint": "chat"}])
def test_messages_go_to_the_chat_endpoint(settings: dict[str, object]) -> None:
    config = BenchConfig.model_validate({"url": "https://host/openai/v1", **settings})
    assert config.endpoint_url == "https://host/openai/v1/chat/completions"
    assert config.resolved("m").endpoint == "chat"


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_the_url_may_end_in_v1_or_a_slash(url: str) -> None:
    assert BenchConfig(url=url).endpoint_url == "http://host:8000/v1/completions"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host?key=1", "http://host#top", "http://a b"]
)
def test_what_is_no_http_url_is_refused(url: str) -> None:
    assert messages(url=url) == [f"url: Value error, must look like http://host:port or https://host, not {url!r}"]


def test_a_file_that_cannot_be_written_is_refused_before_the_test(tmp_path: Path) -> None:
    assert messages(report="a.pdf") == ["report: Value error, must end in .html, unlike 'a.pdf'"]
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


@pytest.mark.parametrize(("settings", "concurrency"), [({}, 8), ({"concurrency": 3}, 3), ({"request_rate": 2.0}, None)])
def test_resolving_fills_in_the_model_and_without_a_schedule_the_concurrency(
    settings: dict[str, object], concurrency: int | None
) -> None:
    resolved = BenchConfig.model_validate(settings).resolved("tiny")
    assert (resolved.model, resolved.concurrency) == ("tiny", concurrency)
    assert resolved.is_open_loop is ("request_rate" in settings)


def draw(text: int | str, count: int = 20_000, seed: int = 0) -> list[int]:
    return Lengths.parse(text).draw(count, np.random.default_rng(seed))


@pytest.mark.parametrize("text", [7, "7", " 7 "])
def test_a_number_is_the_length_of_all(text: int | str) -> None:
    assert draw(text, count=3) == [7, 7, 7]


def test_uniform_reaches_both_ends() -> None:
    lengths = draw("uniform:3,6")
    assert set(lengths) == {3, 4, 5, 6}
    assert lengths.count(3) == pytest.approx(5000, rel=0.1)


def test_normal_has_its_mean_and_deviation() -> None:
    lengths = draw("normal:500,50")
    assert statistics.mean(lengths) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(lengths) == pytest.approx(50, rel=0.03)


def test_lognormal_has_its_median_and_a_heavy_tail() -> None:
    lengths = draw("lognormal:300,0.8")
    assert statistics.median(lengths) == pytest.approx(300, rel=0.03)
    # The mean of a lognormal is median * exp(sigma^2 / 2).
    assert statistics.mean(lengths) == pytest.approx(300 * np.exp(0.32), rel=0.03)


@pytest.mark.parametrize("text", ["normal:10,50,40", "lognormal:10,2,40"])
def test_no_length_is_below_one_or_above_the_most(text: str) -> None:
    lengths = draw(text)
    assert (min(lengths), max(lengths)) == (1, 40)


def test_lengths_are_plain_integers_fit_for_json() -> None:
    assert {type(length) for length in draw("normal:10,5", count=5)} == {int}


@pytest.mark.parametrize("text", ["uniform:1,1000", "normal:500,50", "lognormal:300,0.8"])
def test_asking_for_more_keeps_the_first_ones(text: str) -> None:
    assert draw(text, count=50)[:20] == draw(text, count=20)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft:500", {"ttft": 500.0}),
        ("ttft:500,tpot:50", {"ttft": 500.0, "tpot": 50.0}),
        (" tpot:0.5 , e2el:2e3", {"tpot": 0.5, "e2el": 2000.0}),
    ],
)
def test_limits_are_read(text: str, limits: dict[str, float]) -> None:
    assert parse_limits(text) == limits


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rate=1,2.5,4", SweepValues("rate", (1.0, 2.5, 4.0))),
        ("rate=4,1,4", SweepValues("rate", (1.0, 4.0))),
        ("concurrency=8", SweepValues("concurrency", (8.0,))),
    ],
)
def test_values_of_a_sweep_are_read_in_ascending_order(text: str, values: SweepValues) -> None:
    assert SweepValues.parse(text) == values


LENGTHS = (0, -3, "", "1.5", "many", "128,256", "1e300", "uniform", "uniform:5", "uniform:6,5", "uniform:0,5")
MORE_LENGTHS = ("uniform:1,2,3", "normal:5", "normal:5,1,0.5", "normal:nan,1", "lognormal:inf,1", "poisson:5")
LIMITS = ("", "500", "itl:5", "ttft:5,ttft:6", "ttft:5,", "ttft", "ttft:soon", "ttft:0", "tpot:nan", "tpot:inf")
SWEEPS = ("", "rate", "rate=", "rate=a", "rate=0", "rate=1,inf", "speed=1", "concurrency=1.5")


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (
            Lengths.parse,
            (*LENGTHS, *MORE_LENGTHS),
            "cannot read the length {!r}: it must be N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or "
            "lognormal:MEDIAN,SIGMA[,MAX], in numbers above 0",
        ),
        (
            parse_limits,
            (*LIMITS, "ttft:5:6"),
            "cannot read the limits {!r}: they must look like ttft:500,tpot:50, with milliseconds above 0 for any of "
            "ttft, tpot, e2el, each at most once",
        ),
        (
            SweepValues.parse,
            SWEEPS,
            "cannot read the sweep {!r}: it must look like rate=1,2,4,8 or concurrency=1,2,4,8, with numbers above 0 "
            "(whole ones for concurrency)",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(
    parse: Callable[[Any], object], texts: tuple[int | str, ...], said: str
) -> None:
    for text in texts:
        with pytest.raises(ValueError, match="cannot read") as caught:
            parse(text)
        assert str(caught.value) == said.format(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--goodput ttft=500", "--goodput: cannot read the limits 'ttft=500': they must look like"),
        ("--sweep rate=fast", "--sweep: cannot read the sweep 'rate=fast': it must look like"),
        ("--prompt-tokens zipf:2", "--prompt-tokens: cannot read the length 'zipf:2': it must be"),
        ("--url localhost", "--url: must look like http://host:port or https://host"),
        ("--request-rate 1 --trace t", "give either --request-rate or --trace, not both"),
        ("--sweep rate=1,2", "--sweep needs --goodput"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_a_usage_error(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags.split()]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"chairlift: error: {said}")


@pytest.mark.parametrize("url", ["http://127.0.0.1:0", "http://host:99999"])
@pytest.mark.parametrize("flags", [[], ["--sweep", "rate=1", "--goodput", "ttft:5"]])
def test_a_place_where_nobody_can_listen_is_one_line_and_no_usage_error(
    url: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", url, *flags]) == 1
    printed = capsys.readouterr()
    errors = printed.err.splitlines()
    assert printed.out == ""
    assert [line for line in errors if "error: " in line] == [errors[-1]]
    assert errors[-1].startswith(f"error: cannot reach {url}: ")


def test_flags_become_settings() -> None:
    flags = "--ramp 1,20 --burstiness 0.5 --prompt-tokens lognormal:300,0.8 --output-tokens 64 --prefix-tokens 9"
    (config,) = read_settings(COMMANDS["bench"], [*flags.split(), "--num-prefixes", "3", "--no-ignore-eos"])
    assert (config.ramp, config.burstiness) == ((1.0, 20.0), 0.5)
    assert (config.prompt_tokens, config.output_tokens) == ("lognormal:300,0.8", "64")
    assert (config.prefix_tokens, config.num_prefixes, config.ignore_eos) == (9, 3, False)


def test_settings_need_neither_an_http_client_nor_numpy() -> None:
    code = (
        "import sys, chairlift.loadtest as l; l.BenchConfig(); print({'aiohttp', 'numpy', 'tqdm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
