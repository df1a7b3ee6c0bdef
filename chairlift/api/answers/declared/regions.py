"""The regions of a response template: what begins and ends each, and how its calls are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from chairlift.api.answers.declared.anchors import Anchor, Found, Pattern
from chairlift.api.answers.declared.template import ContentParser, Mark, Purpose, TemplateField, placeholder, purpose_of
from chairlift.api.answers.declared.values import check_parsers


@dataclass(frozen=True, slots=True)
class Region:
    """A field of the template, ready for use. Without `open`, all text outside of other regions belongs to it."""

    name: str
    purpose: Purpose
    field: TemplateField
    open: Pattern | None
    close: Pattern | None  # None: it extends to the end of the answer

    @classmethod
    def of(cls, name: str, field: TemplateField) -> Self:
        """ValueError, of one line, if a pattern or parser cannot be used."""
        begin = pattern_of(f"fields.{name}.open", field.open, field.open_pattern)
        end = pattern_of(f"fields.{name}.close", field.close, field.close_pattern)
        check_parsers(name, field)
        captured = {group for pattern in (begin, end) if pattern is not None for group in pattern.names}
        if captured and field.transform is None:
            raise ValueError(f"fields.{name}: no transform uses the group {min(captured)}")
        return cls(name, purpose_of(name), field, begin, end)

    @property
    def name_group(self) -> str | None:
        """The group that captures a call's name, if the region's text is its arguments in JSON."""
        if not self._is_plain_json or self.field.transform_each:
            return None
        name, arguments = _function_of(self.field.transform)
        return name[0] if arguments == ["content"] and name is not None and len(name) == 1 else None

    @property
    def has_objects(self) -> bool:
        """True if the region's text is JSON objects with name and arguments: a list of them or a single one."""
        transform = self.field.transform
        if not self._is_plain_json or not isinstance(transform, dict):
            return False
        if not self.field.transform_each:
            return transform.get("function") == "{content}"
        name, arguments = _function_of(transform)
        return name == ["name"] and arguments in (["arguments"], ["parameters"])

    @property
    def _is_plain_json(self) -> bool:
        return self.field.content is ContentParser.JSON and not self.field.content_args


@dataclass(frozen=True, slots=True)
class Opening:
    """A mark that begins a region."""

    region: Region


@dataclass(frozen=True, slots=True)
class Closing:
    """A mark that ends a region."""

    region: Region


FoundMark = Found[Opening | Closing]


@dataclass(frozen=True, slots=True)
class Regions:
    """The regions that a reader knows."""

    all: Sequence[Region]

    @property
    def implicit(self) -> Region | None:
        """The region of text outside of all others."""
        return next((region for region in self.all if region.open is None), None)

    @property
    def is_steady(self) -> bool:
        """True if all marks can be found before the answer is complete; see `anchors`."""
        patterns = [pattern for region in self.all for pattern in (region.open, region.close)]
        return all(pattern is None or pattern.is_steady for pattern in patterns)

    def of(self, purpose: Purpose) -> list[Region]:
        """Returns the regions with this purpose."""
        return [region for region in self.all if region.purpose is purpose]

    def without(self, purposes: Sequence[Purpose]) -> "Regions":
        """Returns the regions with any other purpose."""
        return Regions([region for region in self.all if region.purpose not in purposes])

    def anchors_in(self, region: Region | None) -> list[Anchor[Opening | Closing]]:
        """The marks that may come next: within a region its end, outside (None) the beginning of any."""
        if region is not None and region.open is not None:
            return [] if region.close is None else [Anchor(region.close, Closing(region), may_be_empty=True)]
        anchors: list[Anchor[Opening | Closing]] = []
        for each in self.all:
            if each.open is not None:
                anchors.append(Anchor(each.open, Opening(each)))
            elif each.close is not None:
                anchors.append(Anchor(each.close, Closing(each)))
        return anchors


def pattern_of(where: str, literal: Mark | None, pattern: str | None) -> Pattern | None:
    """The pattern of a mark that is written in either way. ValueError, of one line, if it cannot be used."""
    try:
        if literal is not None:
            return Pattern.of_marks([literal] if isinstance(literal, str) else literal)
        return None if pattern is None else Pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{where}{'' if pattern is None else '_pattern'}: {error}") from error


def _function_of(transform: Any) -> tuple[list[str] | None, list[str] | None]:
    """The placeholders that a transform writes as a function's name and as its arguments."""
    function = transform.get("function", transform) if isinstance(transform, dict) else None
    if not isinstance(function, dict):
        return None, None
    return placeholder(function.get("name")), placeholder(function.get("arguments"))
