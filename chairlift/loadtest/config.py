"""Defines the settings of a load test.

Field names are the command line's flags and descriptions are their help, so both are written only here. Neither numpy
nor an HTTP client is imported, so that the command line answers at once.
"""

import re
from collections.abc import Callable, Iterator, Set
from itertools import combinations
from os.path import isdir
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PositiveInt, SecretStr, model_validator

from chairlift.loadtest.values import LENGTH_FORMS, LIMIT_NAMES, Lengths, SweepValues, parse_limits

DEFAULT_CONCURRENCY = 8


def _readable_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Checks that text can be parsed, and keeps it as it was typed."""

    def check(text: Any) -> Any:
        parse(text)
        return text

    return AfterValidator(check)


def _normal_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise ValueError(f"must look like http://host:port or https://host, not {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _writable(ending: str = "") -> AfterValidator:
    """Checks before the test that a file's name ends so, and that its directory exists."""

    def check(path: Path) -> Path:
        if not path.name.endswith(ending):
            raise ValueError(f"must end in {ending}, unlike {str(path)!r}")
        if isdir(path) or not isdir(path.parent):
            raise ValueError(f"cannot write {path}: it must be a file in an existing directory")
        return path

    return AfterValidator(check)


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LengthsText = Annotated[int | str, _readable_by(Lengths.parse)]

# At most one of each group can be given.
_ALTERNATIVES = (
    ("request_rate", "ramp", "trace"),
    ("trace", "conversations", "prompt_tokens"),
    ("trace", "conversations", "prefix_tokens"),
    ("trace", "conversations", "turns"),
    ("trace", "output_tokens"),
    ("endpoint completions", "conversations", "turns"),
    ("sweep", "request_rate", "ramp", "trace"),
    ("sweep concurrency", "concurrency"),
)
# Each has an effect only together with one of these.
_COMPANIONS = {
    "burstiness": ("request_rate", "ramp", "sweep rate"),
    "trace_speedup": ("trace",),
    "num_prefixes": ("prefix_tokens",),
    "think_time": ("turns", "conversations"),
    "goodput_share": ("sweep",),
    "sweep": ("goodput",),
}


