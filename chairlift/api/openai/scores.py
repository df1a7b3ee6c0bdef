"""Log-probabilities as completions tell them, in lists and by name, and those of prompts."""

from collections.abc import Sequence

from chairlift.api.openai.choices import PromptLogprob, PromptLogprobs
from chairlift.api.openai.completions import CompletionLogprobs
from chairlift.api.replies.scores import ScoredPosition, ScoredToken, scored
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import TokenLogprobs

PromptScores = Sequence[TokenLogprobs | None]
"""The log-probabilities at a prompt's positions; None at the first one."""


def prompt_logprobs(scores: PromptScores, num_top: int | None) -> PromptLogprobs | None:
    """Names a prompt's scores by token id, if that was asked for."""
    if num_top is None:
        return None
    return [None if position is None else _told(position, num_top) for position in scores]


def _told(position: TokenLogprobs, num_top: int) -> dict[int, PromptLogprob]:
    own = next(iter(position))
    return {
        token: PromptLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.decoded_token)
        for token, each in position.items()
        if token == own or each.rank <= num_top
    }


def scored_prompt(
    token_ids: Sequence[int], scores: PromptScores, text: str, num_top: int, vocabulary: Vocabulary
) -> list[ScoredPosition]:
    """Returns a prompt's positions, if they were scored. Special tokens that its text omits have no length in it."""
    positions: list[ScoredPosition] = []
    num_bytes, encoded = 0, text.encode()
    for token, logprobs in zip(token_ids, scores, strict=False):
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
