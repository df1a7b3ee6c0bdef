"""Hints about caching, and what would need a memory of earlier requests."""

from typing import Annotated

from pydantic import StrictBool

from chairlift.api.wire.base import Body, Ignored, Refused
from chairlift.api.wire.checks import only

FOR_CACHING = Ignored("a hint about caching; prompts that begin alike are found without it")
STATELESS = "nothing is stored here; send the whole conversation as input"


class PromptCacheOptions(Body):
    """Hints about caching."""

    mode: Annotated[str | None, FOR_CACHING] = None
    ttl: Annotated[str | None, FOR_CACHING] = None
    comparison_response_id: Annotated[None, Refused(STATELESS)] = None
    prewarm: Annotated[StrictBool | None, only(False, "every request is answered", "prompt_cache_options.prewarm")] = (
        None
    )
