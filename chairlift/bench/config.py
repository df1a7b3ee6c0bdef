"""What a load test is: one frozen value, checked before anything is sent.

Field names are the command line's flags and descriptions are their help, so both are written only here.
"""

from os.path import isdir
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from chairlift.bench.prompts import WORDS, num_possible_prompts

DEFAULT_CONCURRENCY = 8

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# Not an enum: its choices are then the words that the command line shows and takes.
Endpoint = Literal["completions", "chat"]

ENDPOINT_PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class BenchConfig(BaseModel):
    """A load test's settings. Arrivals are either a fixed concurrency (closed loop) or a rate (open loop)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    url: str = Field(
        default="http://127.0.0.1:8000",
        description="base URL of the server, with or without a final /v1",
    )
    endpoint: Endpoint = Field(
        default="completions",
        description="API to drive: completions sends token ids, chat sends random words",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="model name to ask for; when omitted, the first that GET /v1/models lists",
    )
    api_key: SecretStr | None = Field(default=None, description="key sent as 'Authorization: Bearer KEY'")
    num_requests: PositiveInt = Field(default=100, description="requests to measure")
    concurrency: PositiveInt | None = Field(
        default=None,
        description=f"requests kept in flight; {DEFAULT_CONCURRENCY} where no request rate is given either",
    )
    request_rate: PositiveFloat | None = Field(
        default=None,
        description="mean requests per second of Poisson arrivals; latency counts from when each is due",
    )
    prompt_tokens: PositiveInt = Field(
        default=128, description="prompt length: token ids for completions, words for chat"
    )
    output_tokens: PositiveInt = Field(default=128, description="tokens asked for in each reply (max_tokens)")
    token_range: tuple[NonNegativeInt, PositiveInt] = Field(
        default=(32, 127),
        description="LOW,HIGH: prompt token ids are drawn from LOW up to, not including, HIGH",
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
    json_file: Path | None = Field(
        default=None,
        validation_alias="json",
        description="file for the configuration, the summary and every request's figures",
    )

    @field_validator("url")
    @classmethod
    def _normalise_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must look like http://host:port or https://host, not {url!r}")
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

    @field_validator("json_file")
    @classmethod
    def _check_json_file(cls, path: Path | None) -> Path | None:
        # Found out now rather than after an hour's run.
        if path is not None and (isdir(path) or not isdir(path.parent)):
            raise ValueError(f"cannot write {path}: it must be a file in an existing directory")
        return path

    @model_validator(mode="after")
    def _check_arrivals(self) -> Self:
        if self.concurrency is not None and self.request_rate is not None:
            raise ValueError("give either concurrency or request_rate, not both")
        return self

    @model_validator(mode="after")
    def _check_prompts_can_differ(self) -> Self:
        low, high = self.token_range
        choices = high - low if self.endpoint == "completions" else len(WORDS)
        needed = self.num_requests + self.warmup
        possible = num_possible_prompts(choices, self.prompt_tokens)
        if possible < needed:
            raise ValueError(
                f"{needed} requests (with warmup) need as many distinct prompts, but {choices} choices for "
                f"each of {self.prompt_tokens} prompt_tokens allow only {possible}: raise prompt_tokens, or "
                "lower num_requests, or for completions widen token_range"
            )
        return self

    @property
    def endpoint_url(self) -> str:
        """Where requests are posted."""
        return self.url + ENDPOINT_PATHS[self.endpoint]

    def resolved(self, model: str) -> Self:
        """The same test with nothing left open: a model, and a concurrency where there is no rate."""
        concurrency = self.concurrency
        if concurrency is None and self.request_rate is None:
            concurrency = DEFAULT_CONCURRENCY
        return self.model_copy(update={"model": model, "concurrency": concurrency})
