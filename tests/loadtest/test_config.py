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
    """Returns what is said against these settings, as `field: message`."""
    with pytest.raises(ValidationError) as caught:
        BenchConfig.model_validate(settings)
    return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in caught.value.errors()]


def test_what_is_unknown_is_refused_by_name_or_with_what_is_known() -> None:
    assert messages(concurency=3) == ["concurency: Extra inputs are not permitted"]
    assert messages(endpoint="embeddings") == ["endpoint: Input should be 'completions' or 'chat'"]


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


CLOSED_SWEEP = {"goodput": "ttft:5", "sweep": "concurrency=1"}
NEEDS_PREFIX = "--num-prefixes needs --prefix-tokens"


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
        ({"num_prefixes": 2}, NEEDS_PREFIX),
        ({"think_time": 2.0}, "--think-time needs --turns or --conversations"),
        ({"sweep": "rate=1,2"}, "--sweep needs --goodput"),
        ({"goodput": "ttft:5", "goodput_share": 0.5}, "--goodput-share needs --sweep"),
        ({"goodput": "ttft:5", "sweep": "rate=1", "ramp": (1, 2)}, "give either --sweep or --ramp, not both"),
        (CLOSED_SWEEP | {"concurrency": 2}, "give either --sweep concurrency or --concurrency, not both"),
        ({"num_prefixes": 2, "trace_speedup": 2}, f"--trace-speedup needs --trace; {NEEDS_PREFIX}"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused_all_at_once(settings: dict[str, object], said: str) -> None:
    assert messages(**settings) == [f": Value error, {said}"]


def test_messages_go_to_the_chat_endpoint() -> None:
    for settings in ({"turns": 2}, {"conversations": "c"}, {"endpoint": "chat"}):
        config = BenchConfig.model_validate({"url": "https://host/openai/v1", **settings})
        assert config.endpoint_url == "https://host/openai/v1/chat/completions"
        assert config.resolved("m").endpoint == "chat"


def test_the_url_may_end_in_v1_or_a_slash_and_what_is_none_is_refused() -> None:
    for end in ("", "/", "/v1", "/v1/"):
        assert BenchConfig(url=f"http://host:8000{end}").endpoint_url == "http://host:8000/v1/completions"
    for url in ("localhost:8000", "ftp://host", "http://", "http://host?key=1", "http://host#top", "http://a b"):
        assert messages(url=url) == [f"url: Value error, must look like http://host:port or https://host, not {url!r}"]


def test_a_file_that_cannot_be_written_is_refused_before_the_test(tmp_path: Path) -> None:
    assert messages(report="a.pdf") == ["report: Value error, must end in .html, unlike 'a.pdf'"]
    missing = tmp_path / "missing" / "result.json"
    for name, path in [("json_file", missing), ("json_file", tmp_path), ("report", tmp_path / "missing" / "a.html")]:
        complaint = f"cannot write {path}: it must be a file in an existing directory"
        assert messages(**{name: path}) == [f"{name}: Value error, {complaint}"]
    path = tmp_path / "result.json"
    assert BenchConfig.model_validate({"json": path}).json_file == path  # the short name of its flag


def test_the_api_key_does_not_show() -> None:
    config = BenchConfig.model_validate({"api_key": "sk-secret"})
    assert "sk-secret" not in repr(config)
    assert config.model_dump(mode="json")["api_key"] == "**********"


def test_resolving_fills_in_the_model_and_without_a_schedule_the_concurrency() -> None:
    closed, three, scheduled = BenchConfig(), BenchConfig(concurrency=3), BenchConfig(request_rate=2.0)
    resolved = [config.resolved("tiny") for config in (closed, three, scheduled)]
    found = [(config.model, config.concurrency, config.is_open_loop) for config in resolved]
    assert found == [("tiny", 8, False), ("tiny", 3, False), ("tiny", None, True)]


def draw(text: int | str, count: int = 20_000) -> list[int]:
    return Lengths.parse(text).draw(count, np.random.default_rng(0))


def test_lengths_are_of_the_distribution_that_was_asked_for() -> None:
    assert [draw(text, count=3) for text in (7, "7", " 7 ")] == [[7, 7, 7]] * 3
    uniform, normal, lognormal = draw("uniform:3,6"), draw("normal:500,50"), draw("lognormal:300,0.8")
    assert set(uniform) == {3, 4, 5, 6}
    assert uniform.count(3) == pytest.approx(5000, rel=0.1)
    assert statistics.mean(normal) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.03)
    assert statistics.median(lognormal) == pytest.approx(300, rel=0.03)
    # The mean of a lognormal is median * exp(sigma^2 / 2).
    assert statistics.mean(lognormal) == pytest.approx(300 * np.exp(0.32), rel=0.03)
    assert {type(length) for length in normal} == {int}  # fit for JSON


