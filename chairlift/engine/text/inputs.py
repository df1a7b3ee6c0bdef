"""Turns a caller's input into what the engine runs: tokenizes, checks, and fills in defaults.

Nothing here needs the event loop, and nothing should run on it. Input that is too long is refused before any work is
spent on it.
"""

import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

from chairlift.config import GenerationDefaults, ResolvedConfig
from chairlift.engine.sampling.token_rules import PatternWatch, RuleFilter, TokenRules, compile_rules
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.engine.text.defaults import CheckpointDefaults
from chairlift.engine.text.detokenizer import StopStrings
from chairlift.engine.text.embedding import EmbeddingConfig
from chairlift.engine.text.end_tokens import find_end_tokens
from chairlift.engine.text.grammar import GrammarCompiler, Thinking
from chairlift.engine.text.relevance import read_relevance
from chairlift.engine.text.special_tokens import strings_in
from chairlift.engine.text.tokenizer import Tokenizer, too_long
from chairlift.engine.text.tokenizer_ahead import read_tokenizer_of
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.errors import InvalidRequest, PromptExcess
from chairlift.models.checkpoint import find_model
from chairlift.models.gguf import is_gguf, open_gguf
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, SamplingParams, StructuredOutputs
from chairlift.plan import Grammar
from chairlift.prompt_work import PoolTask, PromptTask, ScoreTask
from chairlift.scheduler import Drafter, Request

Prompt = str | list[int]

DEFAULT_CHAT = ChatOptions()

MAX_TOKENIZED = 2**19
"""The most characters for `tokenize`, and tokens for `decode`."""

PROMPT_ONLY = SamplingParams(max_tokens=0)
"""The parameters where only something of the prompt is wanted."""

_TOOLS_PER_MESSAGES = 4  # templates may render little of a tool, so tools may be this many times as long as messages
_MIN_TOOL_CHARACTERS = 2**18
_NUM_PREPARED = 4


@dataclass(frozen=True, slots=True)
class _PreparedParams:
    """Holds what is costly to derive from parameters; prompts with the same parameters share it."""

    params: SamplingParams
    engine_params: SamplingParams  # with a stop token for each stop string that is a special token
    stops: StopStrings
    rules: TokenRules | None


class TextWatcher(Protocol):
    """Reads one choice's text as it grows."""

    def push(self, text: str) -> bool:
        """Takes new text. True if the choice ends here, as at a stop string."""
        ...


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Says how a choice's tokens become text, and where the text ends, in addition to SamplingParams."""

    new_watcher: Callable[[], TextWatcher] | None = None  # called once per choice
    shown_tokens: tuple[str, ...] = ()  # special tokens that are part of the text, by name
    thinking: Thinking | None = None  # a grammar begins after the thoughts, whose tokens are counted
    clamps_max_tokens: bool = False  # to the room beside the prompt; otherwise more is a ContextLengthExceeded


DEFAULT_TEXT = TextOptions()


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked prompt and the sequences, one per choice, that continue it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[Request]
    stops: StopStrings
    text_options: TextOptions = DEFAULT_TEXT


class Grammars(Protocol):
    """Compiles grammars: `GrammarCompiler`, or a proxy for that of another process."""

    def compile(self, outputs: StructuredOutputs, thinking: Thinking | None = None) -> Future[Any]:
        """See `GrammarCompiler`."""
        ...

    def starter(self, compiled: Any) -> Callable[[], Grammar]:
        """A function that makes a sequence's state in a grammar that `compile` returned."""
        ...

    def close(self) -> None: ...


