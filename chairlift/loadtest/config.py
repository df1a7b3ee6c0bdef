"""What a load test is: one frozen value, checked before anything is sent.

Field names are the command line's flags and descriptions are their help, so both are written only here. Neither numpy
nor an HTTP client is imported, so that the command line answers at once.
"""

import math
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    import numpy as np

DEFAULT_CONCURRENCY = 8
MAX_LENGTH = 10_000_000
LENGTH_FORMS = "N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or lognormal:MEDIAN,SIGMA[,MAX]"
LIMIT_NAMES = ("ttft", "tpot", "e2el")
LIMITS_EXAMPLE = "ttft:500,tpot:50"
SWEPT_FIELDS = {"rate": "request_rate", "concurrency": "concurrency"}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: one for all (`128`), or drawn from a distribution.

    `uniform:64,256`, `normal:512,128` (mean, standard deviation) or `lognormal:300,0.8` (median, sigma of the
    logarithm: the heavy tail that chats have). The last two take a third number, the maximum.
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: int | str) -> Self:
        """Raises `ValueError` with the accepted forms."""
        kind, _, listed = str(text).strip().rpartition(":")
        try:
            lengths = cls(kind, tuple(float(part) for part in listed.split(",")))
        except ValueError:
            lengths = cls(kind, ())
        if not lengths._is_valid():
            raise ValueError(f"cannot read the length {text!r}: it must be {LENGTH_FORMS}, in numbers above 0")
        return lengths

    def _is_valid(self) -> bool:
        if not all(0 < number <= MAX_LENGTH for number in self.numbers):
            return False
        match self.kind, self.numbers:
            case "", (length,):
                return length == int(length)
            case "uniform", (low, high):
                return low <= high
            case "normal" | "lognormal", (_, _, *most):
                return len(most) <= 1 and all(number >= 1 for number in most)
        return False

    def draw(self, count: int, generator: "np.random.Generator") -> list[int]:
        """`count` rounded lengths, each at least 1. Asking for more keeps the first ones."""
        if not self.kind:
            return [int(self.numbers[0])] * count
        first, second, *most = self.numbers
        if self.kind == "uniform":
            return list(map(int, generator.integers(round(first), round(second), size=count, endpoint=True)))
        if self.kind == "normal":
            drawn = generator.normal(first, second, size=count)
        else:
            drawn = generator.lognormal(math.log(first), second, size=count)
        maximum = int(most[0]) if most else MAX_LENGTH
        return [min(max(1, round(length)), maximum) for length in drawn.tolist()]


def parse_limits(text: str) -> dict[str, float]:
    """Milliseconds by latency, from `ttft:500,tpot:50`. Raises `ValueError`."""
    limits: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, number = part.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in LIMIT_NAMES or name in limits:
            complaint = f"limits are of {', '.join(LIMIT_NAMES)}, each at most once"
        elif not 0 < limit < math.inf:
            complaint = "milliseconds above 0 must follow the colon"
        else:
            limits[name] = limit
            continue
        raise ValueError(f"cannot read the limit {part!r}: {complaint}, as in {LIMITS_EXAMPLE}")
    return limits


@dataclass(frozen=True, slots=True)
class SweepValues:
    """The values of a `rate` or a `concurrency` to test, ascending, each once."""

    name: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `rate=1,2,4,8`. Raises `ValueError` with an example."""
        name, _, listed = text.partition("=")
        try:
            values = sorted({float(value) for value in listed.split(",")})
        except ValueError:
            values = []
        is_whole = name == "rate" or all(value.is_integer() for value in values)
        if name not in SWEPT_FIELDS or not values or not is_whole or not all(0 < v < math.inf for v in values):
            raise ValueError(
                f"cannot read the sweep {text!r}: it must look like rate=1,2,4,8 or concurrency=1,2,4,8, "
                "with numbers above 0 (whole ones for concurrency)"
            )
        return cls(name, tuple(values))


def _readable_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Text that stays text, once it has been seen that it can be parsed."""

    def check(text: Any) -> Any:
        parse(text)
        return text

    return AfterValidator(check)


def _check_writable(path: Path) -> Path:
    if isdir(path) or not isdir(path.parent):
        raise ValueError(f"cannot write {path}: it must be a file in an existing directory")
    return path


def _check_html(path: Path) -> Path:
    if path.suffix != ".html":
        raise ValueError(f"must end in .html, unlike {str(path)!r}")
    return path


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LengthsText = Annotated[int | str, _readable_by(Lengths.parse)]
WritablePath = Annotated[Path, AfterValidator(_check_writable)]

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
# Each has an effect only beside one of these.
_COMPANIONS = {
    "burstiness": ("request_rate", "ramp", "sweep rate"),
    "trace_speedup": ("trace",),
    "num_prefixes": ("prefix_tokens",),
    "think_time": ("turns", "conversations"),
    "goodput_share": ("sweep",),
    "sweep": ("goodput",),
}


