"""Driving a grammar as a sampler does: which texts it takes, and what comes of choosing among the tokens it permits."""

from collections.abc import Sequence
from enum import Enum, auto
from functools import cache
from pathlib import Path
from random import Random

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import chairlift

_BUNDLED = Path(chairlift.__file__).parent / "models/bundled/tokenizer.json"

# Tokens of real vocabularies that reach over the seams between a grammar's parts.
_LONG_TOKENS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call",
        ">\\n",
        '{"',
        '"name',
        '":',
        '": "',
        '": {"',
        '", "',
        '"}',
        "}}",
    ),
    *(
        "}}\\n",
        "}\\n</",
        "}}\\n</tool_call>",
        "}; ",
        '}}; {"',
        '{"name": "',
        "arguments",
        "parameters",
        "weather",
        ", ",
    ),
    *("</parameter>\\n", "<parameter=", "</function>", "[TOOL_CALLS]", "[ARGS]", "city=", "="),
    *("text ", " <", '"city": "', " [", "]}", "null", "12", "true", " {}"),
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
        """Longest token first."""
        ids = []
        while text:
            ids.append(
                max((i for i, t in enumerate(self.tokens) if text.startswith(t)), key=lambda i: len(self.tokens[i]))
            )
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


def generate(grammar: str, random: Random, tokenizer: LLTokenizer, begin: str = "", budget: int = 300) -> str:
    """A random text of the grammar. What ends things is chosen half of the time, and whenever the budget is spent."""
    matcher = _matcher(grammar, tokenizer)
    ids = tokenizer.tokenize_str(begin)
    assert matcher.consume_tokens(ids)
    enders = set(tokenizer.eos_tokens) | {tokenizer.tokenize_str(text)[0] for text in '"}])>'}
    end_of_text = tokenizer.tokenize_str(_END)
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
