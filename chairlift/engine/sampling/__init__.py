"""From logits to tokens. Here: where tokens are sampled for rows with a guess at the next ones, and which count.

batch    | newest | guess 1 | guess 2 |      a row of three tokens
sampled       s1        s2        s3         s2 counts if s1 is guess 1, and s3 if s2 is guess 2 as well
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

from chairlift.scheduler import StepPlan

Guessed = Mapping[int, Sequence[int]]
"""By row of the logits: the guessed tokens between its request's own and the one that is sampled.

A request with a guess has a row for each token of it, and one behind the last. Rows of other requests are not there.
"""

NOTHING_GUESSED: Guessed = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens are sampled: behind a row's last token, and behind each token before its guess or in it."""

    tokens: list[int]  # behind this one of the batch
    rows: list[int]  # of the plan
    guessed: Guessed  # by place

    @classmethod
    def of(cls, plan: StepPlan) -> "Places":
        """The places of a plan's first step."""
        tokens: list[int] = []
        rows: list[int] = []
        guessed: dict[int, Sequence[int]] = {}
        end = 0
        for index, row in enumerate(plan.rows):
            end += row.num_new_tokens
            guess = row.guess.tokens
            if guess:
                guessed |= {len(tokens) + count: guess[:count] for count in range(len(guess) + 1)}
            if row.is_sampled:
                tokens += range(end - 1 - len(guess), end)
                rows += [index] * (1 + len(guess))
        return cls(tokens, rows, guessed)


def up_to_wrong(drawn: list[int], guess: Sequence[int]) -> list[int]:
    """The tokens that count of those drawn before and behind each token of a guess; the last of them is no guess."""
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drawn, guess, strict=False)))
    return drawn[: num_right + 1]
