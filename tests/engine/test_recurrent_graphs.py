"""Decode steps of recurrent models from recorded graphs, against the same steps operator by operator.

See `test_graphs` for what stands for a graph on a CPU. Its kernels are stood for by the code in torch, which reads
everything about rows from tensors, as kernels do.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from chairlift import LLM
from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.engine.parts import Pacing, Parts
from chairlift.models import ragged_recurrence
from chairlift.models.attention import BatchMetadata
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.recurrence import Recur, prepare
from tests.engine.support import GREEDY, Recorder, core_of, tokens_of
from tests.engine.test_recurrent import CASES, IN_TORCH, PROMPTS, SETTINGS, TINY, assert_next_turn_is_cached
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import make_core, with_attention

ENGINE: dict[str, Any] = {**SETTINGS, "attention_backend": "torch", "batch_invariant": False}


def drive_from_tensors(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Recur:
    """Moves states as tensors alone say. Rows of a padded step may have no tokens."""
    states = cache.states
    assert states is not None
    counts = (states.num_replayed, states.num_tentative) if states.counts is None else states.counts.tolist()
    columns = cache.lookup_table.tolist(), cache.cache_lengths.tolist(), batch.row_offsets.diff().tolist(), *counts
    rows = [row for row in zip(*columns, strict=True) if row[2]]
    slots, starts, num_new, num_replayed, num_tentative = zip(*rows, strict=True)
    return prepare(
        replace(
            states,
            slots=slots,
            starts=starts,
            num_new=num_new,
            num_replayed=num_replayed,
            num_tentative=num_tentative,
        )
    )


@pytest.fixture(scope="module", params=IN_TORCH)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("recurrent")
    make_checkpoint(directory, seed=3, model_type=request.param, **{**TINY, **IN_TORCH[request.param]})
    make_byte_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    """An engine without graphs, which reuses nothing."""
    with LLM.of(make_core(model, enable_prefix_caching=False, **ENGINE)) as llm:
        yield llm


def graphed(model: str, recorder: Recorder, num_ahead: int, **config: Any) -> LLM:
    load = with_attention(lambda model: TorchBackend(model.attention, is_in_place=False), drive_from_tensors)
    parts = Parts(load_forward=load, pacing=Pacing(num_ahead, recorder))
    return LLM.of(make_core(model, parts, **{**ENGINE, **config}))


@pytest.mark.parametrize(("steps", "num_ahead"), [(1, 0), (4, 1)])
def test_answers_are_those_without_graphs(model: str, plain: LLM, steps: int, num_ahead: int) -> None:
    params = [GREEDY.model_copy(update=case) for case, _ in zip(2 * [*CASES.values()], PROMPTS, strict=False)]
    recorder = Recorder()
    with graphed(model, recorder, num_ahead, max_steps_per_launch=steps) as llm:
        expected = tokens_of(plain.generate(PROMPTS, params))
        assert tokens_of(llm.generate(PROMPTS, params)) == expected
        assert recorder.num_replayed > 20
        again = llm.generate(PROMPTS, params)  # from states that are kept
        assert tokens_of(again) == expected
        assert sum(output.num_cached_tokens for output in again) > 200
        core_of(llm).check()


def test_a_recorded_step_stops_states_at_end_tokens(model: str, plain: LLM) -> None:
    with graphed(model, Recorder(), 1, max_steps_per_launch=3) as llm:
        assert_next_turn_is_cached(llm, plain)


def test_nothing_is_recorded_without_kernels(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_recurrence, "is_available", lambda _: False)
    recorder = Recorder()
    with graphed(model, recorder, 0) as llm:
        assert core_of(llm).executor.recordings is None
    assert recorder.num_recorded == 0
