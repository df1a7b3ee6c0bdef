"""benchmarks/beside_nano_vllm.py: its loads, its table, and Chairlift's side of it on a CPU."""

import argparse
from pathlib import Path

import beside_nano_vllm
import pytest
from beside_nano_vllm import Load, measure

from .conftest import RunScript

MIXED = Load(256, (100, 1024), (100, 512))


def test_a_load_is_named_by_its_lengths() -> None:
    assert MIXED.name == "256x100..1024+100..512"
    assert Load(1, (128, 128), (64, 64)).name == "1x128+64"


def test_the_same_seed_draws_the_same_requests_and_another_one_others() -> None:
    prompts, lengths = MIXED.draw(1, vocab_size=151_936)
    assert (prompts, lengths) == MIXED.draw(1, vocab_size=151_936)
    assert (prompts, lengths) != MIXED.draw(2, vocab_size=151_936)
    assert len(prompts) == len(lengths) == 256
    assert all(100 <= len(prompt) <= 1024 for prompt in prompts)
    assert all(100 <= length <= 512 for length in lengths)
    assert max(map(max, prompts)) == 9_999
    assert max(map(max, MIXED.draw(1, vocab_size=500)[0])) == 499


def test_the_table_has_the_best_rounds_and_their_ratio() -> None:
    figures = {
        "chairlift": {"tokens_per_s": {"1x8+8": [90.0, 120.0]}},
        "nano-vllm": {"tokens_per_s": {"1x8+8": [80.0, 60.0]}},
    }
    assert beside_nano_vllm._table(figures, ["1x8+8"]).splitlines() == [
        "output tokens/s  chairlift  nano-vllm  times",
        "1x8+8                  120         80   1.50",
    ]


def test_chairlift_answers_every_prompt_in_full(tmp_path: Path) -> None:
    arguments = argparse.Namespace(engine="chairlift", shape="tiny", device="cpu", rounds=1, scratch=tmp_path)
    figures = measure(arguments)
    assert figures["about"].startswith("cpu, ")
    assert [len(rates) for rates in figures["tokens_per_s"].values()] == [1, 1]
    assert all(rates[0] > 0 for rates in figures["tokens_per_s"].values())


def test_an_engine_that_fails_is_left_out_and_the_exit_code_says_so(run_script: RunScript, tmp_path: Path) -> None:
    flags = ("--engines", "nano-vllm", "--shape", "tiny", "--nano", str(tmp_path))
    ran = run_script(beside_nano_vllm, *flags)
    assert (ran.code, ran.report["figures"]) == (1, {})


@pytest.mark.parametrize("shape", ["0.6b", "8b"])
def test_both_shapes_are_those_that_nano_vllm_knows(shape: str) -> None:
    fields = beside_nano_vllm._MODELS[shape]
    assert fields["architectures"] == ["Qwen3ForCausalLM"]
    assert fields["head_dim"] == 128
