"""Settings of `chairlift compare`. Field names are the command line's flags, and descriptions are their help."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TOP = 20  # log-probabilities of a position that servers tell at most


class CompareConfig(BaseModel):
    """Says what is compared, over which text, and where the results go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str = Field(
        description="model to compare with: a checkpoint directory, hub id or GGUF file; settings of an engine, such as"
        " model=PATH,quantization=int8; or a server's URL, with url=URL,model=NAME,api_key=KEY where needed"
    )
    candidate: str = Field(description="model whose distance from the reference is measured; written likewise")
    text: Path | None = Field(None, description="UTF-8 text to measure over; unset: one in English, with code")
    context: Annotated[int, Field(ge=8)] = Field(
        512,
        description="tokens of a window; those of its second half are scored",
    )
    max_windows: Annotated[int, Field(ge=1)] | None = Field(
        None, description="windows to measure at most, from the beginning of the text; unset: the whole text"
    )
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = Field(
        MAX_TOP, description="log-probabilities of a position that a server is asked for"
    )
    json_file: Path | None = Field(
        None,
        validation_alias="json",
        description="file to write all results to, with those of each position",
    )
    plot: Path | None = Field(
        None, description="PNG or SVG file to draw the distribution of divergences to; needs the extra [bench]"
    )
