"""Settings of `chairlift run-batch`. Field names are the command line's flags, and descriptions are their help."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from chairlift.config import as_list


class BatchConfig(BaseModel):
    """Says which requests are made, of which server, and where the replies go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_file: Path = Field(
        description='requests, one per line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",'
        ' "body": {...}}',
        json_schema_extra={"flag": "-i"},
    )
    output_file: Path = Field(
        description="file that replies are added to, each with its request's custom_id; requests that have a reply"
        " there are not made again",
        json_schema_extra={"flag": "-o"},
    )
    url: str | None = Field(None, description="server to ask; unset: a model in this process")
    api_key: SecretStr | None = Field(None, description="key for the server")
    served_model_name: Annotated[list[str], BeforeValidator(as_list)] = Field(
        [], description="names that the requests have for the model in this process, if not that of --model"
    )
    concurrency: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="requests in flight; auto: two for each cache slot of the model in this process, or 64"
    )
