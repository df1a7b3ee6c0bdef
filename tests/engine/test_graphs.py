"""Decode steps from recorded graphs, against the same steps operator by operator.

On a CPU a graph is the work itself: to record is to remember it (and to run it, as libraries are warmed up), to replay
is to run it again. What is special about graphs is all there: fixed places and sizes, padding, a step that follows from
the one before.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams, models
from chairlift.engine import core as core_module
from chairlift.engine.core import EngineCore, Pacing
from chairlift.engine.execution import graphs as graphs_module
from chairlift.engine.execution.graphs import CudaRecorder, DecodeGraphs, Replay, batch_sizes
from chairlift.engine.sampling.drawing import (
    INVALID_TOKEN,
    DrawKind,
    greedy_table,
    prepare_graph_sampling,
    sample_in_graph,
)
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import ModelShape
from chairlift.scheduler import Request
from tests.engine.support import (
    ENGINE,
    GREEDY,
    PROMPTS,
    VOCAB_SIZE,
    Recorder,
    core_of,
    make_request,
    make_tiny_checkpoint,
    state_of,
    tokens_of,
)
from tests.engine.test_overlap import CASES
from tests.engine.test_poison import POISON, SAID, assert_all_finite, poisoned
from tests.support.checkpoints import random_prompts
from tests.support.gpu import needs_gpu

NUM_SLOTS = 5


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records the graphs of engines that `make` makes, whose attention looks at nothing but tensors."""

    def load_copying(_: object, model: ModelShape, *__: object) -> TorchBackend:
        return TorchBackend(model.attention, is_in_place=False)

    monkeypatch.setattr(models, "load_backend", load_copying)
    return Recorder()


@pytest.fixture
def make(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make_with(recorder: Recorder | None, num_ahead: int = 0, **config: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr(core_module.Pacing, "of", lambda _: Pacing(num_ahead, recorder))
            settings = {"model": tiny, "max_batch_size": NUM_SLOTS, "attention_backend": "torch", **ENGINE}
            return LLM(**{**settings, **config})

    return make_with


@pytest.fixture
def all_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """At start only the graphs of the largest batch are recorded."""
    monkeypatch.setattr(graphs_module, "_COMMON_SIZES", frozenset())


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (40, [1, 2, 4, 8, 16, 24, 32, 40]),
    ],
)
def test_batches_are_padded_to_one_of_a_few_sizes(max_batch_size: int, sizes: list[int]) -> None:
    assert batch_sizes(max_batch_size) == sizes


@pytest.fixture(scope="module")
def plain(tiny: str) -> Iterator[LLM]:
    """An engine without graphs."""
    with LLM(tiny, max_batch_size=NUM_SLOTS, attention_backend="torch", enable_prefix_caching=False, **ENGINE) as llm:
        yield llm


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_graphs(
    plain: LLM, make: Callable[..., LLM], recorder: Recorder, case: str, steps: int, num_ahead: int
) -> None:
    params = GREEDY.model_copy(update=CASES[case])
    expected = plain.generate(PROMPTS, params)
    with make(recorder, num_ahead, max_steps_per_launch=steps) as llm:
        outputs = llm.generate(PROMPTS, params)
        core_of(llm).check()
        assert core_of(llm).cache.slots_remaining == NUM_SLOTS
    assert tokens_of(outputs) == tokens_of(expected)
    scores = [value for output in outputs for value in scores_of(output.outputs[0].logprobs)]
    assert scores == pytest.approx(
        [value for output in expected for value in scores_of(output.outputs[0].logprobs)], abs=1e-5
    )


def scores_of(logprobs: Sequence[dict[int, Any]] | None) -> list[float]:
    return [entry.logprob for position in logprobs or [] for _, entry in sorted(position.items())]


