"""Prompts of a model over several ranks: saved and found as a whole, or not at all."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import EngineDead
from chairlift.params import RequestOutput
from tests.engine.rank_support import PARTS, pids_of_ranks
from tests.engine.support import core_of, make_llm, make_tiny_checkpoint, tokens_of
from tests.support.checkpoints import random_prompts

(PROMPT,) = random_prompts(3, [230], 250)
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
RECURRENT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {"attention": {}, "recurrent": RECURRENT}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), **{**heads, **MODELS[request.param]})


def make_saving(model: str, directory: Path, num_ranks: int = 2) -> LLM:
    return make_llm(
        model,
        PARTS,
        attention_backend="torch",
        batch_invariant=True,
        max_seq_len=256,
        tensor_parallel_size=num_ranks,
        prefix_cache_dir=str(directory),
    )


def answered(model: str, directory: Path, num_ranks: int = 2) -> RequestOutput:
    """The answer of an engine that is made for it alone, and saves everything when it is closed."""
    with make_saving(model, directory, num_ranks) as llm:
        output = llm.generate([PROMPT], SCORED)[0]
        core_of(llm).check()
        return output


def scores_of(output: RequestOutput) -> list[float]:
    return [each.logprob for place in output.outputs[0].logprobs or () for each in place.values()]


def spoil_last_part(path: Path) -> None:
    """Changes the last byte, which is one of the last rank's."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def cut_last_part(path: Path) -> None:
    """Leaves the first rank's part alone."""
    os.truncate(path, path.stat().st_size * 2 // 3)


def test_all_ranks_find_their_parts_after_a_restart(model: str, tmp_path: Path) -> None:
    alone = answered(model, tmp_path, num_ranks=1)
    cold, warm = (answered(model, tmp_path) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens >= 192) == (0, True)
    assert tokens_of([cold]) == tokens_of([warm]) == tokens_of([alone])
    assert scores_of(warm) == scores_of(cold) == pytest.approx(scores_of(alone), abs=1e-4)


@pytest.mark.parametrize("harm", [spoil_last_part, cut_last_part])
@pytest.mark.parametrize("model", ["attention"], indirect=True)
def test_a_part_of_one_rank_that_is_damaged_ends_what_is_found(model: str, tmp_path: Path, harm: Any) -> None:
    cold = answered(model, tmp_path)
    harm(sorted(tmp_path.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)[-2])
    warm = answered(model, tmp_path)
    assert warm.num_cached_tokens == 64
    assert (tokens_of([warm]), scores_of(warm)) == (tokens_of([cold]), scores_of(cold))


@pytest.mark.parametrize("model", ["attention"], indirect=True)
def test_nothing_is_saved_without_a_rank_and_the_next_engine_starts(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_saving(model, tmp_path) as llm:
        cold = llm.generate([PROMPT], SCORED)[0]
        core = core_of(llm)
        (pid,) = pids_of_ranks(core)
        os.kill(pid, signal.SIGKILL)
        while not core.has_saved_all():
            pass
        with pytest.raises(EngineDead, match="rank 1 was killed by signal 9"):
            llm.generate([PROMPT], SCORED)
    num_saved = len(list(tmp_path.glob("*/*.kv")))
    assert num_saved <= 1  # what was copied while the rank lived
    assert sum("prefixes cannot be saved" in record.message for record in caplog.records) == 1
    warm = answered(model, tmp_path)
    assert (warm.num_cached_tokens, tokens_of([warm])) == (64 * num_saved, tokens_of([cold]))
