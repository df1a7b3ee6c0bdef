"""The fields of all requests that the engine computes: the model, the sender, and how they are served among others."""

from typing import Any

from pydantic import Field, StrictFloat, StrictInt, field_validator

from chairlift.api.wire.body import ModelBody
from chairlift.errors import InvalidRequest
from chairlift.params import RequestOptions

_OPTIONS = {"priority", "cache_salt", "timeout", "speculation"}


class ScheduledRequest(ModelBody):
    """A field without a description has that of its namesake in RequestOptions, whose limits hold."""

    priority: StrictInt | None = None
    timeout: StrictFloat | None = None
    cache_salt: str | None = Field(None, max_length=256)

    @field_validator("cache_salt")
    @classmethod
    def _check_salt(cls, salt: str | None) -> str | None:
        if salt == "":  # a client that lacks its secret must not share its prompts with all others
            raise InvalidRequest("cache_salt is empty; leave it out, or give at least one character", "cache_salt")
        return salt

    @property
    def sender(self) -> str:
        """The sender, as the client names it; empty if it names none."""
        raise NotImplementedError

    def request_options(self, key_tenant: str | None, **more: Any) -> RequestOptions:
        """Returns how the request is served. `pydantic.ValidationError` if a field is out of range.

        `key_tenant`: the tenant of the API key, None where there are no keys. A key has one share, whatever `sender`
        its requests name.
        """
        given = self.model_dump(include=_OPTIONS, exclude_none=True)
        tenant = self.sender if key_tenant is None else key_tenant
        return RequestOptions(tenant=tenant, **given, **more)