class BenchConfig(BaseModel, frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True):
    """A load test's settings. Arrivals are a fixed concurrency (closed loop) or follow a schedule (open loop)."""

    url: Annotated[str, AfterValidator(_normal_url)] = Field(
        "http://127.0.0.1:8000", description="base URL of the server, with or without a final /v1"
    )
    endpoint: Literal["completions", "chat"] | None = Field(
        None, description="completions sends token ids, chat words; unset: chat for conversations, else completions"
    )
    model: str | None = Field(None, min_length=1, description="unset: the first that GET /v1/models lists")
    api_key: SecretStr | None = Field(None, description="key sent as 'Authorization: Bearer KEY'")
    num_requests: PositiveInt | None = Field(None, description="requests to measure; unset: all of a file, else 100")
    concurrency: PositiveInt | None = Field(
        None, description=f"requests kept in flight, {DEFAULT_CONCURRENCY} if unset; with a schedule the most in flight"
    )
    request_rate: PositiveFloat | None = Field(None, description="mean requests per second of random arrivals")
    burstiness: PositiveFloat = Field(
        1.0, description="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, more is more even"
    )
    ramp: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="FIRST,LAST: a request rate that grows from request to request"
    )
    trace: Path | None = Field(
        None, description="file to replay: in each line JSON with timestamp (ms), input_length, output_length, hash_ids"
    )
    trace_speedup: PositiveFloat = Field(1.0, description="replay the trace this many times as fast")
    prompt_tokens: LengthsText = Field(
        128, description=f"prompt length, in token ids for completions, in words for chat: {LENGTH_FORMS}"
    )
    output_tokens: LengthsText = Field(128, description="tokens per reply (max_tokens); written as prompt_tokens")
    prefix_tokens: int = Field(0, ge=0, description="tokens of a shared prefix, in a chat the system message")
    num_prefixes: PositiveInt = Field(1, description="number of different shared prefixes")
    turns: PositiveInt = Field(1, description="turns of a conversation, each sent with all turns and replies before it")
    conversations: Path | None = Field(
        None, description='file of conversations: in each line {"messages": [...]}, one turn for each user message'
    )
    think_time: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="seconds from a reply to the next turn of its conversation"
    )
    ignore_eos: bool = Field(True, description="send ignore_eos (a vLLM extension): every reply has the full length")
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="sampling temperature; 0 is greedy")
    warmup: int = Field(1, ge=0, description="requests sent first and not counted")
    timeout: PositiveFloat = Field(600.0, description="seconds until a request counts as failed")
    seed: int = Field(0, ge=0, description="of prompts and arrivals; a new one avoids what a server has cached")
    goodput: Annotated[str, _readable_by(parse_limits)] | None = Field(
        None, description=f"limits in ms that make a request good, of {', '.join(LIMIT_NAMES)}: ttft:500,tpot:50"
    )
    goodput_share: float = Field(0.9, gt=0, le=1, description="share of good requests that a sweep wants of a test")
    sweep: Annotated[str, _readable_by(SweepValues.parse)] | None = Field(
        None,
        description="rate=1,2,4,8 or concurrency=1,2,4,8: one test for each, to find the highest that meets the limits",
    )
    json_file: Annotated[Path, _writable()] | None = Field(
        None, validation_alias="json", description="file for the settings, the summary and every request's figures"
    )
    report: Annotated[Path, _writable(".html")] | None = Field(
        None, description="HTML file for the figures and plots (needs matplotlib)"
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        given |= {f"endpoint {self.endpoint}", f"sweep {str(self.sweep).partition('=')[0]}"}
        if conflicts := "; ".join(_conflicts(given)):
            raise ValueError(conflicts)
        return self

    @property
    def is_chat(self) -> bool:
        """Returns true if messages are sent: that was asked for, or there are conversations."""
        return self.endpoint == "chat" or (self.endpoint is None and (self.conversations is not None or self.turns > 1))

    @property
    def is_open_loop(self) -> bool:
        """Returns true if a schedule says when requests are sent."""
        return self.request_rate is not None or self.ramp is not None or self.trace is not None

    @property
    def endpoint_url(self) -> str:
        """Returns the URL that requests are posted to."""
        return f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"

    @property
    def arrivals(self) -> str:
        """The flags that say when requests are sent, as they are typed."""
        names = ("request_rate", "burstiness", "ramp", "trace", "trace_speedup", "concurrency")
        values = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        flags = [f"{_flag(name)} {_typed(value)}" for name, value in values.items() if value is not None]
        return f"{' '.join(flags)} ({'open' if self.is_open_loop else 'closed'} loop)"

    @property
    def limits(self) -> dict[str, float]:
        """The limits of a good request, in milliseconds by latency; empty without `goodput`."""
        return {} if self.goodput is None else parse_limits(self.goodput)

    def resolved(self, model: str) -> Self:
        """The same test with nothing undecided: a model, an endpoint, and a concurrency where there is no schedule."""
        concurrency = self.concurrency or (None if self.is_open_loop else DEFAULT_CONCURRENCY)
        endpoint = "chat" if self.is_chat else "completions"
        return self.model_copy(update={"model": model, "endpoint": endpoint, "concurrency": concurrency})


def _conflicts(given: Set[str]) -> Iterator[str]:
    """Settings that exclude each other or would have no effect, as sentences for the user.

    `given` has names, and a name with its value where only that matters: "endpoint completions".
    """
    for one, other in dict.fromkeys(pair for group in _ALTERNATIVES for pair in combinations(group, 2)):
        if one in given and other in given:
            yield f"give either {_flag(one)} or {_flag(other)}, not both"
    for name, companions in _COMPANIONS.items():
        if name in given and given.isdisjoint(companions):
            yield f"{_flag(name)} needs {' or '.join(map(_flag, companions))}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _typed(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
