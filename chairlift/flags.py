"""Command-line flags and environment variables, derived from pydantic models.

A field `max_batch_size` of the command `serve` is the flag `--max-batch-size`, the environment variable
`CHAIRLIFT_SERVE__MAX_BATCH_SIZE` and a line of the file that `--config` names; the flag wins over the variable, and the
variable over the file. The field's description is the flag's help, and the model validates. A `ConfigurationError` has
one line for each mistake.
"""

import argparse
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from chairlift.errors import ConfigurationError
from chairlift.settings_file import read_settings_file

if TYPE_CHECKING:
    from chairlift.__main__ import Command

logger = logging.getLogger(__name__)

_HELP_COLUMN = 32
_HELP_WIDTH = 110
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE", SecretStr: "KEY"}
_DEMANDS = {  # pydantic's error types, in words that follow "must be"
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "finite_number": "a finite number",
    "byte_size": "a number of bytes, such as 512MiB or 8GB",
}
_LINKS = ("tcp://", "udp://", "sctp://")  # how values begin that Kubernetes sets for a service of such a name
_LONGEST = "longest list"  # the last setting whose flag was followed by several words
_FILE = "config"  # the setting that names a file with others; no command's model has it
_NEEDLESS = {  # flags of vLLM that say what always holds here
    "--enable-auto-tool-choice": "tool calls are always read",
    "--enable-chunked-prefill": "long prompts are always computed in chunks",
}
_FORM_ERRORS = ("literal_error", "enum", "missing", "too_long")  # listing the allowed values is enough


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting's value as the user wrote it, and where. In a file it may be of another type than text."""

    value: Any
    source: str


def read_settings(command: "Command", arguments: Sequence[str]) -> tuple[Any, ...]:
    """Makes an instance of each of the command's models. `ConfigurationError` if a setting is wrong."""
    flags = _read_flags(command, arguments)  # first, so that `--help` works even if a variable is wrong
    variables = _read_variables(command)
    named = flags.pop(_FILE, variables.pop(_FILE, None))
    given = (_read_file(command, Path(named.value)) if named else {}) | variables | flags
    settings: list[BaseModel] = []
    complaints: list[str] = []
    for model in _models_of(command):
        known = _fields_of_model(model)
        try:
            settings.append(model.model_validate({name: each.value for name, each in given.items() if name in known}))
        except ValidationError as error:
            complaints += _complaints(error, command, given)
    if complaints:
        raise ConfigurationError("\n".join(complaints))
    return tuple(settings)


def fields_of(command: "Command") -> dict[str, FieldInfo]:
    """All settings of a command, by the names that users see."""
    return {name: info for model in _models_of(command) for name, info in _fields_of_model(model).items()}


def _models_of(command: "Command") -> list[type[BaseModel]]:
    return [resolve_name(name) for name in command.models]


def _fields_of_model(model: type[BaseModel]) -> dict[str, FieldInfo]:
    fields = model.model_fields.items()
    return {info.validation_alias if isinstance(info.validation_alias, str) else name: info for name, info in fields}


def _variable(command: "Command", setting: str) -> str:
    return f"CHAIRLIFT_{command.name}__{setting}".upper().replace("-", "_")


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _suggestion(word: str, known: Iterable[str], otherwise: str = "") -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else otherwise


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields what a value may be: types, the values of enums and literals, and for a tuple its parts' metavars."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(member.value) for member in annotation)
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) is tuple:
        yield ",".join(map(_metavar, get_args(annotation)))
    elif get_args(annotation):
        for alternative in get_args(annotation):
            yield from _kinds(alternative)
    else:
        yield annotation


def _metavar(annotation: Any) -> str:
    """`N`, `N|auto`, `X,X`, `float32|bfloat16|auto`."""
    forms = (_METAVARS.get(kind) if isinstance(kind, type) else kind for kind in _kinds(annotation))
    return "|".join(dict.fromkeys(filter(None, forms)))


def _holds_several(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple) or any(map(_holds_several, get_args(annotation)))


# Reading


def _read_variables(command: "Command") -> dict[str, _Given]:
    names = {_variable(command, setting): setting for setting in (*fields_of(command), _FILE)}
    misspelt = {name.replace("__", "_", 1): name for name in names}
    given: dict[str, _Given] = {}
    for variable, text in os.environ.items():
        known = variable.upper()  # case-insensitive
        if known in names:
            if names[known] in given:
                raise ConfigurationError(f"{given[names[known]].source} and {variable} are the same; unset one of them")
            given[names[known]] = _given(command, names[known], [text], variable)
        elif known.startswith(_variable(command, "")):
            raise ConfigurationError(f"unknown environment variable {variable}{_suggestion(known, names)}")
        elif known in misspelt and not text.startswith(_LINKS):
            raise ConfigurationError(f"unknown environment variable {variable}; did you mean {misspelt[known]}?")
    return given


