"""The HTTP server's settings: addresses, access, limits on requests, and timeouts.

Importing them loads neither aiohttp nor torch, because the command line reads its flags from here.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from chairlift.api.answers import ReasoningFamily, ToolFamily
from chairlift.api.answers.declared import DeclaredFamily
from chairlift.config import Size, SizeOrNone, as_list

KEYS_VARIABLE = "CHAIRLIFT_API_KEY"
"""The environment variable that holds API keys, separated by commas."""


class LogFormat(StrEnum):
    """The format of a log record."""

    TEXT = "text"
    JSON = "json"


Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Timeout = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class ServerConfig(BaseModel):
    """Settings of the HTTP server. Field descriptions are the help texts of the command line's flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Address and identity
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    uds: Path | None = Field(
        None,
        description="Unix socket to listen on, in place of host and port; who may use it, its directory says",
    )
    root_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = Field(
        "",
        description="prefix under which a proxy offers the server, as in /llm; requests are served with it and without",
    )
    ssl_certfile: Path | None = Field(None, description="certificate, and its chain, for https; a PEM file")
    ssl_keyfile: Path | None = Field(None, description="the certificate's private key; a PEM file without a password")
    served_model_name: Annotated[list[Name], BeforeValidator(as_list)] = Field(
        [],
        description="the model's name for clients, if not that of --model; of several names each is served, and replies"
        " have the first",
    )
    tool_call_parser: ToolFamily | DeclaredFamily | None = Field(
        None,
        description="how the model writes tool calls; declared: as its response_template says; unset: as its"
        " response_template or chat template says",
    )
    response_template: Path | None = Field(
        None, description="JSON file that declares how the model's answers are read, in place of the checkpoint's own"
    )
    reasoning_parser: ReasoningFamily | None = Field(
        None,
        description="how the model marks its thoughts; unset: as its chat template says; none: they stay in the answer",
    )
    allow_additional_properties: bool = Field(
        False,
        description="where a JSON schema names an object's properties and leaves additionalProperties out, let answers"
        " and calls have others, which small models make up; a schema that says additionalProperties is followed",
    )
    keep_billing_line: bool = Field(
        False,
        description="show models the billing line that begins Claude Code's system prompts; it differs in every"
        " request, so nothing of a prompt after it can be reused",
    )
    api_workers: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        "auto",
        description="processes that handle HTTP, beside the engine's; 1: the engine's own process does it;"
        " auto: 1 on a CPU, on a GPU one for every 256 of max_batch_size",
    )
    worker_timeout: Timeout = Field(
        10.0,
        description="seconds without an answer after which an API worker is killed and replaced, and after which a"
        " worker's /health says 503 because the engine's process does not answer",
    )

    # Access, and each key's share of the server
    api_key: list[SecretStr] = Field(
        [],
        description="a key that clients must send; may be given several times. Keys in the environment's"
        f" {KEYS_VARIABLE}, separated by commas, are valid too, and do not show in the list of processes",
    )
    api_key_file: Path | None = Field(
        None,
        description="file with such keys, one per line; its priorities (lower is served first) and its share of the"
        " queue may follow a key: KEY priority=0:100 queue=0.5",
    )
    share_prefixes: bool = Field(
        False,
        description="let keys reuse each other's computed prompts; a key can then learn what others sent and got",
    )
    allowed_origin: list[str] = Field(
        [],
        description="origin whose web pages may use the server (CORS), such as https://app.example.org; may be given"
        " several times; *: all",
    )
    allowed_host: list[str] = Field(
        [],
        description="host name, beside localhost, of a server that listens on this machine only and asks for no key;"
        " may be given several times; *: all",
    )

    # Limits on what clients send, and timeouts
    clamp_max_tokens: bool = Field(
        False,
        description="let max_tokens be larger than the room beside the prompt, as /v1/messages always does: the answer"
        " then ends where the room does; otherwise that is an error",
    )
    max_body_bytes: Size = Field(10 * 2**20, description="largest request body (as in 20MiB); more is refused")
    max_unread_bytes: Size = Field(
        2**28,
        description="limit on the bytes of replies that clients have not read, in each process that handles HTTP, half"
        " of it for one client; connections that are not read are closed first, then replies get a 429 or 503",
    )
    max_batch_bytes: SizeOrNone = Field(
        2**30, description="limit on the bytes of all files of /v1/files and /v1/batches together; 0: none are served"
    )
    batch_dir: Path | None = Field(
        None,
        description="directory for these files, which a later server goes on with; unset: a temporary one, which ends"
        " with the server",
    )
    client_timeout: Timeout = Field(
        60.0,
        description="seconds that a client may take: for a TLS handshake and the first headers, for the headers of each"
        " later request from its first byte, for a body, and to read what is sent to it",
    )
    idle_timeout: Timeout = Field(75.0, description="seconds that a connection may be idle between two requests")
    drain_delay: Seconds = Field(
        0.0,
        description="seconds after SIGTERM in which /health says 503 while requests are still served, so that a router"
        " leaves first",
    )
    drain_timeout: Seconds = Field(30.0, description="seconds that running requests get after SIGTERM and drain_delay")

    # Metrics and the log
    vllm_metrics: bool = Field(
        False,
        description="also show on /metrics, under vLLM's names, what routers read: requests that run and wait, use of"
        " the cache, its size, its hits",
    )
    log_format: LogFormat = Field(LogFormat.TEXT, description="text: lines for people; json: one object per record")
    log_file: Path | None = Field(
        None,
        description="file that log records are added to, in place of standard error; when another program has renamed"
        " it, a new one is begun",
    )
    log_interval: Seconds = Field(
        10.0, description="seconds between two lines about the batch in the log; 0: no such lines"
    )

    @model_validator(mode="after")
    def _check_uds(self) -> Self:
        if self.uds is not None and self.api_workers not in (1, "auto"):
            raise ValueError("--uds has one process for HTTP; leave --api-workers out, or --uds")
        return self
