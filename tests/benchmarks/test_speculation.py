"""The benchmark of speculation, with random weights of a tiny shape."""

import pytest
import shapes
import speculation

from chairlift.loadtest.workload import WORDS
from tests.support.kernels import needs_kernels

from .fakes import FIELDS, RunScript


@needs_kernels
@pytest.mark.parametrize("number_format", ["bfloat16", "int8", "int4"])
def test_random_weights_answer_as_predicted(
    number_format: str, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = FIELDS | {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 2 * len(WORDS)}
    monkeypatch.setitem(shapes.SHAPES, "tiny", fields)
    small = ["--shape", "tiny", "--rows", "2", "--rounds", "1", "--tokens", "40", "--guessed", "8"]
    ran = run_script(speculation, *small, "--kinds", "prediction", "free", "--format", number_format)
    predicted, free = ran.report["figures"]
    assert predicted["accepted"] >= 60
    assert predicted["rejected"] == 0
    assert free["accepted"] <= 4  # tokens are random
