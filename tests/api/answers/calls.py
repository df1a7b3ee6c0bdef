"""Holds what tests of calls share: functions and the text of their calls, reading such a text, and driving a
grammar.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from pydantic import BaseModel

import chairlift
from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece

_BUNDLED = Path(chairlift.__file__).parent / "models/bundled/tokenizer.json"

# Tokens of real vocabularies that reach over the seams between a grammar's parts.
_LONG_TOKENS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", ">\\n", '{"', '"name', '":', '": "', '": {"', '", "', '"}'),
    *("}}", "}}\\n", "}\\n</", "}}\\n</tool_call>", "}; ", '}}; {"', '{"name": "', "arguments", "parameters", ", "),
    *("weather", "</parameter>\\n", "<parameter=", "</function>", "[TOOL_CALLS]", "[ARGS]", "city=", "=", "text "),
    *(" <", '"city": "', " [", "]}", "null", "12", "true", " {}"),
]

_END = "</parameter>"  # what ends a free text by itself


class Verdict(Enum):
    COMPLETE = auto()
    INCOMPLETE = auto()  # permitted so far, and more must come
    REFUSED = auto()


class _ByteGreedy:
    """A vocabulary of all bytes, some long tokens and an end, that tokenizes greedily."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += sorted((token.replace("\\n", "\n").encode() for token in _LONG_TOKENS), key=len)
        self.tokens.append(b"<|end|>")
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Longest token first: tokens are in the order of their lengths."""
        ids: list[int] = []
        while text:
            ids.append(max(i for i, token in enumerate(self.tokens) if text.startswith(token)))
            text = text[len(self.tokens[ids[-1]]) :]
        return ids


@cache
def byte_tokenizer() -> LLTokenizer:
    """The bundled model's: 256 bytes and five special tokens."""
    return LLTokenizer(str(_BUNDLED), eos_token=257)


@cache
def long_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteGreedy()))


def judge(grammar: str, text: str, tokenizer: LLTokenizer | None = None) -> Verdict:
    tokenizer = tokenizer or byte_tokenizer()
    matcher = _matcher(grammar, tokenizer)
    ids = tokenizer.tokenize_str(text)
    if matcher.try_consume_tokens(ids) < len(ids):
        return Verdict.REFUSED
    return Verdict.COMPLETE if matcher.is_accepting() else Verdict.INCOMPLETE


def generate(
    grammar: str, random: Random, tokenizer: LLTokenizer, begin: str = "", budget: int = 300, end: str = _END
) -> str:
    """A random text of the grammar. What ends things is chosen half of the time, and whenever the budget is spent.

    `end`: what ends a free text by itself.
    """
    matcher = _matcher(grammar, tokenizer)
    ids = tokenizer.tokenize_str(begin)
    assert matcher.consume_tokens(ids)
    enders = set(tokenizer.eos_tokens) | {tokenizer.tokenize_str(text)[0] for text in '"}])>'}
    end_of_text = tokenizer.tokenize_str(end)
    while not matcher.is_stopped():
        if random.random() < 0.05 and matcher.validate_tokens(end_of_text) == len(end_of_text):
            assert matcher.consume_tokens(end_of_text)
            ids += end_of_text
            continue
        permitted = _permitted(matcher)
        ending = [token for token in permitted if token in enders]
        is_ended = ending and (len(ids) > budget or random.random() < 0.5)
        token = random.choice(ending if is_ended else permitted)
        assert matcher.consume_token(token), matcher.get_error()
        if token in tokenizer.eos_tokens:
            break
        ids.append(token)
        assert len(ids) < 10 * budget
    assert not matcher.is_error(), matcher.get_error()
    return tokenizer.decode_bytes(ids).decode()


def _matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def _permitted(matcher: LLMatcher) -> Sequence[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [token for token in range(mask.bit_length()) if mask >> token & 1]


# Harmony has no calls among text, but messages: test_harmony.py.
FAMILIES = pytest.mark.parametrize("family", [family for family in ToolFamily if family is not ToolFamily.HARMONY])
JSON_FAMILIES = pytest.mark.parametrize("family", [ToolFamily.HERMES, ToolFamily.LLAMA3_JSON, ToolFamily.MISTRAL])
TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_tokenizer(), long_tokenizer()], ids=["bytes", "long tokens"])


class Place(BaseModel, extra="forbid", strict=True):
    city: str
    tags: list[str]


