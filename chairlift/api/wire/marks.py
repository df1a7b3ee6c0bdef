"""Marks of fields without full support: what becomes of them, and why."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema, to_json

from chairlift.errors import InvalidRequest


class Fate(StrEnum):
    """The ways in which fields are treated."""

    WORKS = "works"
    IGNORED = "accepted, changes nothing"
    IDLE = "accepted where it changes nothing"
    LEFT_OUT = "accepted, with a warning"
    REFUSED = "refused unless null"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that is accepted because it cannot change the answer."""

    why: str
    fate: ClassVar = Fate.IGNORED

    @property
    def told(self) -> str:
        """The reason as the reference gives it."""
        return self.why

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"{self.fate}: {self.told}"}


@dataclass(frozen=True, slots=True)
class Idle(Ignored):
    """Marks a field that is accepted with these values, by which it asks for nothing, and refused with any other."""

    values: tuple[object, ...] = ()
    fate: ClassVar = Fate.IDLE

    @property
    def told(self) -> str:
        return f"only {' or '.join(to_json(value).decode() for value in self.values)} is supported: {self.why}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None and value not in self.values:
            raise InvalidRequest(f"{info.field_name}: {self.told}", info.field_name)
        return value


@dataclass(frozen=True, slots=True)
class LeftOut(Ignored):
    """Marks a field that cannot be honoured but whose loss does no harm: the reply has a warning that names it."""

    but_for: tuple[object, ...] = ()  # values that ask for nothing
    fate: ClassVar = Fate.LEFT_OUT

    def warning(self, path: str, value: object) -> list[str]:
        """The sentence for a body that has this value there; empty if the value asks for nothing."""
        return [] if value is None or value in self.but_for else [f"{path} was left out: {self.why}"]


@dataclass(frozen=True, slots=True)
class Refused(Ignored):
    """Marks a field of a specification that is not supported: anything but null is an error that names it."""

    fate: ClassVar = Fate.REFUSED

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None:
            raise InvalidRequest(f"{info.field_name} is not supported: {self.why}", info.field_name)
        return value
