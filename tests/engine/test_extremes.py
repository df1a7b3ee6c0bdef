"""Parameters at their limits: refused or answered, but never the death of an engine that others use too."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chairlift import SamplingParams
from chairlift.errors import InvalidRequest
from tests.engine.support import END_TOKEN, VOCAB_SIZE, assert_idle, make_llm, tokens_of

EXTREMES: dict[str, dict[str, Any]] = {
    "temperature next to 0": {"temperature": 1e-320},
    "temperature beyond float32": {"temperature": 1e300},
    "top_p next to 0": {"top_p": 1e-300},
    "top_p next to 1": {"top_p": 1.0 - 1e-16},
    "min_p next to 0": {"min_p": 1e-300},
    "min_p of 1 with everything": {"min_p": 1.0, "top_k": 1, "top_p": 1e-9},
    "top_k of int32": {"top_k": 2**31},
    "top_k of int64": {"top_k": 2**63 - 1},
    "top_k beyond int64": {"top_k": 2**63},
    "seed at its end": {"seed": 2**63 - 1, "n": 3},
    "seed at its beginning": {"seed": -(2**63), "n": 3},
    "repetition_penalty below float32": {"repetition_penalty": 1e-60},
    "repetition_penalty at float32's end": {"repetition_penalty": 1e-38, "logit_bias": {ord("h"): 100.0}},
    "repetition_penalty beyond float32": {"repetition_penalty": 1e300},
    "all penalties": {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 60},
    "every token biased down": {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -100.0)},
    "every token biased up": {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), 100.0)},
    "every token an end, and forbidden": {"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 2},
    "every token an end, forbidden, greedy": {
        "stop_token_ids": list(range(VOCAB_SIZE)),
        "min_tokens": 2,
        "temperature": 0.0,
    },
    "every token an end, one of them the model's own": {
        "stop_token_ids": list(range(VOCAB_SIZE - 1)),
        "min_tokens": 2,
        "ignore_eos": False,
    },
    "all tokens but one forbidden": {"stop_token_ids": list(range(VOCAB_SIZE - 1)), "min_tokens": 2, "top_p": 0.5},
}


@pytest.mark.parametrize("fields", EXTREMES.values(), ids=EXTREMES.keys())
def test_extreme_parameters_are_refused_or_give_tokens(tiny: str, fields: dict[str, Any]) -> None:
    with make_llm(tiny) as llm:
        try:
            outputs = llm.generate("hi", SamplingParams(**{"max_tokens": 5, "seed": 1, "ignore_eos": True, **fields}))
        except (ValidationError, InvalidRequest):
            outputs = []
        assert all(tokens and max(tokens) < VOCAB_SIZE for tokens in tokens_of(outputs))
        assert_idle(llm)


def with_eos(tiny: str, directory: Path, eos: int | list[int]) -> str:
    """The tiny checkpoint with other end tokens."""
    shutil.copytree(tiny, directory, dirs_exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return str(directory)


EAGER = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=4, logit_bias={END_TOKEN: 100.0})


@pytest.mark.parametrize(
    ("eos", "are_ends"),
    [
        *((eos, [True, True, True, True]) for eos in (VOCAB_SIZE, 100_000, -1)),
        ([100_000, END_TOKEN], [False, False, True]),
    ],
)
def test_an_end_token_that_the_model_does_not_have_is_none_and_one_beside_it_still_counts(
    tiny: str, tmp_path: Path, eos: int | list[int], are_ends: list[bool]
) -> None:
    with make_llm(with_eos(tiny, tmp_path, eos)) as llm:
        (tokens,) = tokens_of(llm.generate("hi", EAGER))
        assert_idle(llm)
    assert [token == END_TOKEN for token in tokens] == are_ends
