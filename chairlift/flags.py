"""Command-line flags and environment variables, read off pydantic models.

A field `max_batch_size` of the command `serve` is the flag `--max-batch-size` and the environment variable
`CHAIRLIFT_SERVE__MAX_BATCH_SIZE`; the flag wins. The field's description is the flag's help, and the model validates.
Every mistake is a line of a `UsageError`.
"""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from shutil import get_terminal_size
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_HELP_COLUMN = 32
_HELP_WIDTH = 110
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE", SecretStr: "KEY"}
_DEMANDS = {  # pydantic's types of errors in words that follow "must be"
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "finite_number": "a finite number",
}
_CHOICE_ERRORS = ("literal_error", "enum")


class UsageError(Exception):
    """What the user typed is wrong: one line for each mistake."""

    def __init__(self, *lines: str) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the program: its settings are the fields of `models`, in the help under the titles of `groups`."""

    name: str
    summary: str
    models: tuple[type[BaseModel], ...]
    groups: Mapping[str, Sequence[str]]
    positional: str | None = None  # the field whose flag may be left out
    examples: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """All settings, by the names that users see."""
        return {_public_name(item): item[1] for model in self.models for item in model.model_fields.items()}

    def variable(self, setting: str) -> str:
        """The environment variable of a setting."""
        return f"CHAIRLIFT_{self.name}__{setting}".upper()


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting's value as the user wrote it, and where."""

    value: object
    source: str


def read_settings(command: Command, arguments: Sequence[str]) -> tuple[Any, ...]:
    """An instance of each of the command's models; `UsageError` if anything is wrong."""
    flags = _read_flags(command, arguments)
    given = _read_variables(command) | flags
    settings: list[BaseModel] = []
    complaints: list[str] = []
    for model in command.models:
        names = [_public_name(item) for item in model.model_fields.items()]
        try:
            settings.append(model.model_validate({name: given[name].value for name in names if name in given}))
        except ValidationError as error:
            complaints += _complaints(error, command, given)
    if complaints:
        raise UsageError(*complaints)
    return tuple(settings)


def _public_name(item: tuple[str, FieldInfo]) -> str:
    name, info = item
    return info.validation_alias if isinstance(info.validation_alias, str) else name


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _suggestion(word: str, known: Iterable[str], otherwise: str = "") -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else otherwise


# Reading


def _read_variables(command: Command) -> dict[str, _Given]:
    names = {command.variable(setting): setting for setting in command.fields}
    given = {}
    for variable, text in os.environ.items():
        known = variable.upper()  # their case does not matter
        if known.startswith(command.variable("")):
            if known not in names:
                raise UsageError(f"unknown environment variable {variable}{_suggestion(known, names)}")
            setting = names[known]
            given[setting] = _Given(_value_of(text, command.fields[setting].annotation), variable)
    return given


def _read_flags(command: Command, arguments: Sequence[str]) -> dict[str, _Given]:
    fields = command.fields
    namespace, rest = _make_parser(command).parse_known_intermixed_args(arguments)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
    see_help = f"; see chairlift {command.name} --help"
    if unknown:
        known = [*map(_flag, fields), *(f"--no-{_flag(name)[2:]}" for name, info in fields.items() if _is_bool(info))]
        raise UsageError(*(f"unknown flag {flag}{_suggestion(flag, known, see_help)}" for flag in unknown))
    if rest:
        raise UsageError(f"unexpected argument {rest[-1]!r}{see_help}")
    texts: dict[str, Any] = vars(namespace)
    if (argument := texts.pop("argument", None)) is not None:
        assert command.positional is not None
        if command.positional in texts:
            raise UsageError(f"both {argument!r} and {_flag(command.positional)} are given; leave one of them out")
        texts[command.positional] = argument
    return {name: _Given(_value_of(text, fields[name].annotation), _flag(name)) for name, text in texts.items()}


def _value_of(text: object, annotation: Any) -> object:
    """What pydantic takes: the texts of a flag given several times are joined, those of a tuple are split."""
    if isinstance(text, list):
        return ",".join(text)
    if isinstance(text, str) and _tuple_length(annotation):
        return text.split(",")
    if text == "None" and NoneType in _kinds(annotation):
        return None
    return text


