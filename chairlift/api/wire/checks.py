"""Checks of fields: the values that are supported, and the classes that objects in them become."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema, to_json

from chairlift.api.wire.body import let_others_run
from chairlift.api.wire.left_out import is_attachment
from chairlift.errors import InvalidRequest


def only(allowed: object, why: str, path: str | None = None) -> BeforeValidator:
    """Refuses every value of a field except null and this one; `path`: of a field within a field."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and value != allowed:
            name = path or info.field_name
            raise InvalidRequest(f"{name}: only {to_json(allowed).decode()} is supported: {why}", name)
        return value

    return BeforeValidator(check)


def only_types(field: str, *known: str) -> BeforeValidator:
    """Refuses an object of another type by that type's name, rather than by the first of its fields."""
    return BeforeValidator(_known_type(field, *known))


def _known_type(field: str, *known: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, dict) and (given := type_of(value)) not in known:
            why = ", because this server reads text only" if is_attachment(given) else ""
            raise InvalidRequest(
                f"{field}: type {repr(given)[:80]} is not supported{why}; known here: {', '.join(known)}", field
            )
        return value

    return check


def type_of(value: dict[str, Any]) -> Any:
    """An item's type; an item without one is a message if it has a role."""
    return "message" if value.get("type") is None and "role" in value else value.get("type")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a union of classes. `pick` says which of them an object becomes; None: it is not an object."""

    pick: Callable[[Any], type[BaseModel] | None]
    check: Callable[[object], object] = let_others_run  # applied to the input before one is picked

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Class names occur in the paths of errors: see `complaints`."""
        forms = {form.__name__: handler.generate_schema(form) for form in get_args(union)}
        picked = core_schema.tagged_union_schema(forms, lambda value: getattr(self.pick(value), "__name__", None))
        return core_schema.no_info_before_validator_function(self.check, picked)


def by_type(field: str, **forms: type[BaseModel]) -> OneOf:
    """Picks a class by an object's type, and refuses an object of another type as `only_types` does."""
    pick = lambda value: forms.get(str(type_of(value))) if isinstance(value, dict) else None  # noqa: E731
    return OneOf(pick, _known_type(field, *forms))
