"""What every engine is given."""

import pytest
from comparison.ceiling import DEFAULT_WORKLOADS, Workload


def test_a_workload_is_written_as_requests_prompt_and_output() -> None:
    workload = Workload.parse("32x1024+64")
    assert workload == Workload(num_requests=32, prompt_tokens=1024, output_tokens=64)
    assert workload.name == "32x1024+64"


@pytest.mark.parametrize("text", ["", "8", "8x128", "0x128+1", "8x0+1", "8x128+0", "8 x 128 + 1", "8x128+1 ", "-1x2+3"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no workload: write REQUESTSxPROMPT"):
        Workload.parse(text)


def test_output_tokens_count_unless_there_is_only_the_first() -> None:
    assert (Workload(8, 128, 64).num_counted_tokens, Workload(8, 128, 64).unit) == (512, "output tokens/s")
    assert (Workload(2, 1024, 1).num_counted_tokens, Workload(2, 1024, 1).unit) == (2048, "prompt tokens/s")


def test_prompts_are_the_same_for_every_engine_and_others_in_every_round() -> None:
    workload = Workload(4, 16, 8)
    assert workload.prompts("round 1", 1000) == workload.prompts("round 1", 1000)
    prompts = [tuple(ids) for turn in ("warm-up", "round 1", "round 2") for ids in workload.prompts(turn, 1000)]
    assert len(set(prompts)) == 12
    assert {len(ids) for ids in prompts} == {16}


def test_every_model_has_the_tokens() -> None:
    assert max(max(ids) for ids in Workload(32, 128, 1).prompts("x", 128256)) == 199
    assert max(max(ids) for ids in Workload(32, 128, 1).prompts("x", 50)) == 49


def test_the_default_workloads_are_workloads() -> None:
    assert [Workload.parse(text).name for text in DEFAULT_WORKLOADS] == DEFAULT_WORKLOADS