def _kinds(annotation: Any) -> Iterator[Any]:
    """What a value may be: types, and the words of enums and literals."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(member.value) for member in annotation)
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_args(annotation):
        for alternative in get_args(annotation):
            yield from _kinds(alternative)
    else:
        yield annotation


def _is_bool(info: FieldInfo) -> bool:
    return bool in _kinds(info.annotation)


def _tuple_length(annotation: Any) -> int:
    """Values in the tuple that the annotation allows; 0 if it allows none."""
    if get_origin(annotation) is tuple:
        return len(get_args(annotation))
    return max(map(_tuple_length, get_args(annotation)), default=0)


# Help


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-\S+?)(/\S+)?: ", r"\1: ", message)
        needs_value = r"\1 needs a value; one that begins with a dash is written \1=VALUE"
        raise UsageError(re.sub(r"^(-\S+): expected one argument$", needs_value, message))


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(get_terminal_size().columns, _HELP_WIDTH)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=_HELP_COLUMN, width=width)


def _make_parser(command: Command) -> _Parser:
    fields = command.fields
    examples = "".join(f"\n  {line}" for line in command.examples)
    argument = "" if command.positional is None else command.positional.upper()
    is_needed = command.positional is not None and fields[command.positional].is_required()
    parser = _Parser(
        prog=f"chairlift {command.name}",
        usage=" ".join(filter(None, ["%(prog)s", argument if is_needed else argument and f"[{argument}]", "[flags]"])),
        description=command.summary,
        epilog=f"A flag is also an environment variable: {command.variable(next(iter(fields)))} for"
        f" {_flag(next(iter(fields)))}.\n\nexamples:{examples}",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_formatter,
    )
    if command.positional is not None:
        text = fields[command.positional].description if is_needed else f"the same as {_flag(command.positional)}"
        group = parser.add_argument_group("argument")
        group.add_argument("argument", metavar=argument, nargs="?", default=None, help=text)
    grouped = {name for names in command.groups.values() for name in names}
    for title, names in {**command.groups, "other": [name for name in fields if name not in grouped]}.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name in fields and not (is_needed and name == command.positional):
                _add_flag(group, name, fields[name])
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this and leave")
    return parser


def _add_flag(group: Any, name: str, info: FieldInfo) -> None:
    default = info.get_default(call_default_factory=True)
    is_shown = not info.is_required() and default is not None and default is not False and default != []
    text = f"{info.description}{f' (default: {_text(default)})' if is_shown else ''}".replace("%", "%%")
    if _is_bool(info):
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
        return
    action = "append" if get_origin(info.annotation) is list else "store"
    group.add_argument(_flag(name), action=action, metavar=_metavar(info.annotation), help=text)


def _metavar(annotation: Any) -> str:
    """`N`, `N|auto`, `A,B`, `float32|bfloat16|auto`."""
    length = _tuple_length(annotation)
    if length:
        return ",".join("ABCDEFGH"[:length])
    forms = (_METAVARS.get(kind) if isinstance(kind, type) else kind for kind in _kinds(annotation))
    return "|".join(dict.fromkeys(filter(None, forms)))


def _text(value: object) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple | list):
        return ",".join(map(_text, value))
    return "on" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


# Complaints


def _complaints(error: ValidationError, command: Command, given: Mapping[str, _Given]) -> list[str]:
    """One line for each setting; the errors of a setting are those of the alternatives that it could be."""
    by_setting: dict[str, list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        by_setting.setdefault(str(each["loc"][0]) if each["loc"] else "", []).append(each)
    return [_complaint(command, setting, errors, given.get(setting)) for setting, errors in by_setting.items()]


def _complaint(command: Command, setting: str, errors: Sequence[ErrorDetails], given: _Given | None) -> str:
    messages = list(dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in errors))
    if not setting:
        return "; ".join(messages)
    if given is None:
        return f"{setting.upper() if setting == command.positional else _flag(setting)} is missing"
    annotation = command.fields[setting].annotation
    length = _tuple_length(annotation)
    if length and (not isinstance(given.value, list) or len(given.value) != length):
        return f"{given.source} must be {length} values separated by commas"
    choices = [kind for kind in _kinds(annotation) if isinstance(kind, str)]
    demands = [_DEMANDS[each["type"]].format_map(each.get("ctx", {})) for each in errors if each["type"] in _DEMANDS]
    if any(each["type"] not in (*_DEMANDS, *_CHOICE_ERRORS) for each in errors):
        return f"{given.source}: {' or '.join(messages)}"
    *most, last = dict.fromkeys([*demands, *choices])
    wanted = f"{', '.join(most)} or {last}" if most else last
    if SecretStr in _kinds(annotation):
        return f"{given.source} must be {wanted}"
    text = _text(given.value)
    return f"{given.source} must be {wanted}, not {text!r}{_suggestion(text, choices)}"
