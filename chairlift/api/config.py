"""What the server can be told: where to listen, who may come in, how long it waits for whom."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

from chairlift.api.log_format import LogFormat
from chairlift.api.tools import ToolFamily

KEYS_VARIABLE = "CHAIRLIFT_API_KEY"  # in the environment; see `keys.gather_keys`


def _split(value: object) -> object:
    """The command line hands over one string for a flag given several times; so does the environment."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_SPLIT = BeforeValidator(_split)
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class ServerConfig(BaseModel):
    """Where and how to listen. Field descriptions are the help texts of the command line's flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    served_model_name: str | None = Field(None, description="the model's name for clients, if not that of --model")
    tool_call_parser: ToolFamily | None = Field(
        None, description="how the model writes tool calls; left out: what its chat template teaches"
    )
    api_key: Annotated[list[SecretStr], NoDecode, _SPLIT] = Field(
        [],
        description="a key that clients must send; may be given several times. Keys in the environment's"
        f" {KEYS_VARIABLE}, separated by commas, are valid too, and do not show in the list of processes",
    )
    api_key_file: Path | None = Field(None, description="file with such keys, one per line")
    allowed_origin: Annotated[list[str], NoDecode, _SPLIT] = Field(
        [],
        description="origin whose web pages may use the server (CORS), such as https://app.example.org; may be given"
        " several times; *: all",
    )
    ssl_certfile: Path | None = Field(None, description="certificate, and its chain, for https; a PEM file")
    ssl_keyfile: Path | None = Field(None, description="the certificate's private key; a PEM file without a password")
    max_body_bytes: int = Field(10 * 2**20, ge=1, description="largest request body; more is refused")
    header_timeout: Seconds = Field(
        10.0,
        description="seconds in which a request's headers must come, counted from its first byte; the first request's,"
        " and a TLS handshake, from the connection's start",
    )
    body_timeout: Seconds = Field(60.0, description="seconds in which a request's body must come after its headers")
    idle_timeout: Seconds = Field(75.0, description="seconds that a connection may be silent between two requests")
    write_timeout: Seconds = Field(60.0, description="seconds that a client may leave unread what is sent to it")
    keep_alive_interval: Seconds = Field(10.0, description="seconds without news after which a stream gets a comment")
    drain_timeout: float = Field(
        30.0, ge=0.0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM"
    )
    log_format: LogFormat = Field(LogFormat.TEXT, description="text: lines for people; json: one object per record")
    log_interval: float = Field(
        10.0,
        ge=0.0,
        allow_inf_nan=False,
        description="seconds between two lines in the log about the batch, while there is one; 0: none",
    )
