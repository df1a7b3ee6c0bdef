"""Steps with prompts in them from recorded graphs, against the same steps operator by operator.

As in `test_graphs`, on a CPU a graph is the work itself. The kernels of attention are flash-attn's references, which
leave what belongs to no row NaN, and compute in float32, so that results differ by rounding only.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift import LLM, SamplingParams
from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import DType
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.execution.mixed import MixedGraphs, MixedSteps, max_prompts, padded_sizes
from chairlift.engine.execution.recorded_steps import GraphParts
from chairlift.engine.execution.recorder import Replay
from chairlift.engine.execution.runner import Launch
from chairlift.engine.execution.sampling_graphs import SamplingGraphs
from chairlift.engine.parts import Pacing, Parts
from chairlift.engine.sampling import Places
from chairlift.engine.sampling.drawing import sample_in_graph
from chairlift.engine.sampling.sampler import Sampler
from chairlift.models import PiecewiseForward, load_model, open_checkpoint
from chairlift.models.attention import BatchMetadata, PaddedForward, PaddingBackend, flash
from chairlift.models.decoder import Decoder
from chairlift.params import StructuredOutputs
from chairlift.plan import ON_DEVICE, SAMPLE, RowPlan, SamplingKey, StepPlan
from tests.engine.support import GREEDY, VOCAB_SIZE, Recorder, core_of, make_tiny_checkpoint, mixed_of, tokens_of
from tests.support import flash_attn_reference
from tests.support.checkpoints import random_prompts
from tests.support.engines import HookedRunner, WrappedForward, hooked, make_core, with_attention

SLOT_LEN = 256  # also a page
NUM_SLOTS = 12
KEY = SamplingKey("", SamplingParams(), seed=0, num_prompt_tokens=0)
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 64, "max_position_embeddings": SLOT_LEN}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BACKENDS: dict[str, Callable[..., Any]] = {
    "flash_attn": flash.FlashAttnBackend,
    "flash_attn_3": flash.FlashAttn3Backend,
    "torch_varlen": flash.TorchVarlenBackend,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixed"), **SHAPE, **HEADS)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """References in float32."""
    from torch.nn.attention import varlen

    with ExitStack() as stack:
        stack.enter_context(flash_attn_reference.installed())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(flash_attn_reference, "DTYPES", {torch.float32})
        patch.setattr(varlen, "varlen_attn", flash_attn_reference.varlen_attn)
        yield


@dataclass(frozen=True)
class Step:
    """Rows of a step: decode rows have one token, and come first."""

    slots: Sequence[int]
    num_new: Sequence[int]
    num_cached: Sequence[int]
    num_decode: int
    input_ids: Sequence[int]

    @classmethod
    def drawn(cls, rng: random.Random, max_decode: int, max_prompts: int, longest: int) -> "Step":
        """Chooses one at random, where half of the decode rows have their tokens on the device."""
        num_decode, num_prompts = rng.randint(0, max_decode), rng.randint(1, max_prompts)
        num_new = [1] * num_decode + [rng.randint(1, longest) for _ in range(num_prompts)]
        num_cached = [rng.randint(1, 200) for _ in range(num_decode)]
        num_cached += [rng.choice([0, 0, 5, 100, 200]) for _ in range(num_prompts)]
        ids = [rng.choice([ON_DEVICE, rng.randrange(VOCAB_SIZE)]) for _ in range(num_decode)]
        ids += [rng.randrange(VOCAB_SIZE) for _ in range(sum(num_new) - num_decode)]
        return cls(rng.sample(range(NUM_SLOTS), len(num_new)), num_new, num_cached, num_decode, ids)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)

    @property
    def fits(self) -> bool:
        """Says whether its rows fit into slots, and its tokens into a step of 512."""
        ends = (sum(row) for row in zip(self.num_cached, self.num_new, strict=True))
        return self.num_tokens <= 512 and all(end <= SLOT_LEN for end in ends)

    @property
    def plan(self) -> StepPlan:
        offsets = [0, *accumulate(self.num_new)]
        ids = [self.input_ids[start:stop] for start, stop in pairwise(offsets)]
        given = zip(self.slots, self.num_cached, ids, strict=True)
        return StepPlan(
            tuple(RowPlan(KEY, slot, start, own, 0, SAMPLE) for slot, start, own in given), self.num_decode, 1
        )


@dataclass
class Bench:
    """A model over slots that hold random keys and values, without an engine."""

    model: Decoder
    attention: PaddingBackend
    max_num_tokens: int
    recorder: Any = field(default_factory=Recorder)
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.forward = PiecewiseForward(self.model, self.attention)
        config = self.model.config
        heads = config.attention_blocks[0]
        shape = (NUM_SLOTS + 1, 2, config.num_layers, SLOT_LEN, heads.num_kv_heads, heads.head_dim)
        self.known = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(self.device, self.model.dtype)
        self.blocks = self.known.clone()
        self.last_tokens = LastTokens(NUM_SLOTS + 1, self.device)
        slots = torch.arange(NUM_SLOTS, dtype=torch.int32, device=self.device)
        self.last_tokens.note(slots, slots.long() + 7)
        sampling = SamplingGraphs(
            self.forward,
            self.last_tokens,
            self.recorder,
            sample_in_graph,
            vocab_size=VOCAB_SIZE,
            max_steps=1,
            scratch=NUM_SLOTS,
            device=self.device,
        )
        self.graphs = MixedGraphs(
            GraphParts(self.forward, self.blocks, self.last_tokens, self.recorder, sampling, self.max_num_tokens)
        )
        self.graphs.record_common()

    def run(self, plan: StepPlan) -> MixedSteps | None:
        """Replays a plan; None if no graph suffices."""
        steps = self.graphs.load(plan, Places.of(plan))
        if steps is not None:
            steps.compute()
        return steps

    def replay(self, step: Step) -> torch.Tensor | None:
        """The hidden states by a graph, after which `blocks` hold the step's keys and values."""
        self.blocks.copy_(self.known)
        replayed = self.run(step.plan)
        return None if replayed is None else replayed.hidden

    def compute(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states operator by operator, and what the blocks hold then."""
        blocks, offsets = self.known.clone(), [0, *accumulate(step.num_new)]
        rows = zip(step.num_cached, step.num_new, strict=True)
        slots = torch.tensor(step.slots, dtype=torch.int32, device=self.device)
        batch = BatchMetadata(
            row_offsets=torch.tensor(offsets, dtype=torch.int32, device=self.device),
            positions=torch.cat([torch.arange(start, start + count) for start, count in rows]).to(self.device),
            slots=tuple(step.slots),
            num_new_tokens=tuple(step.num_new),
            num_cached_tokens=tuple(step.num_cached),
            num_decode_rows=step.num_decode,
        )
        cache = ContinuousBatchingKVCacheCollection(
            blocks=blocks,
            cache_lengths=torch.tensor(step.num_cached, dtype=torch.int32, device=self.device),
            lookup_table=slots,
            is_cache_empty=False,
            max_seq_length=max(step.num_new),
            max_cache_length=max(map(sum, zip(step.num_cached, step.num_new, strict=True))),
        )
        token_slots = slots.repeat_interleave(torch.tensor(step.num_new, device=self.device))
        ids = self.last_tokens.fill_in(torch.tensor(step.input_ids, device=self.device), token_slots)
        return self.forward.hidden(batch, ids, cache), blocks


def bench_of(model: str, backend: str, max_num_tokens: int, **changes: Any) -> Bench:
    decoder = load_model(open_checkpoint(model), DType.FLOAT32, "cpu", SLOT_LEN, SLOT_LEN)
    return Bench(decoder, BACKENDS[backend](decoder.config.attention), max_num_tokens, **changes)


def assert_replayed_like_computed(bench: Bench, step: Step) -> None:
    replayed = bench.replay(step)
    expected, blocks = bench.compute(step)
    assert replayed is not None
    torch.testing.assert_close(replayed, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(bench.blocks[:-1], blocks[:-1], rtol=0, atol=2e-6)
    assert bench.blocks.isfinite().all()


@pytest.mark.parametrize(
    ("backend", "num_steps"),
    [
        ("flash_attn", 100),
        ("flash_attn_3", 30),
        ("torch_varlen", 30),
        pytest.param("flash_attn", 840, marks=pytest.mark.slow),  # a thousand together
    ],
)
def test_random_steps_equal_those_operator_by_operator(model: str, backend: str, num_steps: int) -> None:
    rng, bench = random.Random(num_steps), bench_of(model, backend, 128)
    assert bench.graphs.graphs.recorded == {(64, 0), (64, 12), (128, 0), (128, 12)}
    with torch.inference_mode():
        for _ in range(num_steps):
            assert_replayed_like_computed(bench, Step.drawn(rng, 7, 5, 25))


def test_steps_of_hundreds_of_tokens_equal_them_too(model: str) -> None:
    rng, bench = random.Random(8), bench_of(model, "flash_attn", 512)
    steps = [step for step in (Step.drawn(rng, 7, 5, 200) for _ in range(200)) if step.fits and step.num_tokens >= 256]
    assert len(steps) == 46
    assert (min(step.num_tokens for step in steps), max(step.num_tokens for step in steps)) == (260, 505)
    with torch.inference_mode():
        for step in steps:
            assert_replayed_like_computed(bench, step)


def test_a_step_may_fill_a_graph_to_the_last_token_row_and_prompt(model: str) -> None:
    bench = bench_of(model, "flash_attn", 64)
    slots = range(NUM_SLOTS)
    full = Step(slots, [1] * 4 + [7] * 4 + [8] * 4, [9] * 12, 4, [5] * 64)
    alone = Step(slots, [1] * 11 + [53], [9] * 12, 11, [5] * 64)
    for step in (full, alone, Step([3], [64], [0], 0, [5] * 64), Step([0], [64], [SLOT_LEN - 64], 0, [5] * 64)):
        replayed = bench.replay(step)
        assert replayed is not None
        torch.testing.assert_close(replayed, bench.compute(step)[0], rtol=0, atol=2e-6)


def test_what_no_graph_suffices_for_is_left_to_operators(model: str) -> None:
    bench = bench_of(model, "flash_attn", 64)
    assert bench.replay(Step([0], [65], [0], 0, [5] * 65)) is None
    step = Step([0, 1], [1, 3], [4, 4], 1, [5] * 4)
    plan = step.plan
    guessing = StepPlan((plan.rows[0], RowPlan(KEY, 1, 4, [5, 6], 0, SAMPLE, guess=[6])), 1, 1)
    assert bench.run(guessing) is None
    assert bench.replay(step) is not None


def test_sizes_are_few_and_what_is_added_fits_into_a_slot() -> None:
    assert padded_sizes(8192, 4096) == [64, 128, 256, 384, 512, 768, 1024, 1536, 2048]
    assert padded_sizes(1000, 4096) == [64, 128, 256, 384, 512, 768, 1000]
    assert padded_sizes(48, 4096) == [48]
    assert padded_sizes(8192, 256) == [64, 128, 256, 384, 512, 768, 1024]
    assert padded_sizes(8192, 40) == [40, 64]
    assert padded_sizes(8192, 24) == [24]


def test_small_graphs_have_more_prompts_than_large_ones() -> None:
    assert [max_prompts(size) for size in (64, 512, 768, 1024, 2048)] == [32, 32, 21, 16, 8]


class CountOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Silent(Recorder):
    """Replays nothing, as a GPU does the work of a graph."""

    def record(self, work: Callable[[], None]) -> Replay:
        super().record(work)
        return lambda: None


def test_the_host_launches_few_operators_for_a_step_of_any_number_of_rows_and_layers(model: str) -> None:
    bench = bench_of(model, "flash_attn", 64, recorder=Silent())
    counts = []
    for step in (Step([0], [5], [0], 0, [5] * 5), Step(range(9), [1] * 7 + [20, 20], [9] * 9, 7, [5] * 47)):
        with CountOperators() as watch, torch.inference_mode():
            assert bench.run(step.plan) is not None
        counts.append(watch.count)
    assert counts[0] == counts[1] <= 20


def first_tokens(logits: torch.Tensor, *_: object) -> torch.Tensor:
    """Stands in for the kernel that samples all rows at once."""
    return torch.zeros(len(logits), dtype=torch.int64)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"logit_bias": {3: 4.0, 9: -100.0}, "temperature": 1.0},
    {"bad_words": ["the", "a"], "temperature": 1.0},
    {"structured_outputs": StructuredOutputs(regex="[a-z]{4}[0-9]+"), "ignore_eos": False},
    {"max_tokens": 0, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_launches_few_operators_for_a_whole_launch_with_prompts(model: str, kind: dict[str, Any]) -> None:
    most = 80 if "prompt_logprobs" in kind else 40  # all scores of prompts, one after the other
    counts: list[int] = []

    def count(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        with CountOperators() as watch:
            begun = launch(plan)
        if not plan.is_decode:
            counts.append(watch.count)
        return begun

    with engine(model, Silent(), never_eager, kernels=first_tokens) as llm, hooked(llm, count):
        llm.generate(MANY, GREEDY.model_copy(update=kind))
    assert len(counts) > 5
    assert max(counts) <= most


SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", "num_threads": 1}
MANY = random_prompts(2, [3, 47, 60, 1, 58, 2, 20, 33, 9, 15], VOCAB_SIZE)
SHARED = random_prompts(3, [70], VOCAB_SIZE)[0]


def engine(
    model: str, recorder: Recorder | None, load: Any = None, budget: int = 48, kernels: Any = None, **config: Any
) -> LLM:
    """Five slots, one launch ahead; prompts come in chunks of what the budget leaves."""
    parts = Parts(
        make_sampler=partial(Sampler, kernels=kernels),
        load_forward=load or with_attention(lambda model: flash.FlashAttnBackend(model.attention)),
        make_runner=HookedRunner,
        pacing=Pacing(1, recorder, records_common=False),
    )
    sizes: dict[str, Any] = {"max_batch_size": 5, "max_num_batched_tokens": budget, "max_steps_per_launch": 2}
    return LLM.of(make_core(model, parts, **{**SETTINGS, **sizes, **config}))


def test_an_engine_gives_the_tokens_that_it_gives_without_graphs_whatever_is_asked_for(model: str) -> None:
    prompts = [*MANY, *([*SHARED[:count], count] for count in (20, 70, 45, 64))]
    rng = random.Random(4)
    params = [
        GREEDY.model_copy(update={"max_tokens": rng.randint(1, 20), "seed": index, **KINDS[index % len(KINDS)]})
        for index in range(len(prompts))
    ]
    recorder = Recorder()
    with engine(model, None) as plain, engine(model, recorder) as graphed:
        expected, outputs = (llm.generate(prompts, params) for llm in (plain, graphed))
        core = core_of(graphed)
        core.check()
        mixed = mixed_of(graphed)
        assert mixed is not None
        assert mixed.graphs.recorded == {(48, 0), (48, 5)}
    assert tokens_of(outputs) == tokens_of(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert scores_of(ours) == pytest.approx(scores_of(theirs), abs=1e-4)


def scores_of(output: Any) -> list[float]:
    positions = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return [entry.logprob for position in positions if position for _, entry in sorted(position.items())]


class NeverEager(WrappedForward):
    """A padded forward whose steps with prompts must all come from graphs."""

    can_pad = True

    def __init__(self, forward: PaddedForward) -> None:
        super().__init__(forward)
        self.new_hidden, self.padded_hidden = forward.new_hidden, forward.padded_hidden

    def hidden(self, batch: BatchMetadata, *rest: Any) -> torch.Tensor:
        assert batch.is_decode, "a step with prompts ran operator by operator"
        return super().hidden(batch, *rest)


def never_eager(*given: Any) -> NeverEager:
    forward = with_attention(lambda model: flash.FlashAttnBackend(model.attention))(*given)
    assert isinstance(forward, PaddedForward)
    return NeverEager(forward)


def test_all_steps_with_prompts_are_replayed(model: str) -> None:
    with engine(model, Recorder(), never_eager) as llm:
        outputs = llm.generate(MANY, GREEDY)
        assert [len(tokens) for tokens in tokens_of(outputs)] == [12] * len(MANY)
        replayed = [each.embedding for each in llm.embed(MANY)]
    with engine(model, None) as llm:
        for expected, found in zip(llm.embed(MANY), replayed, strict=True):
            assert found == pytest.approx(expected.embedding, abs=1e-4)


class Exhaustible(Recorder):
    """Has memory for so many graphs."""

    room = 1000

    def record(self, work: Callable[[], None]) -> Replay:
        if self.num_recorded >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(work)


def test_a_rare_size_is_padded_more_until_there_is_no_work_and_recorded_then(model: str) -> None:
    with engine(model, Recorder(), never_eager, budget=128) as llm:
        core = core_of(llm)
        mixed = mixed_of(llm)
        assert mixed is not None
        assert mixed.graphs.recorded == {(128, 0), (128, 5)}
        llm.generate([[7] * 30], GREEDY.model_copy(update={"max_tokens": 1}))
        assert mixed.graphs.missing == [(64, 0)]
        assert mixed.graphs.recorded == {(128, 0), (128, 5)}
        core.use_idle_time()
        assert mixed.graphs.recorded == {(64, 0), (128, 0), (128, 5)}


def test_graphs_without_memory_are_done_without(model: str, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Exhaustible()
    with engine(model, recorder) as llm:
        num_decode = recorder.num_recorded - 2
        expected = tokens_of(llm.generate(MANY, GREEDY))
    recorder.num_recorded, recorder.room = 0, num_decode
    with engine(model, recorder) as llm:
        assert "no memory left for a graph of 48 tokens" in caplog.text
        assert tokens_of(llm.generate(MANY, GREEDY)) == expected
        mixed = mixed_of(llm)
        assert mixed is not None
        assert (mixed.graphs.recorded, mixed.graphs.missing) == (set(), [(48, 0)])  # the larger was tried at start
        while core_of(llm).use_idle_time():
            pass
        assert mixed.graphs.missing == []


def test_it_is_said_once_that_only_decode_steps_are_recorded(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="chairlift.engine.executor")

    def load(*given: Any) -> WrappedForward:
        return WrappedForward(never_eager(*given)._forward)

    with engine(model, Recorder(), load) as llm:
        assert mixed_of(llm) is None
        llm.generate(MANY[:3], GREEDY)
    assert caplog.text.count("only decode steps are recorded") == 1
