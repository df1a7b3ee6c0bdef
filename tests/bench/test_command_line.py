"""`chairlift bench` as it is typed: flags in, exit codes and lines out."""

from pathlib import Path

import pytest

from chairlift.__main__ import EXIT_USAGE, CommandLine, main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--goodput", "ttft=500"], "--goodput: Value error, cannot read the limit 'ttft=500': limits are of ttft"),
        (["--goodput", "tpot:fast"], "--goodput: Value error, cannot read the limit 'tpot:fast': milliseconds above 0"),
        (["--sweep", "rate=fast"], "--sweep: Value error, cannot read the sweep 'rate=fast': it must look like"),
        (["--prompt-tokens", "zipf:2"], "--prompt-tokens: Value error, cannot read the length 'zipf:2': it must be"),
        (["--url", "localhost"], "--url: Value error, must look like http://host:port or https://host"),
        (["--request-rate", "1", "--trace", "t"], "Value error, give either --request-rate or --trace, not both"),
        (["--sweep", "rate=1,2"], "Value error, --sweep needs --goodput"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_a_usage_error(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"chairlift: error: {said}")


@pytest.mark.parametrize("flags", [[], ["--model", "m"], ["--sweep", "rate=1", "--goodput", "ttft:5"]])
def test_a_url_without_a_server_is_one_line(
    flags: list[str], dead_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", dead_url, *flags]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Cannot connect to host 127.0.0.1" in errors[0]
    assert "Traceback" not in printed.err


def test_a_missing_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing.jsonl"
    assert main(["bench", "--trace", str(path)]) == 1
    assert capsys.readouterr().err == f"error: cannot read {path}: No such file or directory\n"


def test_flags_become_settings() -> None:
    flags = "--ramp 1,20 --burstiness 0.5 --prompt-tokens lognormal:300,0.8 --output-tokens 64 --prefix-tokens 9"
    parsed = CommandLine(_cli_parse_args=["bench", *flags.split(), "--num-prefixes", "3", "--no-ignore-eos"])
    config = parsed.bench
    assert config is not None
    assert (config.ramp, config.burstiness) == ((1.0, 20.0), 0.5)
    assert (config.prompt_tokens, config.output_lengths.numbers) == ("lognormal:300,0.8", (64.0,))
    assert (config.prefix_tokens, config.num_prefixes, config.ignore_eos) == (9, 3, False)
