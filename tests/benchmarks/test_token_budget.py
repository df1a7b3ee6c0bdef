"""What a token budget costs running streams and brings long prompts: figures, and the command with a real engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import token_budget
from token_budget import Mix, MixFigures, RoundFigures, Streams, Trial, record, table

from chairlift import AsyncLLM
from tests.support.checkpoints import make_checkpoint

from .fakes import run_script

MIX = Mix(num_streams=2, stream_prompt_tokens=4, quiet_tokens=3, num_long_prompts=2, long_prompt_tokens=1000)
SEEN = MixFigures(
    budget=64,
    quiet_gaps_ms=(4.0, 5.0, 9.0),
    gaps_ms=(*[10.0] * 99, 20.0, 110.0),
    ttft_ms=(400.0, 500.0),
    busy_s=0.5,
    streamed_tokens=100,
)


def figures(scale: float) -> RoundFigures:
    return RoundFigures(*(scale * value for value in (10.0, 40.0, 5.0, 450.0, 4000.0, 200.0)))


def test_a_round_in_figures() -> None:
    assert RoundFigures.of(SEEN, MIX) == RoundFigures(
        tpot_ms=10.0,  # half a second, in which each of two streams got 50 tokens
        itl_p99_ms=20.0,  # the 100th of 101 gaps
        quiet_itl_p50_ms=5.0,
        ttft_p50_ms=450.0,
        prompt_tokens_per_s=4000.0,
        stream_tokens_per_s=200.0,
    )


def test_the_table_shows_medians_over_rounds() -> None:
    trial = Trial(64, [figures(1.0), figures(3.0), figures(2.0)])
    assert trial.medians == figures(2.0)
    assert table([trial]).splitlines() == [
        "         budget       TPOT, ms    ITL p99, ms      alone, ms  long TTFT, ms   prompt tok/s   stream tok/s",
        "             64           20.0           80.0           10.0          900.0          8,000            400",
    ]


def test_the_json_keeps_the_rounds() -> None:
    recorded = record(Trial(64, [figures(1.0), figures(3.0)]))
    assert recorded["budget"] == 64
    assert recorded["medians"]["itl_p99_ms"] == 80.0
    assert [each["itl_p99_ms"] for each in recorded["rounds"]] == [40.0, 120.0]


@pytest.mark.asyncio
async def test_streams_run_until_they_are_left(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    async with AsyncLLM(str(tmp_path / "model"), max_seq_len=64, max_batch_size=2) as llm:
        async with Streams(llm, [[1, 2, 3], [4, 5]]) as streams:
            await streams.wait_for(5)
        assert llm.num_unfinished == 0
    num_tokens = streams.num_tokens(0.0, float("inf"))
    assert num_tokens >= 10
    assert len(streams.gaps_ms(0.0, float("inf"))) == num_tokens - 2
    assert streams.gaps_ms(0.0, 0.0) == []


@pytest.mark.asyncio
async def test_a_stream_whose_slot_is_full_is_no_measurement(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    async with (
        AsyncLLM(str(tmp_path / "model"), max_seq_len=16, max_batch_size=2) as llm,
        Streams(llm, [[1, 2, 3], [4, 5]]) as streams,
    ):
        with pytest.raises(RuntimeError, match="a stream's slot was full before all was measured"):
            await streams.wait_for(100)


def test_the_command_measures_every_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "weights")
    flags = ["--model", str(tmp_path / "weights"), "--dtype", "float32", "--rounds", "2", "--max-seq-len", "256"]
    mix = ["--streams", "2", "--stream-prompt-tokens", "4", "--quiet-tokens", "2"]
    long = ["--long-prompts", "2", "--long-prompt-tokens", "100", "--budgets", "8", "32"]
    assert run_script(monkeypatch, token_budget, *flags, *mix, *long, "--json", str(tmp_path / "out.json")) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == report
    assert [result["budget"] for result in report["results"]] == [8, 32]
    assert [len(result["rounds"]) for result in report["results"]] == [2, 2]
    # A prompt of 100 takes 17 steps of 6 beside two streams, or 4 of 30: in each a stream gets a token.
    tokens = [result["medians"]["stream_tokens_per_s"] for result in report["results"]]
    prompts = [result["medians"]["prompt_tokens_per_s"] for result in report["results"]]
    per_prompt = [100 * streamed / prompt for streamed, prompt in zip(tokens, prompts, strict=True)]
    assert 33 <= per_prompt[0] <= 40
    assert 7 <= per_prompt[1] <= 14


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budgets", "64", "16"], "--budgets: 16 is less than a token for each of 17 requests"),
        (
            ["--max-seq-len", "4096"],
            "--long-prompt-tokens must be below --max-seq-len, 4096: lower the first, or raise the second",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(monkeypatch, token_budget, *flags) == 2
    assert capsys.readouterr().err == f"token_budget.py: {message}\n"
