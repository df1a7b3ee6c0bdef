"""Decode steps from recorded graphs, against the same steps operator by operator.

On a CPU a graph is the work itself: to record is to remember it (and to run it, as libraries are warmed up), to replay
is to run it again. What is special about graphs is all there: fixed places and sizes, padding, a step that follows from
the one before.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.graphs import DecodeGraphs
from chairlift.engine.execution.recorder import CudaRecorder, GraphTable, Replay
from chairlift.engine.execution.recordings import Recordings
from chairlift.engine.execution.sampling_graphs import batch_sizes
from chairlift.engine.parts import Pacing, Parts
from chairlift.engine.sampling import drawing
from chairlift.engine.sampling.drawing import INVALID_TOKEN, DrawKind, prepare_graph_sampling, sample_in_graph
from chairlift.engine.sampling.kernels import SampleChanged
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError
from chairlift.kernels.changes import NO_CHANGES, Changes
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.params import RequestOutput
from chairlift.prompt_work import ScoreTask
from chairlift.scheduler import Request
from tests.engine import support
from tests.engine.support import ENGINE, GREEDY, PROMPTS, VOCAB_SIZE, Recorder, core_of, make_request, row_of, tokens_of
from tests.engine.test_overlap import CASES
from tests.engine.test_poison import POISON, SAID, assert_all_finite, poisoned
from tests.support.changes_reference import changed
from tests.support.checkpoints import random_prompts
from tests.support.engines import make_core, with_attention
from tests.support.gpu import needs_gpu, no_waiting

NUM_SLOTS = 5
PLAIN: dict[str, Any] = {"max_batch_size": NUM_SLOTS, "attention_backend": "torch", **ENGINE}


class AnyLengthBackend(TorchBackend):
    """Always looks at whole slots."""

    is_any_length = True


def graphed(
    model: str,
    recorder: Recorder | None,
    num_ahead: int = 0,
    backend: type[TorchBackend] = TorchBackend,
    kernels: SampleChanged | None = None,
    *,
    records_common: bool = True,
    **config: Any,
) -> LLM:
    """An engine with graphs, if there is a recorder, whose attention looks at nothing but tensors."""
    load = with_attention(lambda model: backend(model.attention, is_in_place=False))
    pacing = Pacing(num_ahead, recorder, records_common)
    parts = Parts(load_forward=load, pacing=pacing, make_sampler=partial(Sampler, kernels=kernels))
    return LLM.of(make_core(model, parts, **{**PLAIN, **config}))


def recordings_of(llm: LLM) -> Recordings:
    recordings = core_of(llm).executor.recordings
    assert recordings is not None
    return recordings


def decodes_of(llm: LLM) -> GraphTable:
    """The graphs of decode steps, by rows and tokens read."""
    graphs = recordings_of(llm).find(DecodeGraphs)
    assert graphs is not None
    return graphs.graphs


class Exhaustible(Recorder):
    """Has no memory for more graphs once it is full."""

    is_full = False

    def record(self, work: Callable[[], None]) -> Replay:
        if self.is_full:
            raise torch.OutOfMemoryError("out of memory")
        return super().record(work)


@pytest.fixture
def recorder() -> Exhaustible:
    return Exhaustible()


@pytest.fixture
def lazy(tiny: str, recorder: Recorder) -> Iterator[LLM]:
    with graphed(tiny, recorder, records_common=False) as llm:
        yield llm


PACES = [(1, 0), *(pytest.param(pace, marks=pytest.mark.slow) for pace in [(4, 0), (1, 1)]), (4, 1)]


def test_batches_are_padded_to_one_of_a_few_sizes() -> None:
    assert [batch_sizes(size) for size in (1, 3, 8)] == [[1], [1, 2, 3], [1, 2, 4, 8]]
    assert batch_sizes(9) == [1, 2, 4, 8, 9]
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]


@pytest.fixture(scope="module")
def plain(tiny: str) -> Iterator[LLM]:
    """An engine without graphs."""
    with LLM(tiny, enable_prefix_caching=False, **PLAIN) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[str, list[RequestOutput]]:
    """Its answers in each case."""
    return {case: plain.generate(PROMPTS, GREEDY.model_copy(update=fields)) for case, fields in CASES.items()}


@pytest.fixture(scope="module", params=PACES, ids=["1", "4", "1 ahead", "4 ahead"])
def recorded(tiny: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """One with graphs, of one or four steps a launch, and of no or one launch ahead."""
    steps, num_ahead = request.param
    with graphed(tiny, Recorder(), num_ahead, max_steps_per_launch=steps) as llm:
        yield llm


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_graphs(expected: dict[str, list[RequestOutput]], recorded: LLM, case: str) -> None:
    core_of(recorded).scheduler.reset_prefix_cache()
    outputs = recorded.generate(PROMPTS, GREEDY.model_copy(update=CASES[case]))
    core_of(recorded).check()
    assert core_of(recorded).cache.slots_remaining == NUM_SLOTS
    assert tokens_of(outputs) == tokens_of(expected[case])
    assert scores_of(outputs) == pytest.approx(scores_of(expected[case]), abs=1e-5)


def scores_of(outputs: list[RequestOutput]) -> list[float]:
    positions = [position for output in outputs for position in output.outputs[0].logprobs or []]
    return [entry.logprob for position in positions for _, entry in sorted(position.items())]


@pytest.mark.parametrize("steps", [1, 4])
def test_kinds_side_by_side_come_and_go(tiny: str, plain: LLM, steps: int) -> None:
    cases = ("greedy", "random", "filtered", "greedy", "ends by itself", "random", "scored")
    params = [GREEDY.model_copy(update={**CASES[each], "max_tokens": 3 + 4 * i}) for i, each in enumerate(cases)]
    expected = tokens_of(plain.generate(PROMPTS[:7], params))
    with graphed(tiny, Recorder(), 1, records_common=False, max_steps_per_launch=steps) as llm:
        assert tokens_of(llm.generate(PROMPTS[:7], params)) == expected


def test_kernels_sample_all_rows_from_logits_as_they_are(tiny: str) -> None:
    params = [GREEDY.model_copy(update=fields) for fields in CASES.values()]
    prompts = (PROMPTS * len(params))[: len(params)]
    seen: set[tuple[DrawKind, torch.dtype]] = set()

    def sample_all(
        logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, step: torch.Tensor, changes: Changes = NO_CHANGES
    ) -> torch.Tensor:
        seen.add((kind, logits.dtype))
        return sample_in_graph(changed(logits, changes), kind, table, step)

    with graphed(tiny, None, 1, dtype="bfloat16") as llm:
        expected = tokens_of(llm.generate(prompts, params))
        alone = tokens_of(llm.generate(PROMPTS[:3], GREEDY))
    with graphed(tiny, Recorder(), 1, kernels=sample_all, dtype="bfloat16", max_steps_per_launch=2) as llm:
        assert tokens_of(llm.generate(prompts, params)) == expected
        assert {dtype for _, dtype in seen} == {torch.bfloat16}  # also beside rows with penalties
        seen.clear()
        assert tokens_of(llm.generate(PROMPTS[:3], GREEDY)) == alone
        assert seen == {(DrawKind.GREEDY, torch.bfloat16)}


@pytest.mark.parametrize(("logprobs", "num_replayed"), [(None, 1 + 2 * 8), (1, 8)])
def test_a_decode_step_replays_a_forward_graph_and_one_that_samples_if_that_has_all_that_is_wanted(
    tiny: str, recorder: Recorder, logprobs: int | None, num_replayed: int
) -> None:
    """The first token is the prompt's, whose logits no graph computes."""
    params = GREEDY.model_copy(update={"max_tokens": 9})
    with graphed(tiny, recorder, max_steps_per_launch=4) as llm:
        llm.generate([PROMPTS[0]] * 2, [params, params.model_copy(update={"logprobs": logprobs})])
    assert recorder.num_replayed == num_replayed