@pytest.mark.usefixtures("all_lazy")
@pytest.mark.parametrize("steps", [1, 4])
def test_kinds_of_requests_side_by_side_come_and_go(
    plain: LLM, make: Callable[..., LLM], recorder: Recorder, steps: int
) -> None:
    params = [
        GREEDY.model_copy(update={**CASES[case], "max_tokens": 3 + 4 * index})
        for index, case in enumerate(("greedy", "random", "filtered", "greedy", "ends by itself", "random", "scored"))
    ]
    prompts = PROMPTS[: len(params)]
    expected = tokens_of(plain.generate(prompts, params))
    with make(recorder, 1, max_steps_per_launch=steps) as llm:
        assert tokens_of(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize(("logprobs", "num_replayed"), [(None, 1 + 2 * 8), (1, 8)])
def test_a_decode_step_replays_a_forward_graph_and_one_that_samples_if_that_has_all_that_is_wanted(
    make: Callable[..., LLM], recorder: Recorder, logprobs: int | None, num_replayed: int
) -> None:
    """The first token is the prompt's, whose logits no graph computes."""
    params = GREEDY.model_copy(update={"max_tokens": 9})
    with make(recorder, max_steps_per_launch=4) as llm:
        llm.generate([PROMPTS[0]] * 2, [params, params.model_copy(update={"logprobs": logprobs})])
    assert recorder.num_replayed == num_replayed


@pytest.mark.usefixtures("all_lazy")
def test_rare_sizes_are_padded_to_recorded_ones_until_there_is_no_work_and_recorded_then(
    make: Callable[..., LLM], recorder: Recorder
) -> None:
    drawing = GREEDY.model_copy(update={"temperature": 1.0, "seed": 1})
    with make(recorder) as llm:
        core, at_start = core_of(llm), recorder.num_recorded
        assert at_start == 1 + len(DrawKind)  # one length, all kinds of sampling, the largest batch
        for params in (GREEDY, GREEDY, drawing):
            llm.generate(PROMPTS[:2], params)
        assert recorder.num_recorded == at_start
        assert [core.rest() for _ in range(4)] == [True, True, False, False]  # one at a time, for who comes meanwhile
        assert recorder.num_recorded == at_start + 3
        graphs = graphs_of(llm)
        assert graphs.forwards.recorded == {(2, 256), (NUM_SLOTS, 256)}
        assert {kind for size, kind in graphs.samplings.recorded if size == 2} == {DrawKind.GREEDY, DrawKind.RANDOM}
        llm.generate(PROMPTS[:2], GREEDY)
        assert not core.rest()


@pytest.mark.usefixtures("all_lazy")
def test_nothing_is_recorded_while_requests_wait_or_run(make: Callable[..., LLM], recorder: Recorder) -> None:
    with make(recorder) as llm:
        core, at_start = core_of(llm), recorder.num_recorded
        core.add(Request("a", [1, 2], GREEDY, 5, seed=0))
        while core.has_work:
            core.step()
            assert not (core.has_work and core.rest())
        assert recorder.num_recorded == at_start
        core.rest()
        assert recorder.num_recorded == at_start + 1


def run_out(_: object) -> Replay:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.usefixtures("all_lazy")
def test_a_graph_that_does_not_fit_while_nothing_is_asked_for_is_done_without(
    make: Callable[..., LLM], recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make(recorder) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:2], GREEDY))
        monkeypatch.setattr(recorder, "record", run_out)
        assert [core_of(llm).rest() for _ in range(2)] == [True, False]
        assert "no memory left for a graph of 2 rows" in caplog.text
        assert tokens_of(llm.generate(PROMPTS[:2], GREEDY)) == expected


def graphs_of(llm: LLM) -> DecodeGraphs:
    graphs = core_of(llm)._runner._graphs
    assert graphs is not None
    return graphs


