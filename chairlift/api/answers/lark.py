"""Writes a Lark grammar as one regular expression, if it is regular, so that it can be enforced within a JSON string.

The grammar engine can enforce a regular expression in its JSON form, in which line breaks and quotes are escaped, but a
Lark grammar only as plain text. Grammars of tools that describe a format of lines are regular: no rule contains itself,
except at the beginning or the end of its alternatives, as lists do.

The dialect: https://lark-parser.readthedocs.io/en/stable/grammar.html, with regular expressions of Rust's dialect.
"""

import json
import re
from dataclasses import dataclass, field

MAX_CHARACTERS = 2**16
"""The most characters of a grammar, and of the expression that it becomes."""

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|(?://|\#)[^\n]*)|(?P<directive>%[a-z]+)|(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<name>_*[A-Za-z][A-Za-z0-9_-]*)|(?P<number>\d+)
    |(?P<sign>->|\.\.|[^\s])""",
    re.VERBOSE,
)
_COMMON = {  # of Lark's library
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\b": r"\x08"}
_TOO_LARGE = f"it has more than {MAX_CHARACTERS} characters, or becomes so long as a regular expression"
_REPEATS = {"?": "?", "*": "*", "+": "+"}


class GrammarSyntaxError(ValueError):
    """The grammar is not one of Lark's."""


class NotRegular(ValueError):
    """The grammar cannot be written as a regular expression; says what of it."""


def pattern_of_lark(grammar: str) -> str:
    """The regular expression, in Rust's dialect, whose whole matches are the texts of the grammar's rule `start`.

    Rules are read as a context-free grammar, without a lexer's preference for long terminals. Raises
    `GrammarSyntaxError` or `NotRegular`.
    """
    if len(grammar) > MAX_CHARACTERS:
        raise NotRegular(_TOO_LARGE)
    try:
        return _Expansion(_Parser(grammar).rules()).of_rule("start")
    except RecursionError as error:
        raise NotRegular("it is too deeply nested") from error


def escaped(text: str) -> str:
    """A regular expression that only this text matches."""
    plain = _SPECIAL.sub(lambda match: "\\" + match[0], text)
    return "".join(_CONTROLS.get(char, char) for char in plain)


@dataclass(frozen=True, slots=True)
class _Node:
    """An expression of a grammar: a pattern, a name, a sequence (`kind` "") or a choice of parts; repeated or not."""

    kind: str  # "pattern", "name", "sequence" or "choice"
    text: str = ""
    parts: tuple["_Node", ...] = ()
    repeat: str = ""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    is_first: bool  # in its line


_END = _Token("end", "", is_first=True)


@dataclass(slots=True)
class _Parser:
    """Reads the rules of a grammar."""

    grammar: str
    _tokens: list[_Token] = field(default_factory=list)
    _position: int = 0
    _rules: dict[str, _Node] = field(default_factory=dict)

    def rules(self) -> dict[str, _Node]:
        is_first, depth = True, 0
        for match in _TOKEN.finditer(self.grammar):
            kind = match.lastgroup or ""
            if kind == "blank":
                is_first = is_first or "\n" in match[0]
                continue
            self._tokens.append(_Token(kind, match[0], is_first and not depth))
            depth += (match[0] in ("(", "[")) - (match[0] in (")", "]"))  # a group may go on in the next lines
            is_first = False
        while self._next is not _END:
            self._read_statement()
        return self._rules

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    def _advance(self) -> _Token:
        token = self._next
        self._position += 1
        return token

    def _accept(self, sign: str) -> bool:
        is_next = self._next.text == sign
        self._position += is_next
        return is_next

    def _expect(self, kind: str, sign: str | None = None) -> str:
        token = self._advance()
        if token.kind != kind or sign not in (None, token.text):
            raise GrammarSyntaxError(f"{sign or f'a {kind}'} is missing before {token.text or 'the end'}")
        return token.text

    def _read_statement(self) -> None:
        if self._next.kind == "directive":
            self._read_directive()
            return
        while self._next.text in ("?", "!"):
            self._advance()
        name = self._expect("name")
        if self._accept("."):
            self._expect("number")  # a priority, which only matters to lexers
        if self._next.text == "{":
            raise NotRegular(f"rule {name} has parameters")
        self._expect("sign", ":")
        if name in self._rules:
            raise GrammarSyntaxError(f"rule {name} is defined twice")
        self._rules[name] = self._read_choice()

    def _read_directive(self) -> None:
        directive = self._advance().text
        if directive != "%import":
            raise NotRegular(f"{directive} is used")
        if self._expect("name") != "common":
            raise NotRegular("%import is used for something else than common")
        names = []
        if self._accept("."):
            names = [self._expect("name")]
        else:
            self._expect("sign", "(")
            while not names or self._accept(","):
                names.append(self._expect("name"))
            self._expect("sign", ")")
        new_name = self._expect("name") if self._accept("->") else None
        for name in names:
            if name not in _COMMON:
                raise GrammarSyntaxError(f"common has no {name}")
            self._rules[new_name or name] = _Node("pattern", _COMMON[name])

    def _read_choice(self) -> _Node:
        parts = [self._read_sequence()]
        while self._accept("|"):
            parts.append(self._read_sequence())
        return parts[0] if len(parts) == 1 else _Node("choice", parts=tuple(parts))

    def _read_sequence(self) -> _Node:
        parts: list[_Node] = []
        while not self._next.is_first and self._next.text not in ("|", ")", "]"):
            if self._accept("->"):
                self._expect("name")  # of the branch in a parser's tree
            else:
                parts.append(self._read_repeated())
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=tuple(parts))

    def _read_repeated(self) -> _Node:
        node = self._read_atom()
        while not self._next.is_first and (self._next.text in _REPEATS or self._next.text == "~"):
            sign = self._advance().text
            repeat = _REPEATS.get(sign) or self._read_number_of_times()
            node = _Node("sequence", parts=(node,), repeat=repeat)
        return node

    def _read_number_of_times(self) -> str:
        least = self._expect("number")
        return f"{{{least},{self._expect('number')}}}" if self._accept("..") else f"{{{least}}}"

    def _read_atom(self) -> _Node:
        token = self._advance()
        match token.kind, token.text:
            case "name", name:
                return _Node("name", name)
            case "text", written:
                return self._read_text(written)
            case "pattern", written:
                return _Node("pattern", _pattern_of_literal(written))
            case _, "(":
                return self._read_group(")", "")
            case _, "[":
                return self._read_group("]", "?")
            case _, ("%" | "@" | "<" | "&" | "~"):
                raise NotRegular(f"{token.text} is used")
            case "directive", directive:
                raise NotRegular(f"{directive} is used")
        raise GrammarSyntaxError(f"{token.text or 'the end'} is not expected there")

    def _read_group(self, closing: str, repeat: str) -> _Node:
        inner = self._read_choice()
        self._expect("sign", closing)
        return _Node("sequence", parts=(inner,), repeat=repeat)

    def _read_text(self, written: str) -> _Node:
        text = _text_of_literal(written)
        if self._accept(".."):
            last = _text_of_literal(self._expect("text"))
            if len(text) != 1 or len(last) != 1:
                raise GrammarSyntaxError("a range needs two characters")
            return _Node("pattern", f"[{escaped(text)}-{escaped(last)}]")
        return _Node("pattern", f"(?i:{escaped(text)})" if written.endswith("i") else escaped(text))