def test_rare_sizes_are_padded_until_there_is_no_work_and_recorded_then(lazy: LLM, recorder: Recorder) -> None:
    core, at_start = core_of(lazy), recorder.num_recorded
    assert at_start == 1 + len(DrawKind)  # one length, all kinds of sampling, the largest batch
    for params in (GREEDY, GREEDY, GREEDY.model_copy(update={"temperature": 1.0, "seed": 1})):
        lazy.generate(PROMPTS[:2], params)
    assert recorder.num_recorded == at_start
    more = [core.use_idle_time() for _ in range(4)]
    assert more == [True, True, False, False]  # one at a time, for who comes meanwhile
    assert recorder.num_recorded == at_start + 3
    assert decodes_of(lazy).recorded == {(2, 256), (NUM_SLOTS, 256)}
    assert {kind for size, kind in recordings_of(lazy).sampling.graphs.recorded if size == 2} == {
        DrawKind.GREEDY,
        DrawKind.RANDOM,
    }
    lazy.generate(PROMPTS[:2], GREEDY)
    assert not core.use_idle_time()


def test_nothing_is_recorded_while_requests_wait_or_run(lazy: LLM, recorder: Recorder) -> None:
    core, at_start = core_of(lazy), recorder.num_recorded
    core.add(Request("a", [1, 2], GREEDY, 5, seed=0))
    while core.has_work:
        core.step()
        assert not (core.has_work and core.use_idle_time())
    assert recorder.num_recorded == at_start
    core.use_idle_time()
    assert recorder.num_recorded == at_start + 1


