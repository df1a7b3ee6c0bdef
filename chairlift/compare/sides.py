"""A side of a comparison: a model in this process, or one behind a server, as the command line names it."""

from collections.abc import Sequence
from typing import Protocol

from chairlift.compare.config import CompareConfig
from chairlift.compare.divergence import Distributions
from chairlift.errors import ConfigurationError


class Side(Protocol):
    """A model whose next-token probabilities are compared."""

    name: str  # as the user wrote it, without a key

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ...

    def beginning(self) -> int | None:
        """The token that the model expects at the beginning; None if it expects none."""
        ...

    def score(self, token_ids: Sequence[int], first: int) -> Distributions:
        """Distributions of the tokens after position `first`, and after each later one but the last."""
        ...

    def close(self) -> None: ...


def read_pairs(text: str) -> dict[str, str] | None:
    """The settings of `model=PATH,quantization=int8`; None if it is the name of a model, a file or a server."""
    if not text.startswith(("model=", "url=")):
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise ConfigurationError(f"{text}: {wrong[0]!r} is no setting; write name=value,name=value")
    names = [name.strip().replace("-", "_") for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(f"{text}: {twice[0]} is given twice; leave one of them out")
    return {name: value.strip() for name, (_, _, value) in zip(names, pairs, strict=True)}


def open_side(text: str, config: CompareConfig) -> Side:
    """Opens a model or a server. ConfigurationError if it cannot be used, or a setting of it is wrong."""
    pairs = read_pairs(text)
    if pairs is None:
        pairs = {"url" if text.startswith(("http://", "https://")) else "model": text}
    if "url" in pairs:
        from chairlift.compare.server import Server

        if unknown := pairs.keys() - {"url", "model", "api_key"}:
            raise ConfigurationError(f"{sorted(unknown)[0]} is no setting of a server; known are url, model, api_key")
        return Server(pairs["url"], config.top, pairs.get("model"), pairs.get("api_key"))
    from chairlift.compare.own_model import OwnModel

    return OwnModel(text, pairs, config.context)
