"""Defines what a caller asks for and what comes back: SamplingParams, RequestOutput, finish reasons.

Names and meaning follow vLLM. A field that does not exist is an error, never ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeVar, overload

import pydantic.dataclasses
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from chairlift.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARACTERS = 2**18
MAX_SCHEMA_DEPTH = 120  # llguidance reads 127 levels
MAX_TOKENS_NAMED = 1024  # in logit_bias or stop_token_ids: they cost host time in every step
MAX_PATTERN = 1024  # tokens of a pattern that repetition detection looks for
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**31 - 1


def _as_list(value: object) -> object:
    """`stop="x"` means `stop=["x"]`."""
    return [value] if isinstance(value, str) else ([] if value is None else value)


String = Annotated[str, Field(min_length=1, max_length=1024)]
Strings = Annotated[list[String], BeforeValidator(_as_list)]


def _none_if_minus_one(value: object) -> object:
    """Clients of other servers write -1 where they want no seed: vLLM, SGLang, llama.cpp and Ollama read it so."""
    return None if type(value) is int and value == -1 else value


Seed = Annotated[int | None, BeforeValidator(_none_if_minus_one)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


class FinishReason(StrEnum):
    """Says why a sequence ended."""

    STOP = "stop"  # an end token, a stop token, a stop string, or a repetition
    LENGTH = "length"  # max_tokens, or the slot is full
    ABORT = "abort"  # the request was aborted, timed out or failed, or the server shut down


GRAMMAR_LIMIT = "grammar_limit"
"""The stop reason of a sequence whose grammar turned out too costly: its error tells the client what to change."""

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class StructuredOutputs:
    """Says what every text must look like; exactly one field is set. The end of the grammar ends the text."""

    json: GrammarText | dict[str, Any] | None = Field(
        default=None, description="JSON Schema that the text is an instance of"
    )
    json_object: StrictBool | None = Field(default=None, description="true: any JSON object")
    regex: GrammarText | None = Field(default=None, description="regular expression that the whole text matches")
    choice: Annotated[list[GrammarText], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1, max_length=10_000, description="the texts to choose from"
    )
    grammar: GrammarText | None = Field(default=None, description="context-free grammar in Lark's or GBNF's notation")
    disable_additional_properties: StrictBool | None = Field(
        default=None,
        description="with json: whether objects have no properties but those that the schema names, where it names some"
        " and leaves additionalProperties out; default: the server's setting, and true for LLM",
    )

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs: give exactly one of json, json_object, regex, choice and grammar, not"
                f" {' and '.join(given) or 'none'}",
                "structured_outputs",
            )
        excess = find_excess(self.json if isinstance(self.json, dict) else self.choice)
        if excess is not None:
            name = "the list of choices" if self.json is None else "the schema"
            raise InvalidRequest(f"structured_outputs: {name} {excess}; simplify it", "structured_outputs")


def find_excess(schema: object) -> str | None:
    """Says how a schema exceeds the limits; None if it does not. Stops reading at the first excess."""
    num_characters, waiting = 0, [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            return f"is nested more than {MAX_SCHEMA_DEPTH} levels deep"
        num_characters += len(value) + 2 if isinstance(value, dict | list | str) else 1
        if isinstance(value, dict):
            num_characters += sum(len(key) + 3 for key in value if isinstance(key, str))
        if num_characters > MAX_GRAMMAR_CHARACTERS:
            return f"has more than {MAX_GRAMMAR_CHARACTERS} characters"
        if isinstance(value, dict | list):
            waiting += [(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    return None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RepetitionDetection:
    """Ends a text whose last tokens are one pattern `min_count` times in a row; names and meaning as in vLLM."""

    max_pattern_size: int = Field(ge=1, le=MAX_PATTERN, description="longest pattern, in tokens")
    min_pattern_size: int = Field(default=1, ge=0, le=MAX_PATTERN, description="fewest; 0 means 1")
    min_count: int = Field(ge=2, le=MAX_PATTERN, description="times in a row that the pattern must occur")

    def __post_init__(self) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequest(
                f"repetition_detection: min_pattern_size {self.min_pattern_size} is above max_pattern_size"
                f" {self.max_pattern_size}",
                "repetition_detection",
            )


class SamplingParams(BaseModel):
    """Says how to continue one prompt. Validated on construction (`pydantic.ValidationError`, a `ValueError`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int = Field(1, ge=1, le=128, description="independent continuations of the prompt")
    max_tokens: int | None = Field(
        16, ge=0, description="most new tokens; left open (unset or None), the room in the slot also bounds it"
    )
    min_tokens: int = Field(
        0, ge=0, description="new tokens before an end or stop token may be sampled; the end of a grammar comes first"
    )
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False, description="0 means greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="smallest set of tokens with this probability mass")
    top_k: int = Field(0, ge=-1, description="this many likeliest tokens; 0 or -1: all")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="drop tokens below this share of the likeliest one")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="subtracted once a token was generated")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="subtracted per time it was generated")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100.0, description="divides (multiplies negative) logits of tokens seen so far"
    )
    logit_bias: dict[int, Bias] = Field(
        default_factory=dict,
        max_length=MAX_TOKENS_NAMED,
        description="token id -> number added to its logit, between -100 and 100",
    )
    seed: Seed = Field(
        None,
        ge=-MAX_SEED - 1,
        le=MAX_SEED,
        description="same seed, same tokens, whatever else is in the batch; -1, as if left out: a new one each time",
    )
    stop: Strings = Field(
        default_factory=list,
        max_length=64,
        description="strings that end the text and are not part of it; they may spell special tokens",
    )
    stop_token_ids: list[int] = Field(
        default_factory=list, max_length=MAX_TOKENS_NAMED, description="tokens that end the text"
    )
    ignore_eos: bool = Field(
        False, description="go on after the model's own end token; the end of a grammar is still the end"
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probability of each new token, and of this many likeliest ones"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="the same for the tokens of the prompt, except the first"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="what the text must look like")
    bad_words: Strings = Field(
        default_factory=list,
        max_length=1024,
        description="words that are never written, at the beginning or after a space",
    )
    allowed_token_ids: list[int] | None = Field(
        None, min_length=1, max_length=2**20, description="the only tokens that may be sampled"
    )
    repetition_detection: RepetitionDetection | None = Field(
        None, description="end the text once it repeats a pattern of tokens"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="keep only this many of the prompt's last tokens; -1: as many as fit"
    )

    @model_validator(mode="after")
    def _check_across_fields(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        """True if tokens that were seen before change which come next."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def truncates_prompt(self) -> bool:
        return self.truncate_prompt_tokens is not None

    @property
    def is_max_tokens_open(self) -> bool:
        """True if the caller did not say how long the answer may be."""
        return self.max_tokens is None or "max_tokens" not in self.model_fields_set


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RequestOptions:
    """Says how a request is served among others; it does not change what is generated."""

    priority: int = Field(
        default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="lower is served first; waiting makes up for it"
    )
    tenant: str = Field(default="", description="the sender; tenants get equal shares of the machine")
    cache_salt: str = Field(default="", description="only requests with the same salt reuse each other's prompts")
    queue_share: float = Field(
        default=1.0, gt=0.0, le=1.0, description="share of the waiting queue that the tenant's requests may fill"
    )
    timeout: float | None = Field(
        default=None, gt=0.0, allow_inf_nan=False, description="seconds after its arrival at which it is aborted"
    )
    speculation: Literal["auto", "off"] = Field(
        default="auto", description="off: no speculation for this request; auto: the engine's setting"
    )
    prediction: str = Field(
        default="",
        max_length=2**20,
        description="text that the answer is likely to repeat: an engine that speculates guesses from it",
    )


DEFAULT_OPTIONS = RequestOptions()


@dataclass(slots=True)
class Logprob:
    """A token's natural log-probability from the model's own logits, before temperature, penalties, bias and masks.

    Not frozen: every step makes hundreds, and a frozen instance takes more than twice as long to make.
    """

    logprob: float
    rank: int  # 1: no token was likelier
    decoded_token: str | None = None  # replacement characters stand for bytes that are no complete character


TokenLogprobs = dict[int, Logprob]
"""For one position: first the token at that position, then the likeliest tokens in order."""


_Item = TypeVar("_Item")


class _Prefix(Sequence[_Item]):
    """A view of the items that an append-only list has now. Copying them in every step would take quadratic time."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items = items
        self._size = len(items)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        if isinstance(index, slice):
            return [self._items[position] for position in range(*index.indices(self._size))]
        return self._items[range(self._size)[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `token_ids` includes the end token that was sampled, `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    # The stop token or stop string that ended it, "repetition_detected", "timeout" or GRAMMAR_LIMIT; None for an end
    # token that no stop string spells, and for other aborts.
    stop_reason: int | str | None = None
    error: str | None = None  # why it failed; its finish reason is then ABORT
    logprobs: Sequence[TokenLogprobs] | None = None  # one per token, if asked for; a list once it has finished
    num_reasoning_tokens: int = 0  # between the model's reasoning markers, where these are known
    num_accepted_tokens: int = 0  # tokens of the answer that were guessed; see docs/speculation.md
    num_rejected_tokens: int = 0  # tokens that were guessed and verified, but are not in the answer
    text_offsets: Sequence[int] | None = None  # with logprobs: where in the text each token's characters begin

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of all tokens together, if it was asked for."""
        if self.logprobs is None:
            return None
        return sum(next(iter(position.values())).logprob for position in self.logprobs)

    def copy(self) -> Self:
        """A snapshot that later tokens do not change. Returns itself once it has finished."""
        if self.finish_reason is not None:
            return self
        return replace(
            self,
            token_ids=self.token_ids.copy(),
            logprobs=None if self.logprobs is None else _Prefix(self.logprobs),
            text_offsets=None if self.text_offsets is None else _Prefix(self.text_offsets),
        )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Holds when a request arrived, got its first slot and its first token: `time.perf_counter()`; None: not yet."""

    arrival: float
    admission: float | None
    first_token: float | None

    def first_of(self, other: "RequestTimes") -> "RequestTimes":
        """The earlier of the two for each time."""
        return RequestTimes(
            min(self.arrival, other.arrival),
            _first(self.admission, other.admission),
            _first(self.first_token, other.first_token),
        )


def _first(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)


@dataclass(slots=True)
class RequestOutput:
    """A request's state so far; `outputs[j]` is its j-th continuation, cumulative."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # if asked for; None for the first token
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were reused from another request
    times: RequestTimes | None = field(default=None, compare=False)  # the earliest of all continuations

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def copy(self) -> Self:
        scores = self.prompt_logprobs
        if scores is not None and len(scores) < len(self.prompt_token_ids):  # and so will grow
            scores = scores.copy()
        return replace(self, outputs=[output.copy() for output in self.outputs], prompt_logprobs=scores)
