"""Limits of what rendering a chat template may cost: checkpoints bring templates, and anyone makes checkpoints.

jinja's sandbox keeps templates from running code, but lets them loop for hours and make texts of any size.
`LimitedSandbox` prices what a template does before it is done, in units of about a byte: turns of loops, calls, texts
and lists that are made. A rendering has `_MAX_UNITS`, and `_MAX_CPU_S` of its thread's processor time. Outside of
`limited`, nothing is limited.

Not limited is the time of a single operation on values within these sizes, such as comparing deeply nested lists.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MAX_UNITS = 2**28
_MAX_CPU_S = 2.0  # the largest well-meant conversations take a tenth of a second
_MAX_BITS = 2**16  # of an integer
_OF_NODE = 32  # units: a call, a turn of a loop, an element that is printed
_OF_ITEM = 8  # units: an element of a list that is copied
_OF_PART = 8  # units: each character of a text that is split, as every one might become a part
_PER_LOOK = 64  # operations between two looks at the clock

_SPEND, _JOIN, _SLICED = "chairlift_spend", "chairlift_join", "chairlift_sliced"
# A field of a format whose width has six digits, or is an argument.
_WIDE_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #.0-9]*(?:[0-9]{6}|\*)|\{[^{}]*:[^{}]*(?:[0-9]{6}|\{)")
_MAX_FORMAT = 2**14  # characters: they are searched in quadratic time
_SPLITTING = {"split", "rsplit", "splitlines"}
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"}
_CHEAP_FILTERS = {"length", "count", "first", "last", "default", "d", "attr", "abs", "int", "float", "random", "safe"}
_LIST_FILTERS = {"list", "map", "select", "reject", "selectattr", "rejectattr", "reverse", "items", "batch", "slice"}
_SORTING_FILTERS = {"sort", "unique", "groupby", "min", "max", "sum"}
_MULTIPLYING_FILTERS = {"wordwrap", "urlize", "indent"}


class TemplateTooCostly(TemplateRuntimeError):
    """A rendering that exceeds its limits."""


class _Budget:
    """Counts down what a rendering may still spend."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._left = _MAX_UNITS
        self._until_look = _PER_LOOK

    def spend(self, units: int) -> None:
        self._left -= units
        self._until_look -= 1
        if self._left < 0:
            raise TemplateTooCostly("it makes more than a template may: too many turns of loops, or too large texts")
        if self._until_look < 0:
            self._until_look = _PER_LOOK
            if time.thread_time() > self.deadline:
                raise TemplateTooCostly(f"it takes more than {_MAX_CPU_S:g} seconds")


_budget: ContextVar[_Budget | None] = ContextVar("template budget", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Limits what templates do within: TemplateTooCostly if it is too much. Within another, its time is the other's."""
    outer = _budget.get()
    before = _budget.set(_Budget(time.thread_time() + _MAX_CPU_S if outer is None else outer.deadline))
    try:
        yield
    finally:
        _budget.reset(before)


def release(error: BaseException) -> None:
    """Frees all that a template had made when it failed.

    The traceback that jinja makes is part of a cycle, so that without this it would stay until the next collection.
    """
    trace = error.__traceback__
    error.with_traceback(None)
    while trace is not None:
        frame: FrameType | None = trace.tb_frame
        while frame is not None:
            try:
                frame.clear()
            except RuntimeError:  # it is running, and so are those that called it
                break
            frame = frame.f_back
        trace = trace.tb_next


def spend(units: int) -> None:
    if (budget := _budget.get()) is not None:
        budget.spend(units)


def _spend_on_text(value: Any, indent: int = 0) -> None:
    """Spends what the text of a value may take, which contains an element as often as it is referred to."""
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, Namespace):
            each = each._Namespace__attrs
        if isinstance(each, str | bytes):
            spend(len(each) + 2)
        elif isinstance(each, Collection):
            spend((_OF_NODE + indent * depth) * (1 + len(each)))
            waiting += [(item, depth + 1) for item in each]
            if isinstance(each, dict):
                waiting += [(item, depth + 1) for item in each.values()]
        else:
            spend(_OF_NODE)


def _as_text(value: Any) -> str:
    """As `str`. Spends what the text takes."""
    if isinstance(value, str):
        spend(len(value))
        return value
    _spend_on_text(value)
    return str(value)


def _size(value: Any) -> int:
    """Units of a copy of a text or list; 0 for others."""
    if isinstance(value, str | bytes):
        return len(value)
    return _OF_ITEM * len(value) if isinstance(value, list | tuple | dict) else 0


def _integers(*values: Any) -> int:
    return sum(value for value in values if isinstance(value, int) and value > 0)


def _extent(*values: Any) -> int:
    """The integers and the lengths of the texts among arguments, and in tuples of them."""
    flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
    return _integers(*flat) + sum(len(each) for each in flat if isinstance(each, str))


def _spend_on_format(text: Any, marks: int, *values: Any) -> None:
    """`marks`: how many values the text may show."""
    if len(text) > _MAX_FORMAT or _WIDE_FIELD.search(str(text)):
        raise TemplateTooCostly("it formats with a very long format, a width of six digits, or a computed one")
    spend(len(text))
    for _ in range(marks):
        _spend_on_text(values)


