"""Collects the tokens at which a model's answers end: all that its files name.

A checkpoint names them in three places: generation_config.json, config.json and the tokenizer. Those who change one of
them often forget the others. An end that is missed lets every answer run on. One too many ends nothing, if it is a
special token that the model does not write within an answer.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.engine.text.defaults import read_json
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import CheckpointError, shown
from chairlift.models.gguf import is_gguf, open_gguf
from chairlift.models.gguf.families import end_tokens

logger = logging.getLogger(__name__)

_FIELD = "eos_token_id"


@dataclass(frozen=True, slots=True)
class _Named:
    """End tokens that one place names."""

    place: str
    token_ids: list[int]
    is_guess: bool = False  # where libraries write a default that nobody chose


def find_end_tokens(path: Path, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """Token ids from the files of the checkpoint at `path`, and the tokenizer's own. Logs what it leaves out.

    config.json counts where generation_config.json names no end token, as in transformers. Else an id there may be
    stale, and it is left out if it is ordinary text: a default of 2 is a punctuation mark in many vocabularies.
    CheckpointError if a field holds no token ids.
    """
    found: set[int] = set()
    for named in _named(path, tokenizer):
        possible = {token for token in named.token_ids if 0 <= token < vocab_size}
        stale = {token for token in possible if named.is_guess and found and tokenizer.is_text(token)} - found
        _say_ignored(named, set(named.token_ids) - possible, f"the model's vocabulary is [0, {vocab_size})")
        _say_ignored(named, stale, "it is ordinary text, and another file names others")
        found |= possible - stale
    if not found:
        logger.warning(
            "%s names no end token, so answers go on up to max_tokens; set eos_token_id in generation_config.json, or"
            " name stop_token_ids in requests",
            path,
        )
    return frozenset(found)


def _say_ignored(named: _Named, token_ids: set[int], reason: str) -> None:
    if token_ids:
        logger.warning("%s: %s %s is ignored: %s", named.place, _FIELD, shown(sorted(token_ids)), reason)


def _named(path: Path, tokenizer: Tokenizer) -> Iterator[_Named]:
    if is_gguf(path):
        yield _Named(str(path), end_tokens(open_gguf(path)))
    else:
        yield _in_json(path / "generation_config.json")
        yield _in_json(path / "config.json")
        yield _in_json(path / "config.json", "text_config")
    if tokenizer.eos_token_id is not None:
        yield _Named("the tokenizer", [tokenizer.eos_token_id])


def _in_json(path: Path, within: str | None = None) -> _Named:
    """Reads the field of a file, or of an object in it."""
    content: Any = read_json(path)
    if within is not None:
        content = content.get(within)
    value = content.get(_FIELD) if isinstance(content, dict) else None
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in token_ids):
        raise CheckpointError(f"{path}: {_FIELD} must be a token id or a list of them, not {shown(value)}")
    return _Named(str(path), token_ids, is_guess=path.name == "config.json")
