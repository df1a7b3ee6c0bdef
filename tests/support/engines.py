"""Engines whose parts a test chooses, and their insides."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from chairlift import LLM, AsyncLLM, EngineConfig
from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import ResolvedConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.runner import Launch, ModelRunner
from chairlift.engine.parts import Pacing, Parts
from chairlift.engine.sampling.compiled_grammar import PARSER_LIMITS, GrammarLimits
from chairlift.engine.text.grammar import CompilerLimits, GrammarCompiler
from chairlift.engine.thread import LocalEngine
from chairlift.models import Checkpoint, PiecewiseForward, load_model
from chairlift.models.attention import Backend, BatchMetadata, Forward
from chairlift.models.config import ModelShape
from chairlift.models.forward import Drive
from chairlift.plan import StepPlan

Hook = Callable[[Callable[[StepPlan], Launch], StepPlan], Launch]
"""Is called in the place of `ModelRunner.launch`, with it and a plan."""


class HookedRunner(ModelRunner):
    """Launches by way of a hook while there is one."""

    hook: Hook | None = None

    def launch(self, plan: StepPlan) -> Launch:
        launch = super().launch
        return launch(plan) if self.hook is None else self.hook(launch, plan)


class WrappedForward:
    """Runs a model as another forward does; subclasses do something besides. See `Forward`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        return self._forward.hidden(batch, input_ids, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._forward.logits(hidden)


HOOKED = Parts(make_runner=HookedRunner)
"""The parts of engines for tests: the real ones, whose launches can be hooked."""


def ahead(num_launches: int) -> Parts:
    """Makes engines begin so many launches before they take the tokens of the first."""
    return replace(HOOKED, pacing=Pacing(num_launches))


def make_core(model: str, parts: Parts = HOOKED, **config: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=model, **config), parts)


def core_of(llm: LLM | AsyncLLM) -> EngineCore:
    """Returns the core of an engine that is not closed. Tests reach it in no other way."""
    core = llm._core if isinstance(llm, LLM) else thread_of(llm).core
    assert core is not None, "it is closed"
    return core


def thread_of(llm: AsyncLLM) -> LocalEngine:
    assert isinstance(llm._engine, LocalEngine)
    return llm._engine


@contextmanager
def hooked(engine: EngineCore | LLM | AsyncLLM, hook: Hook) -> Iterator[None]:
    """Launches go by way of the hook."""
    core = engine if isinstance(engine, EngineCore) else core_of(engine)
    runner = core.executor.runner
    assert isinstance(runner, HookedRunner)
    runner.hook = hook
    try:
        yield
    finally:
        runner.hook = None


def with_attention(
    make: Callable[[ModelShape], Backend], drive: Drive | None = None
) -> Callable[[Checkpoint, ResolvedConfig], Forward]:
    """Loads models in torch with that attention; see `Parts.load_forward`. `drive`: see `TorchForward`."""

    def load(checkpoint: Checkpoint, config: ResolvedConfig) -> Forward:
        lengths = config.max_seq_len, config.slot_len
        model = load_model(checkpoint, config.dtype, config.device, *lengths)
        model.pack()
        return PiecewiseForward(model, make(model.config), drive)

    return load


@contextmanager
def grammars_limited(llm: LLM | AsyncLLM, limits: CompilerLimits) -> Iterator[None]:
    """Limits the grammars that the engine compiles meanwhile."""
    compiler = llm.inputs.grammars
    assert isinstance(compiler, GrammarCompiler)
    before, compiler.limits = compiler.limits, limits
    try:
        yield
    finally:
        compiler.limits = before


def parser_limits(**limits: int) -> CompilerLimits:
    """Limits of llguidance for grammars that are in use, but not where they are tried out."""
    return CompilerLimits(in_use=GrammarLimits(parser={**PARSER_LIMITS, **limits}))
