"""Renders chat templates as transformers does, whose functions and variables templates are written for.

https://huggingface.co/docs/transformers/chat_templating says what a template may use. transformers takes seconds of
processor time to import; tests compare with it. Templates run in `LimitedSandbox`, and see plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from chairlift.engine.text.template_limits import LimitedSandbox

RESERVED = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "kwargs", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"),
    }
)
"""Names that are no variables of a template: arguments of rendering, here or in transformers."""

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names for the same field; the first is today's
_WITH_TOOLS, _DEFAULT = "tool_use", "default"  # names of templates, where there are several
_MAX_DEPTH = 256  # of lists and objects in each other
_END = "<chairlift-end-of-open-message> "  # its space tells whether the template strips messages


class ChatRenderer:
    """Renders a template, or the right one of several. Its methods may be called from any thread."""

    def __init__(self, template: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables that templates see, such as `bos_token`."""
        self._sources = {_DEFAULT: template} if isinstance(template, str) else dict(template)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        arguments: Mapping[str, Any],
    ) -> str:
        """Renders a conversation. `arguments`: variables of the template.

        TemplateError, ValueError, TypeError and others, as templates raise them, for messages that it does not take.
        """
        given = [_prepare(message) for message in messages]
        end = ""
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("the last message cannot be continued and be followed by the beginning of another")
            given[-1], end = _open(given[-1])
        rendered = self._compile(tools is not None).render(
            messages=given,
            tools=_plain(tools),
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **_plain(dict(arguments))},
        )
        return _cut(rendered, end) if continue_final_message else rendered

    def _compile(self, has_tools: bool) -> Template:
        """Compiles a template once; another thread may do the same meanwhile."""
        name = _WITH_TOOLS if has_tools and _WITH_TOOLS in self._sources else _DEFAULT
        if name not in self._sources:
            raise ValueError(f"there is no template named {name}, only {', '.join(sorted(self._sources))}")
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self._sources[name])
        return self._compiled[name]


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a message: without fields that are null, which some templates print, and with thoughts by all names."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is an object, not {type(message).__name__}")
    given: dict[str, Any] = {name: value for name, value in _plain(message).items() if value is not None}
    thoughts = next((given[name] for name in _THOUGHTS if name in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}


def _plain(value: Any, depth: int = 0) -> Any:
    """Copies data into plain types, since a template can call any method that it sees.

    TypeError for other objects, ValueError for lists in lists that are too deep.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # enums and such
        if isinstance(value, kind):
            return str.__str__(value) if isinstance(value, str) else kind(value)
    if depth == _MAX_DEPTH:
        raise ValueError(f"they are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {_plain(name, depth + 1): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item, depth + 1) for item in value)
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic's models
        return _plain(dump(), depth + 1)
    raise TypeError(f"a template takes plain data, not {type(value).__name__}")


def _open(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Marks the end of a message's text; returns that text as well. ValueError if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END}, content
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], dict) and isinstance(text := parts[at].get("text"), str):
            parts[at] = {**parts[at], "text": text + _END}
            return {**message, "content": parts}, text
    raise ValueError("the last message has no text to continue")


def _cut(rendered: str, text: str) -> str:
    """Cuts a rendering where the last message's text ends. ValueError if that is not in it."""
    before, mark, after = rendered.rpartition(_END.strip())
    if not mark or text.strip() not in before:
        raise ValueError("the last message cannot be continued: the template changes or leaves out its text")
    return before if after.startswith(" ") else before.rstrip()


def _environment() -> LimitedSandbox:
    environment = LimitedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Takes the place of jinja's filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """Stands for the type `dict`, so that templates reach none of a type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Refuses the names of Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # so that a name may be "self"
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot give a namespace the attribute {name!r}; rename it")


class _Generation(Extension):
    """Renders what is between `generation` and `endgeneration`, which marks answers for training, as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