def test_common_sizes_are_recorded_at_start(make: Callable[..., LLM], recorder: Recorder) -> None:
    with make(recorder) as llm:
        at_start = recorder.num_recorded
        assert at_start == 4 * (1 + len(DrawKind))  # 1, 2, 4 and 5 rows
        llm.generate(PROMPTS, GREEDY)
        assert recorder.num_recorded == at_start


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 600 positions."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=600)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_row_that_grows_goes_on_with_graphs_that_look_further(
    long: str, make: Callable[..., LLM], recorder: Recorder, steps: int
) -> None:
    prompts = random_prompts(4, [249, 3, 507, 1], VOCAB_SIZE)
    params = GREEDY.model_copy(update={"max_tokens": 20})
    config = {"model": long, "max_steps_per_launch": steps}
    with make(None, **config) as llm:
        expected = tokens_of(llm.generate(prompts, params))
    with make(recorder, **config) as llm:
        assert tokens_of(llm.generate(prompts, params)) == expected
        assert {length for _, length in graphs_of(llm).forwards.recorded} == {256, 512, 600}


@pytest.mark.usefixtures("all_lazy")
def test_a_launch_of_several_steps_looks_as_far_as_its_last_one_must(
    long: str, make: Callable[..., LLM], recorder: Recorder
) -> None:
    with make(recorder, model=long, max_steps_per_launch=8) as llm:
        for num_tokens, length in ((249, 256), (250, 512)):  # and 7 more
            llm.generate(random_prompts(4, [num_tokens], VOCAB_SIZE), GREEDY.model_copy(update={"max_tokens": 8}))
            assert max(looked_at for _, looked_at in graphs_of(llm).forwards.missing) == length


def test_padding_touches_nothing_but_the_scratch_slot(make: Callable[..., LLM], recorder: Recorder) -> None:
    with make(recorder) as llm:
        blocks = core_of(llm).cache.blocks[0]
        assert len(blocks) == NUM_SLOTS + 1
        blocks[3:NUM_SLOTS] = 7.0  # slots that nobody takes
        llm.generate(PROMPTS[:3], GREEDY)
        assert (blocks[3:NUM_SLOTS] == 7.0).all()
        assert blocks[NUM_SLOTS, :, :, 0].any()
        assert not blocks[NUM_SLOTS, :, :, 3:].any()  # it does not grow


def test_the_scratch_slot_is_never_handed_out(make: Callable[..., LLM], recorder: Recorder) -> None:
    with make(recorder) as llm:
        core = core_of(llm)
        requests = [Request(str(index), [1, 2], GREEDY, 5, seed=0) for index in range(NUM_SLOTS + 2)]
        core.add(*requests)
        core.step()
        assert [request.slot for request in core._scheduler.running] == list(range(NUM_SLOTS))
        while core.has_work:
            core.step()
            core.check()
        assert core.cache.slots_remaining == NUM_SLOTS


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_request_that_cannot_be_computed_ends_alone(
    make: Callable[..., LLM], recorder: Recorder, steps: int, num_ahead: int
) -> None:
    saying_it = GREEDY.model_copy(update={"logit_bias": {POISON: 100.0}})
    with make(recorder, num_ahead, max_steps_per_launch=steps) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:2], GREEDY))
        with poisoned(llm):
            first, bad, second = llm.generate([PROMPTS[0], [104, 105], PROMPTS[1]], [GREEDY, saying_it, GREEDY])
        assert (bad.outputs[0].token_ids, bad.outputs[0].error) == ([POISON], SAID)
        assert tokens_of([first, second]) == expected
        assert_all_finite(llm)


def test_graphs_that_do_not_fit_are_refused_with_what_to_lower(
    make: Callable[..., LLM], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "record", run_out)
    with pytest.raises(ConfigurationError, match="no memory left for CUDA graphs; lower kv_cache_memory_bytes"):
        make(recorder)


# --- sampling in tensors of fixed size