class WeatherArguments(BaseModel, extra="forbid", strict=True):
    """Its schema has a `$ref` into `$defs`."""

    place: Place
    days: int


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
WEATHER = FunctionSpec("weather", WeatherArguments.model_json_schema(), strict=True, description="The forecast.")
WEATHER_2 = FunctionSpec("weather_2", {"type": "object", "properties": {"n": NUMBER}}, True, None)
SEARCH = FunctionSpec("search", {"type": "object", "required": ["q"], "properties": {"q": TEXT}}, False, None)
ANYTHING = FunctionSpec("anything", {}, strict=False, description=None)
FUNCTIONS = [WEATHER, WEATHER_2, SEARCH, ANYTHING]
ARGUMENTS = '{"place": {"city": "Rome", "tags": ["a", "b"]}, "days": 3}'


def call_text(family: ToolFamily, name: str, arguments: str) -> str:
    """One call. Of Mistral's two ways: the list."""
    return calls_text(family, (name, arguments))


def calls_text(family: ToolFamily, *calls: tuple[str, str]) -> str:
    match family:
        case ToolFamily.HERMES:
            return "\n".join(f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a in calls)
        case ToolFamily.LLAMA3_JSON:
            return "; ".join(f'{{"name": "{f}", "parameters": {a}}}' for f, a in calls)
        case ToolFamily.MISTRAL:
            objects = [f'{{"name": "{f}", "arguments": {a}}}' for f, a in calls]
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case ToolFamily.QWEN3_CODER:
            return "\n".join(f"<tool_call>\n<function={f}>\n{_elements(a)}</function>\n</tool_call>" for f, a in calls)
        case ToolFamily.SEED_OSS:
            inner = (f"<function={f}>\n{_elements(a, '')}</function>" for f, a in calls)
            return "\n".join(f"<seed:tool_call>\n{each}\n</seed:tool_call>" for each in inner)
        case ToolFamily.PYTHONIC:
            return "[" + ", ".join(f"{f}({_keywords(a)})" for f, a in calls) + "]"
        case ToolFamily.HARMONY:
            return "".join(f" to=functions.{f}<|channel|>commentary json<|message|>{a}<|call|>" for f, a in calls)


def _elements(arguments: str, padding: str = "\n") -> str:
    values = {key: value if isinstance(value, str) else _json(value) for key, value in json.loads(arguments).items()}
    return "".join(f"<parameter={key}>{padding}{value}{padding}</parameter>\n" for key, value in values.items())


def _keywords(arguments: str) -> str:
    return ", ".join(f"{key}={_json(value)}" for key, value in json.loads(arguments).items())


_json = partial(json.dumps, ensure_ascii=False)
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["weather", "weathers", "Bob"]}, "age": {"$ref": "#/$defs/Age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"Age": {"type": "integer"}},
}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NO_SCHEMAS: Schemas = {}
Table = Mapping[str, Sequence[str | Call]]
"""By text: what is read out of it, content and calls in order."""


def read(
    family: ToolFamily, texts: Iterable[str], max_calls: int | None = None, schemas: Schemas = NO_SCHEMAS
) -> list[Piece]:
    """All pieces, as they came."""
    reader = AnswerReader(family, max_calls, schemas)
    pieces = [piece for text in texts for piece in reader.push(text)]
    return pieces + reader.push("", is_last=True)


def assert_streams(reader: AnswerReader, *steps: tuple[str, list[Piece]]) -> None:
    """Each text brings just these pieces."""
    assert [(text, reader.push(text)) for text, _ in steps] == list(steps)


def joined(pieces: Sequence[Piece]) -> list[str | Call]:
    """Content as strings and calls as `Call`s, in order. Checks that pieces keep to their rules."""
    items: list[str | Call] = []
    num_calls = 0
    for piece in pieces:
        last = items[-1] if items else None
        match piece:
            case ContentPiece(text):
                assert text
                items[-1:] = [last + text] if isinstance(last, str) else [*items[-1:], text]
            case CallPiece(index, None, arguments):
                assert arguments
                assert index == num_calls - 1
                assert isinstance(last, Call)
                items[-1] = Call(last.name, last.arguments + arguments)
            case CallPiece(index, name, arguments):
                assert index == num_calls
                assert name
                num_calls += 1
                items.append(Call(name, arguments))
    return items


def every_split(
    family: ToolFamily, text: str, max_calls: int | None = None, schemas: Schemas = NO_SCHEMAS
) -> list[str | Call]:
    """Returns what is read, whole or cut in two anywhere or in single characters: always the same."""
    ways = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    first, *others = (joined(read(family, texts, max_calls, schemas)) for texts in ways)
    assert all(each == first for each in others)
    return first


def read_whole(family: ToolFamily, text: str, max_calls: int | None = None) -> list[str | Call]:
    return joined(read(family, [text], max_calls))


def calls_of(items: Iterable[str | Call]) -> list[Call]:
    return [item for item in items if isinstance(item, Call)]
