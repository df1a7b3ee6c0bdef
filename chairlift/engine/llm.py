"""`LLM`: the engine as a Python call. The calling thread drives it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar
from weakref import ref

from tqdm import tqdm

from chairlift.config import EngineConfig
from chairlift.engine.collector import paused_collector
from chairlift.engine.core import EngineCore
from chairlift.engine.forks import Home
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.engine.text.deltas import CumulativeOutput, RequestDelta
from chairlift.engine.text.embedding import EmbeddingOutput
from chairlift.engine.text.inputs import DEFAULT_CHAT, PROMPT_ONLY, Generation, InputProcessor, Prompt
from chairlift.engine.text.outputs import GenerationState, OutputProcessor
from chairlift.engine.text.relevance import Pair, ScoreOutput
from chairlift.engine.text.tokenizer_ahead import reading_ahead
from chairlift.errors import EngineClosed, EngineDead, InvalidRequest, QueueTimeout
from chairlift.params import DEFAULT_OPTIONS, FinishReason, RequestOptions, RequestOutput, SamplingParams
from chairlift.prompt_work import PromptTask
from chairlift.scheduler import TokenEvent

_BAR: Callable[..., "tqdm[Any]"] = partial(tqdm, delay=1.0, unit="req")  # delay: short work needs no progress bar
_SAVE_S = 10.0  # to save prompts, when the engine is closed
_SAVE_PATIENCE_S = 0.05  # to wait for the disk, while calls wait

_Each = TypeVar("_Each", SamplingParams, RequestOptions)


class LLM:
    """A model and its engine. Calls from several threads run one at a time. As a context manager, it closes itself.

    In a process that was forked after it was made, all calls but `close` raise `EngineClosed`.
    """

    def __init__(self, model: str = "bundled", **config: Any) -> None:
        """`model`: a checkpoint directory, a hub id, a GGUF file, "smollm2" or "bundled".

        `config`: fields of `EngineConfig`.
        """
        engine_config = EngineConfig(model=model, **config)
        with paused_collector(), reading_ahead(engine_config) as tokenizer:
            core = EngineCore(engine_config)
            self._use(core, InputProcessor(core.config, core.vocab_size, tokenizer=tokenizer))

    @classmethod
    def of(cls, core: EngineCore, make_bar: Callable[..., "tqdm[Any]"] = _BAR) -> Self:
        """Returns one for an engine that was made of other `Parts`; only its calls may use that from here on.

        `make_bar`: makes progress bars, with tqdm's arguments `total` and `disable`.
        """
        llm = cls.__new__(cls)
        llm._use(core, InputProcessor(core.config, core.vocab_size), make_bar)
        return llm

    def _use(self, core: EngineCore, inputs: InputProcessor, make_bar: Callable[..., "tqdm[Any]"] = _BAR) -> None:
        self._make_bar = make_bar
        self._home = Home()
        self._core: EngineCore | None = core
        self._idle_after = core.idle_after
        self.config = core.config
        self.inputs = inputs
        self._outputs = OutputProcessor(self.inputs.tokenizer)
        self._ids = count()
        self._lock = threading.Lock()
        self._idle_timer: threading.Timer | None = None
        self._failure: Exception | None = None

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        options: RequestOptions | Sequence[RequestOptions] = DEFAULT_OPTIONS,
        keep_on_interrupt: bool = False,
    ) -> list[RequestOutput]:
        """Continues each prompt; the results are in prompt order, whatever the order of completion.

        `prompts`: a text, texts, or lists of token ids. `params`: one for all or one per prompt; None: the model's
        own defaults, with 16 tokens. `options`: one for all or one per prompt. `use_tqdm`: a progress bar on standard
        error, if that is a terminal and the work is long. `keep_on_interrupt`: ctrl-C ends the call rather than raise
        `KeyboardInterrupt`; outputs that are not finished then have their text so far, and the finish reason "abort".
        `InvalidRequest` if one of them cannot be served; nothing is computed then.
        """
        self._home.check()  # first: a fork may have left locks taken for ever
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each_params = _one_per_prompt(params, len(listed), "params")
        each_options = _one_per_prompt(options, len(listed), "options")
        generations = [
            self.inputs.prepare(str(next(self._ids)), prompt, own_params, options=own_options or DEFAULT_OPTIONS)
            for prompt, own_params, own_options in zip(listed, each_params, each_options, strict=True)
        ]
        states = self._run(generations, use_tqdm, keep_on_interrupt)
        return [CumulativeOutput(state.generation).add(state.take()) for state in states]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_options: ChatOptions = DEFAULT_CHAT,
        options: RequestOptions | Sequence[RequestOptions] = DEFAULT_OPTIONS,
        keep_on_interrupt: bool = False,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several: lists of `{"role": ..., "content": ...}`.

        `params` None: the model's own defaults, up to the end of the answer. `chat_options`: tools, and how the
        template renders the conversation; messages and tools are plain text, even where they spell a special token.
        Otherwise like `generate`.
        """
        self._home.check()
        is_single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if is_single else messages
        chosen = self.inputs.default_chat_params if params is None else params
        each_params = _one_per_prompt(chosen, len(conversations), "params")
        prompts = [
            self.inputs.encode_chat(conversation, chat_options, own_params is not None and own_params.truncates_prompt)
            for conversation, own_params in zip(conversations, each_params, strict=True)
        ]
        return self.generate(prompts, chosen, use_tqdm, options, keep_on_interrupt)

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[list[int]],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[EmbeddingOutput]:
        """Makes a vector of each text, in order; see `engine/text/embedding.py`. Requests of all kinds share steps.

        `prompt_name`: of the checkpoint's prompts, the one that precedes each text; token ids get none. `dimensions`:
        only so many of the vector's first ones. `normalize`: vectors have length one.
        `InvalidRequest` if one of them cannot be served, `RequestFailed` if one of them fails.
        """
        self._home.check()
        listed: list[Prompt] = [texts] if isinstance(texts, str) else list(texts)
        embedding = self.inputs.embedding
        prompts = [embedding.with_prompt(each, prompt_name) if isinstance(each, str) else each for each in listed]
        return [
            EmbeddingOutput.of(delta, dimensions, is_normalized=normalize)
            for delta in self._compute(prompts, embedding.task, use_tqdm, options)
        ]

    def score(
        self,
        query: str,
        texts: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[ScoreOutput]:
        """Scores how well each text fits a query, in order.

        A reranker's scores are probabilities; those of other models are cosines of two vectors. `instruction`: tells a
        reranker what fits. Errors are those of `embed`.
        """
        self._home.check()
        documents = [texts] if isinstance(texts, str) else texts
        comparison = self.inputs.relevance.compare([Pair(query, each) for each in documents], instruction)
        deltas = self._compute(comparison.prompts, comparison.task, use_tqdm, options)
        return [ScoreOutput(score) for score in comparison.scores([delta.prompt_result for delta in deltas])]

    def reset_prefix_cache(self) -> None:
        """Forgets what earlier prompts computed, so that later calls start cold, for instance in a benchmark."""
        self._home.check()
        with self._lock:
            self._usable_core().reset_prefix_cache()

    def close(self) -> None:
        """Saves prompts if there is a `prefix_cache_dir`, and frees the memory. Later calls raise `EngineClosed`.

        Does nothing in a forked process.
        """
        if not self._home.is_here:
            return
        with self._lock:
            self._stop_idle_timer()
            if self._core is not None:
                self._core.close(0.0 if self._failure is not None else _SAVE_S)
            self._core = None
            self.inputs.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compute(
        self, prompts: Sequence[Prompt], task: PromptTask, use_tqdm: bool, options: RequestOptions
    ) -> list[RequestDelta]:
        """Computes what the task wants of each prompt. `RequestFailed` if one of them fails."""
        generations = [
            self.inputs.prepare(str(next(self._ids)), prompt, PROMPT_ONLY, options=options, task=task)
            for prompt in prompts
        ]
        deltas = [state.take() for state in self._run(generations, use_tqdm)]
        for delta in deltas:
            delta.check_result()
        return deltas

    def _run(
        self, generations: list[Generation], use_tqdm: bool, keep_on_interrupt: bool = False
    ) -> list[GenerationState]:
        disable = None if use_tqdm else True  # None: disabled unless standard error is a terminal
        with self._lock, self._make_bar(total=len(generations), disable=disable) as bar:
            core = self._usable_core()
            self._stop_idle_timer()
            states = [self._outputs.open(generation) for generation in generations]
            try:
                self._drive(core, states, bar)
            except KeyboardInterrupt:
                if not keep_on_interrupt:
                    raise
                self._outputs.process(_abort_all(core, states))
            finally:
                _abort_all(core, states)  # after an interrupt, all requests of this call end
                for state in states:
                    self._outputs.close(state)
                self._start_idle_timer()
        return states

    def _drive(self, core: EngineCore, states: list[GenerationState], bar: "tqdm[Any]") -> None:
        waiting = deque(states)
        while waiting or core.has_work:
            # What would displace queued requests waits here. An idle engine is asked anyway, to raise why it refuses.
            while waiting and (core.has_room_for(waiting[0].generation.requests) or not core.has_work):
                core.add(*waiting.popleft().generation.requests)
            try:
                events = core.step()
            except Exception as error:
                self._failure = error
                raise EngineDead(f"a step failed: {type(error).__name__}: {error}") from error
            delivery = self._outputs.process(events)
            for request_id in delivery.to_abort:
                core.abort(request_id)
            for failure in delivery.failed.values():
                if not isinstance(failure, QueueTimeout):  # its output says so, and the others continue
                    raise failure
            bar.update(sum(state.is_finished for state in delivery.changed))

    def _start_idle_timer(self) -> None:
        """Has the engine free unused memory if no other call comes for a while."""
        self._idle_timer = threading.Timer(self._idle_after, _use_idle_time, [ref(self)])
        self._idle_timer.daemon = True
        self._idle_timer.start()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _usable_core(self) -> EngineCore:
        if self._failure is not None:
            raise EngineDead(f"an earlier step failed: {self._failure}")
        if self._core is None:
            raise EngineClosed("this LLM was closed; make a new one")
        return self._core


def _abort_all(core: EngineCore, states: list[GenerationState]) -> list[TokenEvent]:
    """Ends the requests that have not ended; an event for each, also for those that the engine no longer has."""
    names = [name for state in states for name in state.unfinished_ids]
    return [core.abort(name) or TokenEvent(name, [], FinishReason.ABORT) for name in names]


def _use_idle_time(of: "ref[LLM]") -> None:
    """Runs in a thread of its own. The weak reference does not keep the `LLM` alive."""
    while (llm := of()) is not None:
        with llm._lock:  # a piece at a time, so that a call need not wait for long
            if llm._core is None:
                return
            if not llm._core.save_next(_SAVE_PATIENCE_S):
                llm._core.use_idle_time()
                return


def _one_per_prompt(given: _Each | Sequence[_Each] | None, num_prompts: int, name: str) -> Sequence[_Each | None]:
    if given is None or not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{num_prompts} prompts, but {len(given)} {name}; give one, or one each", name)
    return given
