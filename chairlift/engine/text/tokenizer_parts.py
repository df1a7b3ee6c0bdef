"""Holds what a checkpoint's files say of its tokenizer, whichever library has read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

PLAIN_CLASS = "TokenizersBackend"
"""transformers' name for a tokenizer that is all in its tokenizer.json."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Holds a tokenizer, and what chat templates and clients ask about it."""

    backend: BackendTokenizer  # neither truncates nor pads
    special_tokens: Mapping[str, str]  # by transformers' names, such as eos_token; templates see them
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None = None  # several by their names
    class_name: str = PLAIN_CLASS
    declarations: Mapping[str, Any] = field(default_factory=dict)  # how answers are written: see `DECLARATIONS`


DECLARATIONS = ("response_template", "response_schema")
"""Fields of a tokenizer_config.json that describe answers; the second is older."""