KINDS: dict[str, tuple[DrawKind, list[dict[str, Any]]]] = {
    "greedy": (DrawKind.GREEDY, [{"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}]),
    "random": (DrawKind.RANDOM, [{"temperature": 1.0}, {"temperature": 0.0, "top_p": 0.5}, {"temperature": 1e-9}]),
    "filtered": (
        DrawKind.TOP,
        [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 7, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}],
    ),
    "min_p alone": (DrawKind.MIN_P, [{"min_p": 0.3}, {"temperature": 2.0}]),
}


@pytest.mark.parametrize(("kind", "fields"), KINDS.values(), ids=KINDS.keys())
def test_a_sampling_graph_draws_what_the_sampler_draws(kind: DrawKind, fields: list[dict[str, Any]]) -> None:
    requests = [make_request(SamplingParams(**each), seed=seed) for seed in range(20) for each in fields]
    logits = 3.0 * torch.randn(len(requests), 40, generator=torch.Generator().manual_seed(1))
    logits[3] = torch.nan
    logits[5, 7] = torch.inf
    sampling = prepare_graph_sampling(requests, 3)
    assert sampling is not None
    assert sampling.kind is kind
    table = greedy_table(3, len(requests)) if sampling.table is None else sampling.table
    sampler = Sampler(40, 1, torch.device("cpu"))
    batch = sampler.prepare(requests, 3)
    for step in range(3):
        tokens = sample_in_graph(logits.clone(), kind, table, torch.tensor([step]))
        assert tokens.tolist() == sampler.sample(logits.clone(), batch, step).tokens.tolist()
        assert tokens[[3, 5]].tolist() == [INVALID_TOKEN] * 2


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {1: 2.0}}, {"logprobs": 0}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}]
)
def test_rows_that_want_more_than_that_need_the_sampler(fields: dict[str, Any]) -> None:
    requests = [make_request(GREEDY), make_request(SamplingParams(**fields))]
    assert prepare_graph_sampling(requests, 1) is None


def test_a_graph_is_enough_for_a_row_once_it_has_its_min_tokens() -> None:
    request = make_request(SamplingParams(min_tokens=2), eos=frozenset({5}))
    is_enough = []
    for token in (1, 2, 3):
        is_enough.append(prepare_graph_sampling([request], 1) is not None)
        request.accept([token])
    assert is_enough == [False, False, True]


# --- on a GPU


@needs_gpu
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", ["greedy", "random", "filtered", "penalised", "scored", "ends by itself"])
def test_cuda_graphs_give_the_tokens_of_single_operators(tiny: str, case: str, steps: int) -> None:
    config = EngineConfig(
        model=tiny, device="cuda", dtype="float32", max_batch_size=NUM_SLOTS, max_steps_per_launch=steps
    )
    params = GREEDY.model_copy(update=CASES[case])

    def tokens(pacing: Pacing) -> list[list[int]]:
        core = EngineCore(config, pacing)
        requests = [Request(str(index), prompt, params, 12, seed=index) for index, prompt in enumerate(PROMPTS)]
        core.add(*requests)
        states = [state_of(core, request) for request in requests]
        while core.has_work:
            core.step()
            core.check()
        return [state.token_ids for state in states]

    plain = tokens(Pacing(0, None))
    assert tokens(Pacing(1, None)) == plain
    assert tokens(Pacing(1, CudaRecorder(torch.device("cuda:0")))) == plain


@needs_gpu
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if case != "structured"])
def test_no_launch_waits_for_the_device(tiny: str, case: str, has_graphs: bool) -> None:
    device = torch.device("cuda:0")
    core = EngineCore(
        EngineConfig(model=tiny, device="cuda", dtype="bfloat16", max_batch_size=NUM_SLOTS, max_steps_per_launch=2),
        Pacing(1, CudaRecorder(device) if has_graphs else None),
    )
    params = GREEDY.model_copy(update=CASES[case])

    def run() -> None:
        for index, prompt in enumerate(PROMPTS):
            core.add(Request(str(index), prompt, params, 12, seed=index, prompt_logprobs=params.prompt_logprobs))
        while core.has_work:
            core.step()

    run()  # libraries may wait in their first calls
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
