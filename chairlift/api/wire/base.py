"""What all shapes share: strictness, and what becomes of a field that does not simply work."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, StrictInt, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from chairlift.errors import InvalidRequest

LeftOutIfNone = Field(exclude_if=lambda value: value is None)

# One complaint is enough: a list of a million wrong elements must not become a million of them.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]


class Body(BaseModel):
    """A request's body, or a part of one. A field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that is accepted because it cannot change the answer."""

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the reason as its description."""
        return {**handler(schema), "description": f"accepted, changes nothing: {self.why}"}


@dataclass(frozen=True, slots=True)
class Refused:
    """Marks a field of the specification that is not supported: anything but null is an error that names it."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Null only."""
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the reason as its description."""
        return {**handler(schema), "description": f"refused: {self.why}"}

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None:
            raise InvalidRequest(f"{info.field_name} is not supported: {self.why}", info.field_name)
        return value


class ErrorDetail(BaseModel):
    """What went wrong, and which field is to blame."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail
