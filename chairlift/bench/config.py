"""What a load test is: one frozen value, checked before anything is sent.

Field names are the command line's flags and descriptions are their help, so both are written only here.
"""

from os.path import isdir
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from chairlift.bench.combinations import complaints
from chairlift.bench.lengths import FORMS, Lengths
from chairlift.bench.limits import EXAMPLE, Limits
from chairlift.bench.sweep_values import SweepValues

DEFAULT_CONCURRENCY = 8
REPORT_SUFFIXES = (".html", ".png")

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

# Not an enum: its choices are then the words that the command line shows and takes.
Endpoint = Literal["completions", "chat"]

ENDPOINT_PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def _check_lengths(text: int | str) -> int | str:
    Lengths.parse(text)
    return text


def _check_limits(text: str) -> str:
    Limits.parse(text)
    return text


def _check_sweep(text: str) -> str:
    SweepValues.parse(text)
    return text


def _check_writable(path: Path) -> Path:
    # Found out now rather than after an hour's run.
    if isdir(path) or not isdir(path.parent):
        raise ValueError(f"cannot write {path}: it must be a file in an existing directory")
    return path


LengthsText = Annotated[int | str, AfterValidator(_check_lengths)]
LimitsText = Annotated[str, AfterValidator(_check_limits)]
SweepText = Annotated[str, AfterValidator(_check_sweep)]
WritablePath = Annotated[Path, AfterValidator(_check_writable)]


