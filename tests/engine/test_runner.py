"""One launch: which rows get tokens, and how often the host waits for the device."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.params import FinishReason
from chairlift.scheduler import Request, RequestState, RowResult, StepPlan
from tests.engine.support import ENGINE, state_of

_TO_HOST = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class HostCopies(TorchFunctionMode):
    """Notes each call that brings a tensor's values to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _TO_HOST:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def core(tiny: str) -> Iterator[EngineCore]:
    core = EngineCore(
        EngineConfig(model=tiny, max_batch_size=4, max_num_batched_tokens=8, max_steps_per_launch=4, **ENGINE)
    )
    yield core
    core.check()


def add(core: EngineCore, name: str, num_prompt_tokens: int, max_tokens: int = 40) -> RequestState:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(name, list(range(1, num_prompt_tokens + 1)), params, max_tokens, seed=0)
    core.add(request)
    return state_of(core, request)


def launch(core: EngineCore) -> tuple[StepPlan, list[RowResult]]:
    """One step by hand, to see what is between plan and events."""
    plan = core._scheduler.schedule()
    launch = core._runner.launch(plan)
    core._scheduler.advance(plan, launch.reservation)
    results = launch.wait()
    core._scheduler.update(plan, results)
    return plan, results


def test_a_chunk_that_does_not_reach_the_prompts_end_gets_no_token(core: EngineCore) -> None:
    add(core, "long", 20)
    lengths = [[len(row.token_ids) for row in launch(core)[1]] for _ in range(4)]
    assert lengths == [[0], [0], [1], [4]]


def test_rows_that_decode_get_tokens_beside_a_chunk_that_does_not(core: EngineCore) -> None:
    add(core, "short", 2)
    launch(core)
    add(core, "long", 20)
    plan, results = launch(core)
    assert [(row.request.request_id, row.num_new_tokens) for row in plan.rows] == [("short", 1), ("long", 7)]
    assert [len(row.token_ids) for row in results] == [1, 0]


def test_all_steps_of_a_launch_come_to_the_host_in_one_copy(core: EngineCore) -> None:
    add(core, "a", 2)
    add(core, "b", 3)
    launch(core)
    with HostCopies() as copies:
        _, results = launch(core)
    assert [len(row.token_ids) for row in results] == [4, 4]
    assert copies.names == ["tolist"]


def test_a_launch_without_a_finished_prompt_brings_nothing_to_the_host(core: EngineCore) -> None:
    add(core, "long", 20)
    with HostCopies() as copies:
        launch(core)
    assert copies.names == []


def test_steps_in_one_launch_give_the_tokens_of_single_steps(tiny: str) -> None:
    def tokens(max_steps: int) -> list[list[int]]:
        core = EngineCore(EngineConfig(model=tiny, max_batch_size=4, max_steps_per_launch=max_steps, **ENGINE))
        requests = [add(core, str(length), length, max_tokens=9 + length) for length in (1, 4, 7)]
        while core.has_work:
            core.step()
            core.check()
        assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
        return [request.token_ids for request in requests]

    assert tokens(1) == tokens(5) == tokens(16)


def test_a_step_leaves_no_gradients(core: EngineCore) -> None:
    add(core, "a", 3)
    launch(core)
    assert not core.cache.blocks[0].requires_grad
    assert torch.isfinite(core.cache.blocks[0]).all()