def _spend_on_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        spend(_size(left) + _size(right))
    elif operator == "%":
        if isinstance(left, str | bytes):
            _spend_on_format(left, str(left).count("%"), right)
    elif isinstance(left, int) and isinstance(right, int):
        if (left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()) > _MAX_BITS:
            raise TemplateTooCostly(f"it computes a number of more than {_MAX_BITS} bits")
    elif operator == "*":
        spend(_size(left) * _integers(right) + _size(right) * _integers(left))


def _spend_on_method(method: str, of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Spends on a call of a method of a text or number; returns the arguments to call it with."""
    if method == "join" and args:
        args = (list(args[0]), *args[1:])  # it may be a generator
        _spend_on_text(args[0])
        spend(len(of) * len(args[0]))
    elif method == "replace" and len(args) > 1:
        spend(len(of) + of.count(args[0]) * len(args[1]))
    elif method in _PADDING:
        tabs = of.count("\t") if method == "expandtabs" and isinstance(of, str) else 1
        spend(_size(of) + tabs * _integers(*args, *kwargs.values()))
    elif method in ("format", "format_map"):
        _spend_on_format(of, of.count("{"), args, kwargs)
    elif method == "translate":
        spend(len(of) * max((_size(value) for value in dict(args[0]).values()), default=1))
    else:
        spend(_size(of) * (_OF_PART if method in _SPLITTING else 1))
    return args


def _spend_on_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Spends on applying a filter; returns the value to apply it to."""
    given = (*args, *kwargs.values())
    spend(_OF_NODE)
    if name in _CHEAP_FILTERS:
        return value
    if name in _LIST_FILTERS:
        spend(_size(value) * (1 if isinstance(value, list | tuple | dict) else _OF_PART) + _OF_ITEM * _integers(*given))
    elif name == "round":
        spend(_integers(*given) << 14)  # it computes that power of ten
    elif name == "format":
        _spend_on_format(_as_text(value), str(value).count("%"), given)
    elif name == "tojson":
        _spend_on_text(value, _extent(*given))
    elif name == "replace":
        value = _as_text(value)
        old, new = (_as_text(each) for each in (*given, "", "")[:2])
        spend(value.count(old) * len(new))
    elif name == "join":
        value = list(value)
        _spend_on_text(value)
        spend(_extent(*given) * len(value))
    elif name in _MULTIPLYING_FILTERS:
        value = _as_text(value)
        spend((value.count("\n") + 1 if name == "indent" else len(value)) * _extent(*given))
    else:
        value = list(value) if name in _SORTING_FILTERS and isinstance(value, Iterator) else value
        _spend_on_text(value)
        spend(_integers(*given))
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends before it does anything."""
    at = int(hasattr(function, "jinja_pass_arg"))  # an argument before the value

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value = _spend_on_filter(name, args[at], args[at + 1 :], kwargs)
        return function(*args[:at], value, *args[at + 1 :], **kwargs)

    guarded.__dict__["is_guarded"] = True
    return guarded


@pass_context  # so that it is not computed while the template is compiled
def _spend_in_template(_: Context, units: int) -> bool:
    spend(units)
    return True


@pass_context
def _join(_: Context, values: list[Any]) -> str:
    return "".join(map(_as_text, values))


@pass_context
def _sliced(_: Context, value: Any) -> Any:
    spend(_size(value))
    return value


_OWN_FILTERS = {_SPEND: _spend_in_template, _JOIN: _join, _SLICED: _sliced}


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which templates spend a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, finalize=_as_text)
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _spend_on_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        spend(_OF_NODE)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
        of = getattr(method, "__self__", None)
        if isinstance(of, str | bytes | int):
            args = _spend_on_method(method.__name__, of, args, kwargs)
        else:
            spend(_size(of))
        return super().call(context, obj, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        for name, function in self.filters.items():
            if not getattr(function, "is_guarded", False):
                self.filters[name] = _guarded(name, function)
        self.filters.update(_OWN_FILTERS)
        return super()._generate(_Pricing().visit(source), *args, **kwargs)


class _Pricing(NodeTransformer):
    """Has a template spend where the sandbox does not see what it does: in loops, macros, joined texts and slices."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOIN)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._spend_in(node)
        if node.test is not None:
            node.test = nodes.And(self._spending(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._spend_in(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._spend_in(node)

    def _spend_in(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        spending = nodes.ExprStmt(self._spending(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, spending)
        return node

    def _spending(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Expr:
        return _filtered(nodes.Const(_OF_NODE + sum(map(_units_of, node.body)), lineno=node.lineno), _SPEND)


def _units_of(node: nodes.Node) -> int:
    """Units of the texts and lists that are written in a part of a template."""
    own = len(node.data) if isinstance(node, nodes.TemplateData) else 0
    if isinstance(node, nodes.Const):
        own = _size(node.value)
    elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
        own = _OF_NODE + _OF_ITEM * len(node.items)
    return own + sum(map(_units_of, node.iter_child_nodes()))


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
