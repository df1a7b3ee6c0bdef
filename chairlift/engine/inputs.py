"""From what a caller writes to what the engine runs: tokenize, check, fill in what was left open."""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from chairlift.config import ResolvedConfig
from chairlift.engine.grammar import GrammarCompiler
from chairlift.engine.tokenizer import ChatOptions, Message, Tokenizer
from chairlift.engine.vocabulary import Vocabulary
from chairlift.errors import CheckpointError, InvalidRequest
from chairlift.models.checkpoint import find_directory
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from chairlift.scheduler import Request

Prompt = str | list[int]

DEFAULT_CHAT = ChatOptions()

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked prompt and the sequences, one per choice, that continue it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[Request]


class InputProcessor:
    """Makes `Generation`s. InvalidRequest says what to change; nothing reaches the engine then."""

    def __init__(self, config: ResolvedConfig, vocab_size: int) -> None:
        directory = find_directory(config.model)
        self.tokenizer = Tokenizer(find_directory(config.tokenizer or config.model), config.chat_template)
        self.max_seq_len = config.max_seq_len
        self._capacity = config.max_batch_size + config.max_queue_size
        self._vocab_size = vocab_size
        self._serials = count()
        self._seeds = random.Random(config.seed)
        generation_config = _read_generation_config(directory)
        eos = _eos_token_ids(generation_config, directory, self.tokenizer)
        # A tokenizer may have more tokens than the model has rows; those are never sampled.
        self._eos_token_ids = frozenset(token for token in eos if 0 <= token < vocab_size)
        self.vocabulary = Vocabulary(self.tokenizer, vocab_size, self._eos_token_ids)
        self._grammars = GrammarCompiler(self.vocabulary)
        self.default_params = _default_params(generation_config, directory)
        self.default_chat_params = self.default_params.model_copy(update={"max_tokens": None})

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        param: str = "prompt",
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Generation:
        """Tokenizes and checks. `params` None: the model's own defaults (its generation_config.json).

        `param` is the field that the prompt came from, for the errors that name it.
        """
        params = params or self.default_params
        token_ids = self._tokenize(prompt)
        self._check_tokens(token_ids, params, param)
        max_tokens = self._max_tokens(len(token_ids), params)
        self._check_vocabulary(params.logit_bias, "logit_bias")
        self._check_vocabulary(params.stop_token_ids, "stop_token_ids")
        self._check_something_can_be_sampled(params)
        if params.n > self._capacity:
            raise InvalidRequest(f"n is {params.n}, and at most {self._capacity} requests can run and wait here", "n")
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self.vocabulary.is_readable()  # loads it here, off the event loop
        serial = next(self._serials)  # the engine's ids are its own: a caller may use one twice
        first_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        grammar_of = params.structured_outputs
        requests = [
            Request(
                f"{request_id}-{serial}-{index}",
                token_ids,
                params,
                max_tokens,
                first_seed + index,
                self._eos_token_ids,
                grammar=None if grammar_of is None else self._grammars.new_grammar(grammar_of),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,  # they are the same for all
                options=options,
            )
            for index in range(params.n)
        ]
        return Generation(request_id, prompt if isinstance(prompt, str) else None, token_ids, params, requests)

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> list[int]:
        """Token ids of a conversation in the model's chat template. InvalidRequest if the template refuses it."""
        if not isinstance(messages, Sequence) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}", "messages")
        if not messages:
            raise InvalidRequest("messages is empty; give at least one message", "messages")
        return self.tokenizer.encode_chat(messages, options, self.max_seq_len)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included. InvalidRequest if one is not in the vocabulary."""
        self._check_vocabulary(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty; give at least one character", "prompt")
            return self.tokenizer.encode(prompt, max_tokens=self.max_seq_len)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise InvalidRequest("a prompt is a string or a list of token ids", "prompt")
        return prompt

    def _check_tokens(self, token_ids: list[int], params: SamplingParams, param: str) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token", param)
        self._check_vocabulary(token_ids, param)
        num_for_answer = 0 if params.max_tokens == 0 else 1
        num_excess = len(token_ids) - (self.max_seq_len - num_for_answer)
        if num_excess > 0:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, {num_excess} too many: a sequence holds"
                f" {self.max_seq_len} tokens, and at least {num_for_answer} is for the answer",
                param,
            )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        room = self.max_seq_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room and not params.is_max_tokens_open:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} does not fit: the prompt has {num_prompt_tokens} tokens and a"
                f" sequence holds {self.max_seq_len}, which leaves {room}; lower max_tokens or leave it out",
                "max_tokens",
            )
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens {params.min_tokens} does not fit; the prompt leaves room for {room} tokens", "min_tokens"
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_vocabulary(self, token_ids: Collection[int], param: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is not in the model's vocabulary [0, {self._vocab_size})", param
            )

    def _check_something_can_be_sampled(self, params: SamplingParams) -> None:
        ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if params.min_tokens and len(ends) == self._vocab_size:
            raise InvalidRequest("with every token an end token, min_tokens cannot be reached", "stop_token_ids")


def _read_generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return parsed


def _eos_token_ids(generation_config: dict[str, Any], directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens, one or several: of generation_config.json, else of config.json, else the tokenizer's."""
    eos = generation_config.get("eos_token_id")
    if eos is None:
        eos = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    listed = eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int for token in listed):
        raise CheckpointError(
            f"{directory}: eos_token_id in generation_config.json or config.json must be a token id or a list of them,"
            f" not {eos!r}"
        )
    return frozenset(listed)


def _default_params(generation_config: dict[str, Any], directory: Path) -> SamplingParams:
    """Sampling defaults of a checkpoint. `do_sample: false`, where it is written, means greedy."""
    fields = {name: generation_config[name] for name in _SAMPLING_FIELDS if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        fields["temperature"] = 0.0
    try:
        return SamplingParams(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{directory / 'generation_config.json'}: {first['loc'][0]}: {first['msg']}") from error