def test_a_graph_that_does_not_fit_while_nothing_is_asked_for_is_done_without(
    lazy: LLM, recorder: Exhaustible, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(lazy.generate(PROMPTS[:2], GREEDY))
    recorder.is_full = True
    assert [core_of(lazy).use_idle_time() for _ in range(2)] == [True, False]
    assert "no memory left for a graph of 2 rows" in caplog.text
    assert tokens_of(lazy.generate(PROMPTS[:2], GREEDY)) == expected


def test_graphs_that_do_not_fit_are_refused(tiny: str, recorder: Exhaustible) -> None:
    recorder.is_full = True
    said = "no memory left for CUDA graphs; lower kv_cache_memory_bytes"
    with pytest.raises(ConfigurationError, match=said):
        graphed(tiny, recorder)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 600 positions."""
    return support.make_tiny_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=600)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_row_that_grows_goes_on_with_graphs_that_look_further(long: str, recorder: Recorder, steps: int) -> None:
    prompts = random_prompts(4, [249, 3, 507, 1], VOCAB_SIZE)
    params = GREEDY.model_copy(update={"max_tokens": 20})
    with graphed(long, None, max_steps_per_launch=steps) as llm:
        expected = tokens_of(llm.generate(prompts, params))
    with graphed(long, recorder, max_steps_per_launch=steps) as llm:
        assert tokens_of(llm.generate(prompts, params)) == expected
        assert {length for _, length in decodes_of(llm).recorded} == {256, 512, 600}


def test_attention_that_serves_any_length_takes_one_graph_of_each_size(long: str, recorder: Recorder) -> None:
    prompts = random_prompts(4, [249, 3, 507, 1], VOCAB_SIZE)
    params = GREEDY.model_copy(update={"max_tokens": 20})
    with graphed(long, None) as llm:
        expected = tokens_of(llm.generate(prompts, params))
    with graphed(long, recorder, backend=AnyLengthBackend) as llm:
        assert recorder.num_recorded == 4 * (1 + len(DrawKind))
        assert tokens_of(llm.generate(prompts, params)) == expected
        assert {length for _, length in decodes_of(llm).recorded} == {600}
        assert not decodes_of(llm).missing


def test_a_launch_looks_as_far_as_its_last_step(long: str, recorder: Recorder) -> None:
    with graphed(long, recorder, records_common=False, max_steps_per_launch=8) as llm:
        for num_tokens, length in ((249, 256), (250, 512)):  # and 7 more
            llm.generate(random_prompts(4, [num_tokens], VOCAB_SIZE), GREEDY.model_copy(update={"max_tokens": 8}))
            assert max(looked_at for _, looked_at in decodes_of(llm).missing) == length


def test_common_sizes_are_recorded_at_start_and_the_scratch_slot_is_for_padding(tiny: str, recorder: Recorder) -> None:
    with graphed(tiny, recorder) as llm:
        assert recorder.num_recorded == 4 * (1 + len(DrawKind))  # 1, 2, 4 and 5 rows
        core, blocks = core_of(llm), core_of(llm).cache.blocks[0]
        core.add(*(Request(str(index), [1, 2], GREEDY, 5, seed=0) for index in range(NUM_SLOTS + 2)))
        core.step()
        assert [request.slot for request in core.scheduler.running] == list(range(NUM_SLOTS))
        while core.has_work:
            core.step()
            core.check()
        assert core.cache.slots_remaining == NUM_SLOTS
        core.scheduler.reset_prefix_cache()
        assert len(blocks) == NUM_SLOTS + 1
        blocks[3:NUM_SLOTS] = 7.0  # slots that nobody takes
        blocks[NUM_SLOTS] = 0.0
        llm.generate(PROMPTS[:3], GREEDY)
        assert (blocks[3:NUM_SLOTS] == 7.0).all()
        assert blocks[NUM_SLOTS, :, :, 0].any()
        assert not blocks[NUM_SLOTS, :, :, 3:].any()  # it does not grow
        assert recorder.num_recorded == 4 * (1 + len(DrawKind))


def test_a_request_that_cannot_be_computed_ends_alone(recorded: LLM) -> None:
    saying_it = GREEDY.model_copy(update={"logit_bias": {POISON: 100.0}})
    expected = tokens_of(recorded.generate(PROMPTS[:2], GREEDY))
    with poisoned(recorded):
        first, bad, second = recorded.generate([PROMPTS[0], [104, 105], PROMPTS[1]], [GREEDY, saying_it, GREEDY])
    assert (bad.outputs[0].token_ids, bad.outputs[0].error) == ([POISON], SAID)
    assert tokens_of([first, second]) == expected
    assert_all_finite(recorded)


ALL_FILTERS = {"top_k": 7, "top_p": 0.9, "min_p": 0.01}
KINDS: dict[DrawKind, list[dict[str, Any]]] = {
    DrawKind.GREEDY: [{"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}],
    DrawKind.RANDOM: [{"temperature": 1.0}, {"temperature": 0.0, "top_p": 0.5}, {"temperature": 1e-9}],
    DrawKind.TOP: [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, ALL_FILTERS, {"temperature": 0.0}],
    DrawKind.MIN_P: [{"min_p": 0.3}, {"temperature": 2.0}],
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_sampling_graph_draws_what_the_sampler_draws(kind: DrawKind) -> None:
    rows = [row_of(make_request(SamplingParams(**each), seed=seed)) for seed in range(20) for each in KINDS[kind]]
    logits = 3.0 * torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(1))
    logits[3], logits[5, 7] = torch.nan, torch.inf
    sampling = prepare_graph_sampling(rows, 3)
    assert sampling is not None
    assert sampling.kind is kind
    table = drawing.greedy_table(3, len(rows)) if sampling.table is None else sampling.table
    sampler = Sampler(40, 1, torch.device("cpu"))
    batch = sampler.prepare(rows, 3)
    for step in range(3):
        tokens = drawing.sample_in_graph(logits.clone(), kind, table, torch.tensor([step]))
        assert tokens.tolist() == sampler.sample(logits.clone(), batch, step).tokens.tolist()
        assert tokens[[3, 5]].tolist() == [INVALID_TOKEN] * 2


def test_rows_that_want_more_than_that_need_the_sampler_as_do_those_without_their_min_tokens() -> None:
    for fields in ({"logit_bias": {1: 2.0}}, {"logprobs": 0}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}):
        rows = [row_of(make_request(params)) for params in (GREEDY, SamplingParams.model_validate(fields))]
        assert prepare_graph_sampling(rows, 1) is None
    request = make_request(SamplingParams(min_tokens=2), eos=frozenset({5}))
    is_enough = []
    for token in (1, 2, 3):
        is_enough.append(prepare_graph_sampling([row_of(request)], 1) is not None)
        request.accept([token])
    assert is_enough == [False, False, True]


def run_on_gpu(core: EngineCore, params: SamplingParams, is_checked: bool) -> list[list[int]]:
    scored = None if params.prompt_logprobs is None else ScoreTask(params.prompt_logprobs)
    requests = [Request(str(i), each, params, 12, seed=i, prompt_task=scored) for i, each in enumerate(PROMPTS)]
    core.add(*requests)
    states = [support.state_of(core, request) for request in requests]
    while core.has_work:
        core.step()
        if is_checked:
            core.check()
    return [state.token_ids for state in states]


def gpu_config(model: str, dtype: str, steps: int) -> EngineConfig:
    fields = {"model": model, "dtype": dtype, "device": "cuda", "max_batch_size": NUM_SLOTS}
    return EngineConfig.model_validate({**fields, "max_steps_per_launch": steps})


@needs_gpu
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", ["greedy", "random", "filtered", "penalised", "scored", "ends by itself"])
def test_cuda_graphs_give_the_tokens_of_single_operators(tiny: str, case: str, steps: int) -> None:
    pacings = Pacing(0, None), Pacing(1, None), Pacing(1, CudaRecorder(torch.device("cuda:0")))
    params = GREEDY.model_copy(update=CASES[case])
    config = gpu_config(tiny, "float32", steps)
    plain, *others = (
        run_on_gpu(EngineCore(config, Parts(pacing=pacing)), params, is_checked=True) for pacing in pacings
    )
    assert others == [plain, plain]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with heads of a size that every build of flash-attn has kernels for."""
    return support.make_tiny_checkpoint(tmp_path_factory.mktemp("wide"), head_dim=64)


@needs_gpu
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if case != "structured"])
def test_no_launch_waits_for_the_device(wide: str, case: str, has_graphs: bool) -> None:
    pacing = Pacing(1, CudaRecorder(torch.device("cuda:0")) if has_graphs else None)
    core = EngineCore(gpu_config(wide, "bfloat16", 2), Parts(pacing=pacing))
    params = GREEDY.model_copy(update=CASES[case])
    run_on_gpu(core, params, is_checked=False)  # libraries may wait in their first calls
    with no_waiting():
        run_on_gpu(core, params, is_checked=False)