class InputProcessor:
    """Makes `Generation`s. If a request is not valid, InvalidRequest says what to change, and nothing is queued."""

    def __init__(
        self,
        config: ResolvedConfig,
        vocab_size: int,
        grammars: Grammars | None = None,
        seed_stream: int = 0,
        tokenizer: Future[Tokenizer] | None = None,
    ) -> None:
        """`grammars` None: compiled here. Requests without a seed get different ones in each `seed_stream`.

        `tokenizer` None: the one that the configuration names is read now.
        """
        path = find_model(config.model)
        header = open_gguf(path) if is_gguf(path) else None  # held, so that its readers below read it only once
        self.tokenizer = read_tokenizer_of(config) if tokenizer is None else tokenizer.result()
        self.max_seq_len = config.max_seq_len
        self._has_head = config.has_head
        self._speculates = config.speculation is not None
        self._capacity = config.max_batch_size + config.max_queue_size
        self._vocab_size = vocab_size
        self._serials = count()
        self._prepared: tuple[_PreparedParams, ...] = ()  # the last few
        self._seeds = random.Random(config.seed + (seed_stream << 64))
        uses_defaults = config.generation_config is GenerationDefaults.AUTO
        defaults = CheckpointDefaults.read(config.model, path) if uses_defaults else CheckpointDefaults()
        self.embedding = EmbeddingConfig.read(path)
        self._max_text_len = min(self.max_seq_len, self.embedding.max_seq_length or self.max_seq_len)
        self.relevance = read_relevance(config.model, path, self.tokenizer, self.embedding, self._max_text_len)
        self._eos_token_ids = find_end_tokens(path, self.tokenizer, vocab_size)
        self.vocabulary = Vocabulary(self.tokenizer, vocab_size, self._eos_token_ids)
        self.grammars: Grammars = grammars or GrammarCompiler(self.vocabulary)
        self.default_params = defaults.params
        self._max_new_tokens = defaults.max_new_tokens
        self.default_chat_params = self.default_params.model_copy(update={"max_tokens": None})
        del header

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        param: str = "prompt",
        options: RequestOptions = DEFAULT_OPTIONS,
        text_options: TextOptions = DEFAULT_TEXT,
        compiled: Any = None,
        task: PromptTask | None = None,
    ) -> Generation:
        """Tokenizes and checks. `params` None: the model's own defaults (its generation_config.json).

        `param` is the field that the prompt came from, for the errors that name it. `compiled`: the grammar that params
        ask for; None: it is compiled here. `task`: wanted of the prompt, if nothing is generated (`PROMPT_ONLY`).
        """
        params = params or self.default_params
        if params.n > self._capacity:
            raise InvalidRequest(f"n is {params.n}, and at most {self._capacity} requests can run and wait here", "n")
        # What vectors and scores are made of may have a limit of its own: what the model was trained to make them of.
        most = self._max_text_len if task is not None and task.is_all else self.max_seq_len
        token_ids = self._truncate(self._tokenize(prompt, params, param, most), params, most)
        # Where as much is kept of the prompt as leaves room for max_tokens, a limit that leaves none is a mistake.
        clamps = text_options.clamps_max_tokens and params.truncate_prompt_tokens != -1
        max_tokens = self._check_lengths(token_ids, params, param, clamps, most)
        self._check_vocabulary(token_ids, param)
        prepared = self._prepare_params(params)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self.vocabulary.load()  # now, off the event loop
        if compiled is None and params.structured_outputs is not None:
            compiled = self.grammars.compile(params.structured_outputs, text_options.thinking).result()
        serial = next(self._serials)  # makes the engine's ids unique: a caller may use one twice
        task = self._task_of(params, task, param)
        first_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        rules, repetition = prepared.rules, params.repetition_detection
        prompt_token_ids = tuple(token_ids)  # a copy, because the caller may change the list
        new_drafter = self._starter_of_drafters(options, len(token_ids), max_tokens)
        requests = [
            Request(
                f"{request_id}-{serial}-{index}",
                prompt_token_ids,
                prepared.engine_params,
                max_tokens,
                first_seed + index,
                self._eos_token_ids,
                new_grammar=None if compiled is None else self.grammars.starter(compiled),
                prompt_task=task if index == 0 else None,  # the result is the same for all
                options=options,
                new_token_filter=None if rules is None else partial(RuleFilter, rules),
                new_repetition_watch=None if repetition is None else partial(PatternWatch, repetition),
                new_drafter=new_drafter,
                text_may_end_early=prepared.stops.are_found_in_text or text_options.new_watcher is not None,
            )
            for index in range(params.n)
        ]
        text = prompt if isinstance(prompt, str) else None
        return Generation(request_id, text, token_ids, params, requests, prepared.stops, text_options)

    def _starter_of_drafters(
        self, options: RequestOptions, prompt_len: int, max_tokens: int
    ) -> Callable[[], Drafter] | None:
        """Returns what makes the drafter of each of its requests. None: nothing is guessed."""
        if not self._speculates or options.speculation != "auto":
            return None
        predicted = options.prediction[: max_tokens * self.tokenizer.longest_token]
        prediction = self.tokenizer.encode(predicted, add_special_tokens=False)[:max_tokens] if predicted else []
        return partial(Drafter, prompt_len, prediction)

    def _task_of(self, params: SamplingParams, given: PromptTask | None, param: str) -> PromptTask | None:
        """Returns what is wanted of the prompt. InvalidRequest if the model cannot compute what is wanted."""
        if not self._has_head and not isinstance(given, PoolTask):
            raise InvalidRequest("this checkpoint has no head (lm_head): it makes embeddings, and no text", param)
        return given if params.prompt_logprobs is None else ScoreTask(params.prompt_logprobs)

    def encode_chat(
        self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT, truncates: bool = False
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template. InvalidRequest if the template refuses it.

        `truncates`: `prepare` will keep only the end of it (`truncate_prompt_tokens`), so it may be longer than a
        sequence; otherwise that is a ContextLengthExceeded.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}", "messages")
        if not messages:
            raise InvalidRequest("messages is empty; give at least one message", "messages")
        if not truncates:
            most = self.max_seq_len * self.tokenizer.longest_token
            self._check_characters(messages, most, "messages")
            self._check_characters(options.tools, max(_TOOLS_PER_MESSAGES * most, _MIN_TOOL_CHARACTERS), "tools")
        try:
            return self.tokenizer.encode_chat(messages, options, self.max_seq_len, truncates)
        except RecursionError as error:
            raise InvalidRequest("messages: the content is nested too deeply", "messages") from error

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text that is no prompt: it may be longer than one, up to MAX_TOKENIZED characters."""
        if len(text) > MAX_TOKENIZED:
            raise InvalidRequest(
                f"prompt: a text of {len(text)} characters is too long to be tokenized at once; send at most"
                f" {MAX_TOKENIZED}",
                "prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included. InvalidRequest if one is not in the vocabulary."""
        if len(token_ids) > MAX_TOKENIZED:
            raise InvalidRequest(f"tokens: {len(token_ids)} are too many; send at most {MAX_TOKENIZED}", "tokens")
        self._check_vocabulary(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _check_characters(self, given: object, most: int, param: str) -> None:
        """Refuses what is far longer than a prompt can be, by its length alone."""
        num_characters = sum(len(text) + 1 for text in strings_in(given))  # so that many empty ones are too long, too
        if num_characters > most:
            num_tokens = max(self.max_seq_len + 1, num_characters // self.tokenizer.longest_token)
            what = f"your {param} have more than {most} characters. Please reduce their length."
            raise too_long(self.max_seq_len, what, param, PromptExcess(num_tokens, self.max_seq_len))

    def _prepare_params(self, params: SamplingParams) -> _PreparedParams:
        """Checks parameters, and caches what is derived from them for later prompts with the same object."""
        prepared = next((each for each in self._prepared if each.params is params), None)
        if prepared is None:
            self._check_vocabulary(params.logit_bias, "logit_bias")
            self._check_vocabulary(params.stop_token_ids, "stop_token_ids")
            self._check_vocabulary(params.allowed_token_ids or (), "allowed_token_ids")
            encode = partial(self.tokenizer.encode, add_special_tokens=False, param="bad_words")
            rules = compile_rules(params, encode, self._vocab_size)
            stops = StopStrings(params.stop, self.tokenizer.split)
            engine_params = self._with_stop_tokens(params, stops.token_ids)
            self._check_something_can_be_sampled(engine_params, rules)
            prepared = _PreparedParams(params, engine_params, stops, rules)
            # If another thread does the same, one of the results is lost, and made again when needed.
            self._prepared = (*self._prepared[1 - _NUM_PREPARED :], prepared)
        return prepared

    def _with_stop_tokens(self, params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
        possible = [token for token in token_ids if token < self._vocab_size]
        return params.model_copy(update={"stop_token_ids": [*params.stop_token_ids, *possible]}) if possible else params

    def _tokenize(self, prompt: Prompt, params: SamplingParams, param: str, most: int) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty; give at least one character", param)
            return self.tokenizer.encode(prompt, param=param, max_tokens=most, keeps_end=params.truncates_prompt)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise InvalidRequest("a prompt is a string or a list of token ids", param)
        return prompt

    def _truncate(self, token_ids: list[int], params: SamplingParams, most: int) -> list[int]:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; -1: as leave room in `most`."""
        num_kept = params.truncate_prompt_tokens
        if num_kept is None:
            return token_ids
        if num_kept == 0:
            raise InvalidRequest("truncate_prompt_tokens is 0, which leaves no prompt", "truncate_prompt_tokens")
        if num_kept == -1:
            num_for_answer = 1 if params.is_max_tokens_open else params.max_tokens or 0
            num_kept = max(1, most - max(num_for_answer, params.min_tokens))
        return token_ids[-num_kept:]

    def _check_lengths(self, token_ids: list[int], params: SamplingParams, param: str, clamps: bool, most: int) -> int:
        """Resolves `max_tokens`, so that it fits beside the prompt in `most` tokens.

        ContextLengthExceeded if that is not possible.
        """
        size, room = len(token_ids), most - len(token_ids)
        if not size:
            raise InvalidRequest("the prompt is empty; give at least one token", param)
        num_for_answer = 0 if params.max_tokens == 0 else 1
        if room < num_for_answer:
            beside = " beside at least 1 for the answer" if num_for_answer else ""
            what = f"your {param} resulted in {size} tokens, {num_for_answer - room} too many{beside}."
            excess = PromptExcess(size, most - num_for_answer)
            raise too_long(most, f"{what} Please reduce the length of the {param}.", param, excess)
        max_tokens = 0 if params.is_max_tokens_open or clamps else params.max_tokens or 0
        hints = {"max_tokens": "max_tokens, or leave max_tokens out", "min_tokens": "min_tokens"}
        for name, wanted in (("max_tokens", max_tokens), ("min_tokens", params.min_tokens)):
            if wanted > room:
                what = f"{name} {wanted} does not fit beside the prompt of {size} tokens, which leaves {room}."
                advice = f"Please reduce the length of the prompt or {hints[name]}."
                raise too_long(most, f"{what} {advice}", name)
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        return room if self._max_new_tokens is None else min(max(self._max_new_tokens, params.min_tokens), room)

    def _check_vocabulary(self, token_ids: Collection[int], param: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is not in the model's vocabulary [0, {self._vocab_size})", param
            )

    def _check_something_can_be_sampled(self, params: SamplingParams, rules: TokenRules | None) -> None:
        """InvalidRequest if no token could ever be sampled. Ignores grammars, whose tokens are known later."""
        ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if not params.min_tokens or params.structured_outputs is not None:
            ends = set()
        if len(ends) == self._vocab_size:
            raise InvalidRequest("min_tokens cannot be reached: every token ends the text; lower it", "stop_token_ids")
        words = [] if rules is None or rules.bad_words is None else rules.bad_words.single.tolist()
        if params.allowed_token_ids is not None and ends.union(words).issuperset(params.allowed_token_ids):
            raise InvalidRequest(
                "no token of allowed_token_ids can be sampled: each is a bad word, or an end token below min_tokens",
                "allowed_token_ids",
            )
        if len(ends.union(words)) == self._vocab_size:
            raise InvalidRequest("bad_words leave no token that can be sampled; give fewer", "bad_words")
