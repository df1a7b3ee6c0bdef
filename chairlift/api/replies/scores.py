"""Log-probabilities as replies tell them: by name in completions, by id for prompts, in lists everywhere else."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chairlift.api.wire.completions import CompletionLogprobs, PromptLogprob, PromptLogprobs
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, or an alternative to it."""

    token_id: int
    spelling: bytes
    logprob: float | None  # None: the first token of a prompt has none

    @property
    def text(self) -> str:
        """The text, with replacement characters where the bytes are not whole characters."""
        return self.spelling.decode(errors="replace")

    @property
    def name(self) -> str:
        """What completions call it: its text, or its bytes if they are not whole characters."""
        try:
            return self.spelling.decode()
        except UnicodeDecodeError:
            return self._spelled()

    def names(self) -> Iterator[str]:
        """Its name, and what to call it where other tokens are called so, best first; its id is its own."""
        yield self.name
        if self.spelling:
            yield self._spelled()
        yield f"token_id:{self.token_id}"

    def _spelled(self) -> str:
        """Its bytes, as OpenAI's API spells them."""
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelling)

    def as_fields(self) -> dict[str, Any]:
        """As chat completions and responses write it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.spelling)}


@dataclass(frozen=True, slots=True)
class ScoredPosition:
    """The token at one position and the likeliest ones there; `offset` is where its text begins, in characters."""

    token: ScoredToken
    top: list[ScoredToken]
    offset: int

    def as_fields(self) -> dict[str, Any]:
        """As chat completions and responses write it."""
        return {**self.token.as_fields(), "top_logprobs": [each.as_fields() for each in self.top]}


def prompt_logprobs(output: RequestOutput, num_top: int | None) -> PromptLogprobs | None:
    """A prompt's scores by token id, if that was asked for."""
    if num_top is None:
        return None
    return [None if position is None else _told(position, num_top) for position in output.prompt_logprobs or []]


def _told(position: TokenLogprobs, num_top: int) -> dict[int, PromptLogprob]:
    own = next(iter(position))
    return {
        token: PromptLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.decoded_token)
        for token, each in position.items()
        if token == own or each.rank <= num_top
    }


def scored_prompt(output: RequestOutput, text: str, num_top: int, vocabulary: Vocabulary) -> list[ScoredPosition]:
    """A prompt's positions, if they were scored. Special tokens that its text omits have no length in it."""
    positions: list[ScoredPosition] = []
    num_bytes, encoded = 0, text.encode()
    for token, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False):
        offset = len(encoded[:num_bytes].decode(errors="ignore"))
        if logprobs is None:
            positions.append(ScoredPosition(ScoredToken(token, vocabulary.token_bytes(token), None), [], offset))
        else:
            positions.append(scored(logprobs, num_top, offset, vocabulary))
        spelling = positions[-1].token.spelling
        for shown in (spelling, spelling.lstrip(b" ")):  # some tokenizers put a space before the first word
            if encoded.startswith(shown, num_bytes):
                num_bytes += len(shown)
                break
    return positions


def scored(logprobs: TokenLogprobs, num_top: int, offset: int, vocabulary: Vocabulary) -> ScoredPosition:
    """The token at the position comes first in `logprobs`."""
    tokens = {
        token: ScoredToken(token, vocabulary.token_bytes(token), each.logprob) for token, each in logprobs.items()
    }
    ranked = sorted((each.rank, token) for token, each in logprobs.items() if each.rank <= num_top)
    return ScoredPosition(next(iter(tokens.values())), [tokens[token] for _, token in ranked], offset)


def four_lists(positions: list[ScoredPosition]) -> CompletionLogprobs:
    """The scores as completions tell them."""
    return CompletionLogprobs(
        text_offset=[each.offset for each in positions],
        token_logprobs=[each.token.logprob for each in positions],
        tokens=[each.token.name for each in positions],
        top_logprobs=[_by_name(each) for each in positions],
    )


def _by_name(position: ScoredPosition) -> dict[str, float] | None:
    """The token at the position, by the name that `tokens` shows, and the likeliest ones. Of several with one text, the
    likeliest has it as its name.
    """
    own = position.token
    if own.logprob is None:
        return None
    tokens = position.top if own in position.top else [*position.top, own]
    named = {own.name: own}
    for token in tokens:
        if token != own:
            named[next(name for name in token.names() if name not in named)] = token
    names = {token.token_id: name for name, token in named.items()}
    return {names[token.token_id]: token.logprob for token in tokens if token.logprob is not None}