def _read_file(command: "Command", path: Path) -> dict[str, _Given]:
    synonyms, known = _synonyms(command), fields_of(command)
    given: dict[str, _Given] = {}
    for written, value in read_settings_file(path).items():
        name = synonyms.get(written, written)
        if name not in known:
            raise ConfigurationError(f"{path}: unknown setting {written}{_suggestion(written, known)}")
        if name in given:
            raise ConfigurationError(f"{path}: {written} and {name} are the same; leave one of them out")
        if name != written:
            logger.warning("%s: %s is another program's name for %s", path, written, name)
        if isinstance(value, str):
            given[name] = _given(command, name, [value], f"{path}: {name}")
        else:
            given[name] = _Given(value, f"{path}: {name}")
    return given


def _synonyms(command: "Command") -> dict[str, str]:
    """Returns the settings by the names that other programs have for them."""
    extras = ((name, info.json_schema_extra) for name, info in fields_of(command).items())
    return {str(extra["synonym"]): name for name, extra in extras if isinstance(extra, dict) and "synonym" in extra}


def _in_own_names(command: "Command", arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with other programs' flags replaced by ours, or left out where they change nothing."""
    synonyms = {_flag(theirs): _flag(ours) for theirs, ours in _synonyms(command).items()}
    words: list[str] = []
    for word in arguments:
        flag, is_joined, value = word.partition("=")
        if flag in synonyms:
            logger.warning("%s is another program's name for %s", flag, synonyms[flag])
            words.append(f"{synonyms[flag]}={value}" if is_joined else synonyms[flag])
        elif word in _NEEDLESS and command.name == "serve":
            logger.warning("%s is not needed: %s", word, _NEEDLESS[word])
        else:
            words.append(word)
    return words


def _read_flags(command: "Command", arguments: Sequence[str]) -> dict[str, _Given]:
    parser = _make_parser(command)
    namespace, rest = parser.parse_known_intermixed_args(_in_own_names(command, arguments))
    _move_argument_from_lists(command, namespace)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
    see_help = f"; see chairlift {command.name} --help"
    if unknown:
        lines = (f"unknown flag {flag}{_suggestion(flag, parser.flags, see_help)}" for flag in unknown)
        raise ConfigurationError("\n".join(lines))
    if rest:
        raise ConfigurationError(f"unexpected argument {rest[-1]!r}{see_help}")
    texts: dict[str, Any] = vars(namespace)
    for setting in command.positionals:
        argument = texts.pop(_argument(setting))
        if argument is not None and setting in texts:
            raise ConfigurationError(f"both {argument!r} and {_flag(setting)} are given; leave one of them out")
        if argument is not None:
            texts[setting] = argument
    return {
        name: _given(command, name, value if isinstance(value, list) else [str(value)], _flag(name))
        for name, value in texts.items()
    }


def _move_argument_from_lists(command: "Command", namespace: argparse.Namespace) -> None:
    """Moves the last of several words that follow a list's flag to the argument, if that is given nowhere else."""
    texts: dict[str, Any] = vars(namespace)
    longest = texts.pop(_LONGEST, None)
    if not longest:
        return
    absent = (each for each in command.positionals if each not in texts and texts[_argument(each)] is None)
    if (setting := next(absent, None)) is not None:
        texts[_argument(setting)] = texts[longest].pop()


def _argument(setting: str) -> str:
    """The parser's name of a setting whose flag is left out."""
    return f"argument {setting}"


def _given(command: "Command", setting: str, texts: Sequence[str], source: str) -> _Given:
    """Splits the values of list and tuple settings at commas."""
    if setting == _FILE or not _holds_several(fields_of(command)[setting].annotation):
        return _Given(texts[-1], source)
    return _Given([part.strip() for part in ",".join(texts).split(",")], source)


# Help


class _Once(argparse.Action):
    """Stores a value, and refuses a second one: the user may not know which of them counts."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        _refuse_second(namespace, self.dest)
        setattr(namespace, self.dest, values)


class _SwitchOnce(argparse.BooleanOptionalAction):
    """The same for a flag that is on or off."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        _refuse_second(namespace, self.dest)
        super().__call__(parser, namespace, values, option)


class _Extend(argparse.Action):
    """Adds one or more words to a list."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])
        if len(values) > 1:
            setattr(namespace, _LONGEST, self.dest)


def _refuse_second(namespace: argparse.Namespace, setting: str) -> None:
    if hasattr(namespace, setting):
        raise ConfigurationError(f"{_flag(setting)} is given twice; leave one of them out")


class _Parser(argparse.ArgumentParser):
    flags: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-\S+?)(/\S+)?: ", r"\1: ", message)
        needs_value = r"\1 needs a value; one that begins with a dash is written \1=VALUE"
        raise ConfigurationError(re.sub(r"^(-\S+): expected one argument$", needs_value, message))


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(get_terminal_size().columns, _HELP_WIDTH)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=_HELP_COLUMN, width=width)


def _make_parser(command: "Command") -> _Parser:
    fields = fields_of(command)
    parser = _Parser(
        prog=f"chairlift {command.name}",
        description=command.summary,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_formatter,
    )
    words: list[str] = []
    arguments = parser.add_argument_group("arguments" if len(command.positionals) > 1 else "argument")
    for setting in command.positionals:
        word, is_needed = setting.upper(), fields[setting].is_required()
        text = fields.pop(setting).description if is_needed else f"the same as {_flag(setting)}"
        words.append(word if is_needed else f"[{word}]")
        arguments.add_argument(_argument(setting), metavar=word, nargs="?", default=None, help=text)
    parser.usage = " ".join(["%(prog)s", *words, "[flags]"])
    titles = {setting: title for title, setting in command.groups.items()}
    group = parser.add_argument_group("flags")
    flags: list[str] = []
    for name, info in fields.items():
        if name in titles:
            group = parser.add_argument_group(titles[name])
        flags += _add_flag(group, name, info).option_strings
    parser.flags = [*flags, _flag(_FILE)]
    first = next(iter(fields))
    sample = f"A flag is also an environment variable: {_variable(command, first)} for {_flag(first)}."
    parser.epilog = "\n  ".join([f"{sample}\n\nexamples:", *command.examples])
    file = parser.add_argument_group("file")
    text = "TOML or YAML file with settings by the names of flags, such as port = 8000; flags and variables win over it"
    file.add_argument(_flag(_FILE), metavar="FILE", action=_Once, help=text)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser


def _add_flag(group: Any, name: str, info: FieldInfo) -> argparse.Action:
    default = info.get_default(call_default_factory=True)
    is_shown = not info.is_required() and default is not None and default is not False and default != []
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    text = f"{info.description}{f' (default: {shown})' if is_shown else ''}".replace("%", "%%")
    kind: dict[str, Any] = {"metavar": _metavar(info.annotation), "action": _Once}
    if bool in _kinds(info.annotation):
        kind = {"action": _SwitchOnce}
    elif get_origin(info.annotation) is list:
        kind |= {"action": _Extend, "nargs": "+"}
    short = info.json_schema_extra.get("flag") if isinstance(info.json_schema_extra, dict) else None
    names = [_flag(name), *([str(short)] if short else [])]
    action: argparse.Action = group.add_argument(*names, help=text, **kind)
    return action


# Complaints


def _complaints(error: ValidationError, command: "Command", given: Mapping[str, _Given]) -> list[str]:
    """One line for each setting, which combines the errors of all types that the setting may have."""
    by_setting: dict[str, list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        by_setting.setdefault(str(each["loc"][0]) if each["loc"] else "", []).append(each)
    return [_complaint(command, setting, errors, given.get(setting)) for setting, errors in by_setting.items()]


def _complaint(command: "Command", setting: str, errors: Sequence[ErrorDetails], given: _Given | None) -> str:
    known = (*_DEMANDS, *_FORM_ERRORS)
    others = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in errors if each["type"] not in known)
    if not setting:
        return "; ".join(others)
    if given is None:
        return f"{setting.upper() if setting in command.positionals else _flag(setting)} is missing"
    if others:
        return f"{given.source}: {' or '.join(others)}"
    words = [kind for kind in _kinds(fields_of(command)[setting].annotation) if isinstance(kind, str)]
    demands = [_DEMANDS[each["type"]].format_map(each.get("ctx", {})) for each in errors if each["type"] in _DEMANDS]
    *most, last = dict.fromkeys(demands + words)
    text = ",".join(map(str, given.value)) if isinstance(given.value, list) else str(given.value)
    wanted = f"{', '.join(most)} or {last}" if most else last
    return f"{given.source} must be {wanted}, not {text!r}{_suggestion(text, words)}"
