"""A response template as it is written: its fields, what may stand in them, and what is wrong with one."""

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_ESCAPED = re.compile(r"\\(\W)")
_MAX_FIELDS = 32
_MAX_MARK = 1000  # characters of a pattern or mark, and of a parser's own patterns
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class ContentParser(StrEnum):
    """Names the way in which the text of a region becomes a value. All but the last are transformers' own."""

    TEXT = "text"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    JSON = "json"
    XML_INLINE = "xml-inline"
    KV_LINES = "kv-lines"
    PYTHON_CALLS = "python-calls"  # calls as Python writes them, one per line or in a list


class Purpose(StrEnum):
    """Says what becomes of a region."""

    CONTENT = "content"
    THOUGHTS = "thoughts"
    CALLS = "tool_calls"
    NOTHING = "nothing"  # replies have no place for it


Mark = str | list[str]


class TemplateField(BaseModel):
    """One kind of region of an answer: how it begins and ends, and how its text is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    open: Mark | None = None
    open_pattern: str | None = None
    close: Mark | None = None
    close_pattern: str | None = None
    content: Annotated[ContentParser, Field(strict=False)] = ContentParser.TEXT
    content_args: dict[str, Any] = Field({})
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False

    @property
    def is_implicit(self) -> bool:
        """True if all text outside of other regions belongs to it."""
        return self.open is None and self.open_pattern is None

    @property
    def strips(self) -> bool:
        """True if whitespace around its text is dropped."""
        return self.content_args.get("strip", True) is not False

    def spellings(self) -> list[str]:
        """All texts in which marks are written; patterns also without their escapes."""
        texts = list(_strings_in(self.model_dump()))
        return [*texts, *(_ESCAPED.sub(r"\1", text) for text in texts)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("open", "close"):
            _check_mark(name, getattr(self, name), getattr(self, f"{name}_pattern"))
        if self.join is not None and not self.repeats:
            raise ValueError("join needs repeats: true")
        if self.transform_each and self.transform is None:
            raise ValueError("transform_each needs a transform")
        if self.content is ContentParser.PYTHON_CALLS and self.transform is not None:
            raise ValueError("python-calls takes no transform")
        for text in _strings_in(self.transform):
            if _PLACEHOLDER.search(text) and not _PLACEHOLDER.fullmatch(text):
                raise ValueError(f"transform: {text!r} mixes a placeholder with other text")
        if self.content is ContentParser.XML_INLINE and not isinstance(self.content_args.get("tag_pattern"), str):
            raise ValueError("content_args: xml-inline needs a tag_pattern")
        if any(len(text) > _MAX_MARK for text in _strings_in(self.content_args)):
            raise ValueError(f"content_args: a text has more than {_MAX_MARK} characters")
        return self


class ResponseTemplate(BaseModel):
    """A whole declaration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = 1
    defaults: dict[str, Any] = Field({})
    fields_: dict[str, TemplateField] = Field(alias="fields", min_length=1, max_length=_MAX_FIELDS)
    start_anchor: Mark | None = None
    start_anchor_pattern: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_mark("start_anchor", self.start_anchor, self.start_anchor_pattern)
        if self.start_anchor is None and self.start_anchor_pattern is None:
            raise ValueError("start_anchor or start_anchor_pattern is missing")
        for name, field in self.fields_.items():
            if field.content is ContentParser.PYTHON_CALLS and purpose_of(name) is not Purpose.CALLS:
                raise ValueError(f"fields.{name}: python-calls is for tool_calls only")
        implicit = [name for name, field in self.fields_.items() if field.is_implicit]
        if len(implicit) > 1:
            raise ValueError(f"only one field may have neither open nor open_pattern, not {' and '.join(implicit)}")
        if Purpose.CALLS in map(purpose_of, implicit):
            raise ValueError("tool_calls needs open or open_pattern")
        if not any(purpose_of(name) is not Purpose.NOTHING for name in self.fields_):
            raise ValueError(f"fields: none is content, tool_calls or {', '.join(_THOUGHTS)}")
        return self

    @classmethod
    def read(cls, given: object) -> Self:
        """Checks a template. ValueError, of one line, if something is wrong with it."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[str]"))
            said = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {said}" if where else said) from error
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a template that is written as JSON. ValueError, of one line, if something is wrong with it."""
        try:
            given = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        return cls.read(given)


def purpose_of(name: str) -> Purpose:
    """The purpose of the field of this name."""
    if name in _THOUGHTS:
        return Purpose.THOUGHTS
    return Purpose(name) if name in (Purpose.CONTENT, Purpose.CALLS) else Purpose.NOTHING


def placeholder(form: Any) -> list[str] | None:
    """The path of keys that a part of a transform stands for; None if it is itself a value."""
    match = _PLACEHOLDER.fullmatch(form) if isinstance(form, str) else None
    return None if match is None else match[1].split(".")


def _check_mark(name: str, literal: Mark | None, pattern: str | None) -> None:
    if literal is not None and pattern is not None:
        raise ValueError(f"{name} and {name}_pattern cannot both be given")
    marks = [literal] if isinstance(literal, str) else literal
    if marks is not None and not all(marks or [""]):
        raise ValueError(f"{name} has an empty mark")
    if any(len(text) > _MAX_MARK for text in [*(marks or []), pattern or ""]):
        raise ValueError(f"{name} has more than {_MAX_MARK} characters")


def _strings_in(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
