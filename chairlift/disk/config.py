"""Settings of `chairlift cache`. Field names are the command line's flags, and descriptions are their help."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class CacheConfig(BaseModel):
    """Says which directory of prompts is listed, and what of it is removed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Path = Field(description="directory that a server has as --prefix-cache-dir")
    clear: bool = Field(False, description="remove everything saved, or what --only names; servers compute it again")
    only: str | None = Field(None, description="beginning of the id of the caches to list or remove; unset: all")
