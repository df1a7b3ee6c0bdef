"""Steps with prompts of recurrent models from recorded graphs, against the same steps operator by operator.

The code in torch stands for the kernels of recurrent layers, as in `test_recurrent_graphs`, and flash-attn's references
for those of attention, as in `test_mixed`.
"""

import pytest

from chairlift import LLM
from chairlift.engine.parts import Pacing, Parts
from chairlift.models.attention import flash
from tests.engine.support import GREEDY, Recorder, core_of, mixed_of, tokens_of
from tests.engine.test_mixed import kernels
from tests.engine.test_recurrent import CASES, PROMPTS, assert_next_turn_is_cached
from tests.engine.test_recurrent_graphs import ENGINE, drive_from_tensors, model, plain
from tests.support.engines import make_core, with_attention

__all__ = ["kernels", "model", "plain"]  # fixtures


def graphed(model: str, steps: int) -> LLM:
    load = with_attention(lambda model: flash.FlashAttnBackend(model.attention), drive_from_tensors)
    parts = Parts(load_forward=load, pacing=Pacing(1, Recorder(), records_common=False))
    return LLM.of(make_core(model, parts, **{**ENGINE, "max_steps_per_launch": steps}))


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_are_those_without_graphs(model: str, plain: LLM, steps: int) -> None:
    params = [GREEDY.model_copy(update=case) for case, _ in zip(2 * [*CASES.values()], PROMPTS, strict=False)]
    with graphed(model, steps) as llm:
        core = core_of(llm)
        assert mixed_of(llm) is not None
        expected = tokens_of(plain.generate(PROMPTS, params))
        assert tokens_of(llm.generate(PROMPTS, params)) == expected
        again = llm.generate(PROMPTS, params)  # from states that are kept
        assert tokens_of(again) == expected
        assert sum(output.num_cached_tokens for output in again) > 200
        core.check()


def test_a_recorded_step_stops_states_at_end_tokens(model: str, plain: LLM) -> None:
    with graphed(model, 1) as llm:
        assert_next_turn_is_cached(llm, plain)