class BenchConfig(BaseModel):
    """A load test's settings. Arrivals are a fixed concurrency (closed loop) or follow a schedule (open loop)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    url: str = Field("http://127.0.0.1:8000", description="base URL of the server, with or without a final /v1")
    endpoint: Literal["completions", "chat"] | None = Field(
        None,
        description="API to drive: completions (sends token ids) or chat (sends words); by default chat for "
        "conversations, else completions",
    )
    model: str | None = Field(
        None, min_length=1, description="model name to ask for; by default the first that GET /v1/models lists"
    )
    api_key: SecretStr | None = Field(None, description="key sent as 'Authorization: Bearer KEY'")
    num_requests: PositiveInt | None = Field(
        None, description="requests to measure; by default all of a file, without a file 100"
    )
    concurrency: PositiveInt | None = Field(
        None,
        description=f"requests kept in flight, {DEFAULT_CONCURRENCY} by default; with a schedule the most in flight: "
        "further ones wait in the client, and their latency counts from when they were due",
    )
    request_rate: PositiveFloat | None = Field(
        None, description="mean requests per second of random arrivals; latency counts from when each is due"
    )
    burstiness: PositiveFloat = Field(
        1.0, description="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, more is more even"
    )
    ramp: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="FIRST,LAST: a request rate that grows from request to request"
    )
    trace: Path | None = Field(
        None,
        description="file to replay, one JSON object per line: timestamp (ms), input_length, output_length, hash_ids",
    )
    trace_speedup: PositiveFloat = Field(1.0, description="replay the trace this many times as fast")
    prompt_tokens: LengthsText = Field(
        128, description=f"prompt length, in token ids for completions, in words for chat: {LENGTH_FORMS}"
    )
    output_tokens: LengthsText = Field(128, description="tokens per reply (max_tokens); written as prompt_tokens")
    prefix_tokens: NonNegativeInt = Field(
        0, description="tokens of a shared prefix before each prompt; in a chat, the system message"
    )
    num_prefixes: PositiveInt = Field(1, description="number of different shared prefixes")
    turns: PositiveInt = Field(1, description="turns of a conversation, each sent with all turns and replies before it")
    conversations: Path | None = Field(
        None,
        description='file with one JSON object per line, {"messages": [...]}: a conversation with one turn for each '
        "user message",
    )
    think_time: NonNegativeFloat = Field(
        0.0, allow_inf_nan=False, description="seconds from a reply to the next turn of its conversation"
    )
    ignore_eos: bool = Field(
        True, description="send ignore_eos (a vLLM extension) so that every reply has the full length"
    )
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="sampling temperature; 0 is greedy")
    warmup: NonNegativeInt = Field(1, description="requests sent first and not counted")
    timeout: PositiveFloat = Field(600.0, description="seconds until a request counts as failed")
    seed: NonNegativeInt = Field(
        0, description="seed of prompts and arrivals; a new one avoids prompts cached in an earlier run"
    )
    goodput: Annotated[str, _readable_by(parse_limits)] | None = Field(
        None, description=f"limits in ms that make a request good, of {', '.join(LIMIT_NAMES)}: {LIMITS_EXAMPLE}"
    )
    goodput_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="share of requests that must be good for a sweep to call a test good"
    )
    sweep: Annotated[str, _readable_by(SweepValues.parse)] | None = Field(
        None,
        description="rate=1,2,4,8 or concurrency=1,2,4,8: one test for each, and the highest that meets the goodput",
    )
    json_file: WritablePath | None = Field(
        None, validation_alias="json", description="file for the settings, the summary and every request's figures"
    )
    report: Annotated[WritablePath, AfterValidator(_check_html)] | None = Field(
        None, description="HTML file for the figures and plots (needs matplotlib)"
    )

    @field_validator("url")
    @classmethod
    def _normalise_url(cls, url: str) -> str:
        is_valid = False
        with suppress(ValueError):
            parsed = HttpUrl(url)
            str(parsed.host).encode("idna")  # fails for names that the HTTP client cannot look up
            is_valid = bool(parsed.port) and not parsed.query and not parsed.fragment
        if not is_valid:
            raise ValueError(f"must look like http://host:port or https://host, not {url!r}")
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        given |= {f"endpoint {self.endpoint}"} | ({f"sweep {self.sweep_values.name}"} if self.sweep_values else set())
        if found := list(_conflicts(given)):
            raise ValueError("; ".join(found))
        return self

    @property
    def is_chat(self) -> bool:
        """Whether messages are sent: because that was asked for, or because there are conversations."""
        if self.endpoint is not None:
            return self.endpoint == "chat"
        return self.conversations is not None or self.turns > 1

    @property
    def is_open_loop(self) -> bool:
        """Whether a schedule says when requests are sent."""
        return self.request_rate is not None or self.ramp is not None or self.trace is not None

    @property
    def endpoint_url(self) -> str:
        """Where requests are posted."""
        return f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"

    @property
    def limits(self) -> dict[str, float]:
        """What makes a request good, in milliseconds by latency; empty without `goodput`."""
        return {} if self.goodput is None else parse_limits(self.goodput)

    @property
    def sweep_values(self) -> SweepValues | None:
        return None if self.sweep is None else SweepValues.parse(self.sweep)

    def resolved(self, model: str) -> Self:
        """The same test with nothing left open: a model, an endpoint, and a concurrency where there is no schedule."""
        concurrency = self.concurrency
        if concurrency is None and not self.is_open_loop:
            concurrency = DEFAULT_CONCURRENCY
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
