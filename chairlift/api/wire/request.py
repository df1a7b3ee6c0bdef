"""What all requests that generate have in common: whom they ask, and how they are served beside others."""

from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, field_validator

from chairlift.api.wire.base import Body, Ignored
from chairlift.api.wire.caching import FOR_CACHING, PromptCacheOptions
from chairlift.errors import InvalidRequest
from chairlift.params import RequestOptions

_MAX_SALT_CHARACTERS = 256


class GenerationRequest(Body):
    """What has no description or limit here has that of its namesake in RequestOptions."""

    model: str | None = Field(None, description="the served model's name; left out: the one there is")
    user: str | None = Field(
        None, description="whose request it is: users share the machine evenly, or API keys do where there are any"
    )
    priority: StrictInt | None = None
    timeout: StrictFloat | None = None
    cache_salt: str | None = Field(None, max_length=_MAX_SALT_CHARACTERS)
    stream: StrictBool | None = Field(None, description="send the answer as server-sent events while it is made")

    service_tier: Annotated[str | None, Ignored("there is one tier")] = None
    prompt_cache_key: Annotated[str | None, FOR_CACHING] = None
    prompt_cache_retention: Annotated[str | None, FOR_CACHING] = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, FOR_CACHING] = None

    @field_validator("cache_salt")
    @classmethod
    def _check_salt(cls, salt: str | None) -> str | None:
        if salt == "":  # a client whose secret is missing must not come to share its prompts with everybody
            raise InvalidRequest("cache_salt is empty; leave it out, or give at least one character", "cache_salt")
        return salt

    def request_options(self, key_tenant: str | None) -> RequestOptions:
        """How the request is served. `pydantic.ValidationError` if a field is out of range.

        `key_tenant`: who the API key says it is, None where there are no keys. A key has one share, whatever its
        holder writes into `user`.
        """
        given = self.model_dump(include={"priority", "cache_salt", "timeout"}, exclude_none=True)
        return RequestOptions(tenant=(self.user or "") if key_tenant is None else key_tenant, **given)
