"""Holds what the tests of the engine share: a tiny model, requests and events in one line."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from chairlift.config import AttentionBackend, DType, ResolvedConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.mixed import MixedGraphs
from chairlift.engine.execution.recorder import Replay
from chairlift.engine.parts import Parts
from chairlift.engine.sampling.masks import TokenGrammar
from chairlift.engine.text.grammar import GrammarCompiler
from chairlift.params import FinishReason, RequestOutput, StructuredOutputs
from chairlift.plan import RowPlan
from chairlift.scheduler import Request, RequestState, TokenEvent
from chairlift.scheduler.next_step import decode_row
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.engines import HOOKED, make_core
from tests.support.engines import core_of as core_of

VOCAB_SIZE = 259  # of the byte tokenizer: 256 bytes, then <|endoftext|>, <|im_start|>, <|im_end|>
END_TOKEN = 258

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TINY: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": END_TOKEN, **SIZES, **HEADS}
# One thread: at this size a second one only waits for the first.
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def make_tiny_checkpoint(directory: Path, **shape: Any) -> str:
    """A model of a few thousand weights that answers at once, and its path."""
    make_checkpoint(directory, seed=3, **{**TINY, **shape})
    make_byte_tokenizer(directory)
    return str(directory)


class Recorder:
    """Stands for what records graphs: remembers work, and runs it now as libraries are warmed up."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, work: Callable[[], None]) -> Replay:
        self.num_recorded += 1
        for _ in range(3):
            work()

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


def mixed_of(llm: LLM) -> MixedGraphs | None:
    """Returns the recordings of an engine's steps with prompts; None if there are none."""
    recordings = core_of(llm).executor.recordings
    return None if recordings is None else recordings.find(MixedGraphs)


PROMPTS = random_prompts(1, [3, 17, 1, 40, 8, 2, 25, 11], VOCAB_SIZE)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NUM_SLOTS = 3
# Who is in the batch with whom differs, so log-probabilities are only equal if that leaves no trace.
TRACELESS: dict[str, Any] = {"max_num_batched_tokens": 16, "batch_invariant": True}


def make_llm(model: str, parts: Parts = HOOKED, **config: Any) -> LLM:
    """Three slots, up to four steps a launch."""
    sizes = {"max_batch_size": NUM_SLOTS, "max_steps_per_launch": 4}
    return LLM.of(make_core(model, parts, **{**sizes, **ENGINE, **config}))


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, all slots are free, and the engine still serves."""
    core = core_of(llm)
    core.check()
    assert not core.has_work
    assert core.cache.slots_remaining == NUM_SLOTS
    assert len(llm.generate("still there?", GREEDY)[0].outputs[0].token_ids) == 12
    core.check()


def answers(outputs: Iterable[RequestOutput]) -> list[Any]:
    """All that was asked for, bit for bit."""
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The tokens of all choices of all outputs."""
    return [choice.token_ids for output in outputs for choice in output.outputs]


def make_request(
    params: SamplingParams,
    slot: int | None = None,
    prompt: list[int] | None = None,
    seed: int = 0,
    eos: frozenset[int] = frozenset(),
    **more: Any,
) -> RequestState:
    """A request that has started."""
    request = Request("r-0", prompt or [1], params, max_tokens=10_000, seed=seed, eos_token_ids=eos, **more)
    state = RequestState(request, arrival_time=0.0)
    state.start(0.0)
    state.slot = slot
    return state


def row_of(request: RequestState) -> RowPlan:
    """The row of a request that decodes next, in slot 0 if it has none."""
    request.slot = request.slot or 0
    return decode_row(request)


def state_of(core: EngineCore, request: Request) -> RequestState:
    """Returns how far a request has come that waits or runs."""
    state = core.scheduler.find(request.request_id)
    assert state is not None, f"{request.request_id} is not here"
    return state


def new_grammar(compiler: GrammarCompiler, outputs: StructuredOutputs) -> TokenGrammar:
    """Compiles it and waits."""
    grammar = compiler.starter(compiler.compile(outputs).result())()
    assert isinstance(grammar, TokenGrammar)
    return grammar


def event(name: str, token_ids: list[int], finish: FinishReason | None = None, stop: int | None = None) -> TokenEvent:
    return TokenEvent(name, token_ids, finish, stop, has_end_token=finish is FinishReason.STOP)


def resolved_config(model: Path | str, **changes: Any) -> ResolvedConfig:
    """Slots of 64 tokens on the CPU."""
    sizes = {"max_batch_size": 4, "max_seq_len": 64, "max_num_batched_tokens": 64, "max_steps_per_launch": 1}
    memory: dict[str, Any] = {**sizes, "kv_cache_memory_bytes": 2**20, "state_snapshot_bytes": 0}
    kinds = {"device": "cpu", "dtype": DType.FLOAT32, "attention_backend": AttentionBackend.TORCH}
    return ResolvedConfig(model=str(model), **{**memory, **kinds, **changes})