class BenchConfig(BaseModel):
    """A load test's settings. Arrivals are a fixed concurrency (closed loop) or follow a schedule (open loop)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    url: str = Field(
        default="http://127.0.0.1:8000",
        description="base URL of the server, with or without a final /v1",
    )
    endpoint: Endpoint | None = Field(
        default=None,
        description="API to drive: completions (sends token ids) or chat (sends words); when omitted, chat where there "
        "are messages, conversations or turns, else completions",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="model name to ask for; when omitted, the first that GET /v1/models lists",
    )
    api_key: SecretStr | None = Field(default=None, description="key sent as 'Authorization: Bearer KEY'")
    num_requests: PositiveInt | None = Field(
        default=None, description="requests to measure; when omitted, all of a file, else 100"
    )
    concurrency: PositiveInt | None = Field(
        default=None,
        description=f"requests kept in flight; {DEFAULT_CONCURRENCY} where no schedule is given; with a schedule, the "
        "most that are in flight: others wait in the client, and their latency counts from when they were due",
    )
    request_rate: PositiveFloat | None = Field(
        default=None,
        description="mean requests per second of random arrivals; latency counts from when each is due",
    )
    burstiness: PositiveFloat = Field(
        default=1.0,
        description="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, more evener",
    )
    ramp: tuple[PositiveFloat, PositiveFloat] | None = Field(
        default=None, description="FIRST,LAST: a request rate that grows from request to request"
    )
    trace: Path | None = Field(
        default=None,
        description="file to replay, one JSON object per line: timestamp (ms), input_length, output_length, hash_ids",
    )
    trace_speedup: PositiveFloat = Field(default=1.0, description="replay the trace so many times as fast")
    prompt_tokens: LengthsText = Field(
        default=128, description=f"prompt length, in token ids for completions, in words for chat: {FORMS}"
    )
    output_tokens: LengthsText = Field(
        default=128, description="tokens asked for in each reply (max_tokens); written as prompt_tokens"
    )
    token_range: tuple[NonNegativeInt, PositiveInt] = Field(
        default=(32, 127),
        description="LOW,HIGH: prompt token ids are drawn from LOW up to, not including, HIGH",
    )
    prefix_tokens: NonNegativeInt = Field(
        default=0,
        description="tokens before each prompt with which others begin too; in a chat, the system's message",
    )
    num_prefixes: PositiveInt = Field(default=1, description="families of prompts, each with its own shared prefix")
    turns: PositiveInt = Field(
        default=1, description="turns of a conversation, each sent with the replies to those before it"
    )
    messages: Path | None = Field(
        default=None, description='file with one JSON object per line, {"messages": [...]}; each is one chat request'
    )
    conversations: Path | None = Field(
        default=None,
        description="file like that of messages; each line is a conversation with one turn for each user message",
    )
    think_time: NonNegativeFloat = Field(
        default=0.0, allow_inf_nan=False, description="seconds from a reply to the next turn of its conversation"
    )
    ignore_eos: bool = Field(
        default=True,
        description="send ignore_eos (a vLLM extension) so that every reply has the full length",
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="sampling temperature; 0 is greedy",
    )
    warmup: NonNegativeInt = Field(default=1, description="requests sent first and not counted")
    timeout: PositiveFloat = Field(default=600.0, description="seconds until a request counts as failed")
    seed: NonNegativeInt = Field(
        default=0,
        description="seed of prompts and arrivals; a new one avoids prompts cached in an earlier run",
    )
    goodput: LimitsText | None = Field(
        default=None, description=f"limits in ms that make a request good, of ttft, tpot and e2el: {EXAMPLE}"
    )
    goodput_share: Share = Field(
        default=0.9, description="share of all requests that must be good for a sweep to call a test good"
    )
    sweep: SweepText | None = Field(
        default=None,
        description="rate=1,2,4,8 or concurrency=1,2,4,8: one test for each, and the highest that meets the goodput",
    )
    json_file: WritablePath | None = Field(
        default=None,
        validation_alias="json",
        description="file for the configuration, the summary and every request's figures",
    )
    report: WritablePath | None = Field(
        default=None, description="file.html or file.png for the figures and plots (needs matplotlib)"
    )

    @field_validator("url")
    @classmethod
    def _normalise_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must look like http://host:port or https://host, not {url!r}")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError(f"must name a host, unlike {url!r}") from None
        if parts.query or parts.fragment:
            raise ValueError(f"must have no query or fragment, unlike {url!r}")
        if parts.port == 0:
            raise ValueError(f"must not name port 0, unlike {url!r}")
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    @field_validator("token_range")
    @classmethod
    def _check_token_range(cls, token_range: tuple[int, int]) -> tuple[int, int]:
        low, high = token_range
        if low >= high:
            raise ValueError(f"LOW must be less than HIGH, but got {low},{high}")
        return token_range

    @field_validator("report")
    @classmethod
    def _check_report(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix not in REPORT_SUFFIXES:
            raise ValueError(f"must end in {' or '.join(REPORT_SUFFIXES)}, unlike {str(path)!r}")
        return path

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        given |= {f"endpoint {self.endpoint}"} | ({f"sweep {self.sweep_values.name}"} if self.sweep_values else set())
        if found := complaints(given):
            raise ValueError("; ".join(found))
        return self

    @property
    def is_chat(self) -> bool:
        """Whether messages are sent: because that was asked for, or because of what is to be sent."""
        if self.endpoint is not None:
            return self.endpoint == "chat"
        return self.messages is not None or self.conversations is not None or self.turns > 1

    @property
    def is_open_loop(self) -> bool:
        """Whether a schedule says when requests are sent."""
        return self.request_rate is not None or self.ramp is not None or self.trace is not None

    @property
    def endpoint_url(self) -> str:
        """Where requests are posted."""
        return self.url + ENDPOINT_PATHS["chat" if self.is_chat else "completions"]

    @property
    def prompt_lengths(self) -> Lengths:
        return Lengths.parse(self.prompt_tokens)

    @property
    def output_lengths(self) -> Lengths:
        return Lengths.parse(self.output_tokens)

    @property
    def limits(self) -> Limits | None:
        """What makes a request good."""
        return None if self.goodput is None else Limits.parse(self.goodput)

    @property
    def sweep_values(self) -> SweepValues | None:
        """What to test one after another."""
        return None if self.sweep is None else SweepValues.parse(self.sweep)

    def resolved(self, model: str) -> Self:
        """The same test with nothing left open: a model, an endpoint, and a concurrency where there is no schedule."""
        concurrency = self.concurrency
        if concurrency is None and not self.is_open_loop:
            concurrency = DEFAULT_CONCURRENCY
        endpoint = "chat" if self.is_chat else "completions"
        return self.model_copy(update={"model": model, "endpoint": endpoint, "concurrency": concurrency})