def test_no_length_is_below_one_or_above_the_most_and_asking_for_more_keeps_the_first_ones() -> None:
    for text in ("normal:10,50,40", "lognormal:10,2,40"):
        assert (min(draw(text)), max(draw(text))) == (1, 40)
    for text in ("uniform:1,1000", "normal:500,50", "lognormal:300,0.8"):
        assert draw(text, count=50)[:20] == draw(text, count=20)


def test_limits_and_values_of_a_sweep_are_read_these_in_ascending_order() -> None:
    assert parse_limits("ttft:500,tpot:50") == {"ttft": 500.0, "tpot": 50.0}
    assert parse_limits(" tpot:0.5 , e2el:2e3") == {"tpot": 0.5, "e2el": 2000.0}
    swept = [SweepValues.parse(text) for text in ("rate=1,2.5,4", "rate=4,1,4", "concurrency=8")]
    assert swept[:2] == [SweepValues("rate", (1.0, 2.5, 4.0)), SweepValues("rate", (1.0, 4.0))]
    assert swept[2] == SweepValues("concurrency", (8.0,))


LENGTHS = (0, -3, "", "1.5", "many", "128,256", "1e300", "uniform", "uniform:5", "uniform:6,5", "uniform:0,5")
MORE_LENGTHS = ("uniform:1,2,3", "normal:5", "normal:5,1,0.5", "normal:nan,1", "lognormal:inf,1", "poisson:5")
LENGTH = "the length {!r}: it must be N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or lognormal:MEDIAN,SIGMA[,MAX], "
LIMITS = ("", "500", "itl:5", "ttft:5,ttft:6", "ttft:5,", "ttft", "ttft:soon", "ttft:0", "tpot:nan", "tpot:inf")
LIMIT = "the limits {!r}: they must look like ttft:500,tpot:50, with milliseconds above 0 for any of "
SWEEPS = ("", "rate", "rate=", "rate=a", "rate=0", "rate=1,inf", "speed=1", "concurrency=1.5")
SWEEP = "the sweep {!r}: it must look like rate=1,2,4,8 or concurrency=1,2,4,8, with numbers above 0 "


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (Lengths.parse, (*LENGTHS, *MORE_LENGTHS), LENGTH + "in numbers above 0"),
        (parse_limits, (*LIMITS, "ttft:5:6"), LIMIT + "ttft, tpot, e2el, each at most once"),
        (SweepValues.parse, SWEEPS, SWEEP + "(whole ones for concurrency)"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(
    parse: Callable[[Any], object], texts: tuple[int | str, ...], said: str
) -> None:
    for text in texts:
        with pytest.raises(ValueError, match="cannot read") as caught:
            parse(text)
        assert str(caught.value) == f"cannot read {said.format(text)}"


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
    assert main(["bench", "--url", url, *flags]) == 3
    printed = capsys.readouterr()
    errors = printed.err.splitlines()
    assert printed.out == ""
    assert [line for line in errors if "error: " in line] == [errors[-1]]
    assert errors[-1].startswith(f"chairlift: error: no server answers at {url} (")


def test_flags_become_settings() -> None:
    flags = "--ramp 1,20 --burstiness 0.5 --prompt-tokens lognormal:300,0.8 --output-tokens 64 --prefix-tokens 9"
    (config,) = read_settings(COMMANDS["bench"], [*flags.split(), "--num-prefixes", "3", "--no-ignore-eos"])
    assert (config.ramp, config.burstiness) == ((1.0, 20.0), 0.5)
    assert (config.prompt_tokens, config.output_tokens) == ("lognormal:300,0.8", "64")
    assert (config.prefix_tokens, config.num_prefixes, config.ignore_eos) == (9, 3, False)


def test_settings_need_neither_an_http_client_nor_numpy() -> None:
    code = "import sys, chairlift.loadtest as l; l.BenchConfig(); print({'aiohttp', 'numpy', 'tqdm'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