def _text_of_literal(written: str) -> str:
    try:
        text = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", written.removesuffix("i")), strict=False)
    except ValueError as error:
        raise GrammarSyntaxError(f"{written} is not a string") from error
    return str(text)


def _pattern_of_literal(written: str) -> str:
    pattern, _, flags = written[1:].rpartition("/")
    known = "".join(sorted({*flags} & {*"imsx"}))
    return f"(?{known}:{pattern})" if known else f"(?:{pattern})"


@dataclass(slots=True)
class _Expansion:
    """Replaces names by what they stand for."""

    rules: dict[str, _Node]
    _open: list[str] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)

    def of_rule(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        if name not in self.rules:
            raise GrammarSyntaxError(f"rule {name} is not defined")
        if name in self._open:
            raise NotRegular(f"rule {name} contains itself")
        self._open.append(name)
        body = self.rules[name]
        alternatives = body.parts if body.kind == "choice" else (body,)
        self._known[name] = self._of_list(name, alternatives) or self._choice(alternatives)
        self._open.pop()
        return self._known[name]

    def _of_list(self, name: str, alternatives: tuple[_Node, ...]) -> str | None:
        """The pattern of a rule with alternatives that all begin, or all end, with the rule itself; None if it has no
        such.
        """
        for index, join in ((0, _first_then_more), (-1, _more_then_last)):
            more = [each for each in alternatives if _name_at(each, index) == name]
            if more:
                others = tuple(each for each in alternatives if _name_at(each, index) != name)
                rest = tuple(
                    _Node("sequence", parts=each.parts[1:] if index == 0 else each.parts[:-1]) for each in more
                )
                return join(self._choice(others), self._choice(rest))
        return None

    def _choice(self, alternatives: tuple[_Node, ...]) -> str:
        if not alternatives:
            raise NotRegular(f"rule {self._open[-1]} has no end")
        return f"(?:{self._joined('|', alternatives)})"

    def _of(self, node: _Node) -> str:
        match node.kind:
            case "pattern":
                pattern = node.text
            case "name":
                pattern = self.of_rule(node.text)
            case "choice":
                pattern = self._choice(node.parts)
            case _:
                pattern = self._joined("", node.parts)
        return f"(?:{pattern}){node.repeat}" if node.repeat else pattern

    def _joined(self, sign: str, nodes: tuple[_Node, ...]) -> str:
        patterns: list[str] = []
        room = MAX_CHARACTERS
        for node in nodes:
            patterns.append(self._of(node))
            room -= len(patterns[-1]) + len(sign)
            if room < 0:
                raise NotRegular(_TOO_LARGE)
        return sign.join(patterns)


def _name_at(node: _Node, index: int) -> str | None:
    """The name at the beginning (0) or end (-1) of a sequence."""
    is_sequence = node.kind == "sequence" and not node.repeat and len(node.parts) > 1
    part = node.parts[index] if is_sequence else None
    return part.text if part is not None and part.kind == "name" else None


def _first_then_more(first: str, more: str) -> str:
    return f"{first}{more}*"


def _more_then_last(last: str, more: str) -> str:
    return f"{more}*{last}"
