"""Says where tokens are sampled for rows with a guess, and which of these tokens count.

batch    | newest | guess 1 | guess 2 |      a row of three tokens
sampled       s1        s2        s3         s2 counts if s1 is guess 1, and s3 if s2 is guess 2 as well
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

from chairlift.plan import StepPlan

Guessed = Mapping[int, Sequence[int]]
"""By row of the logits: the guessed tokens between the request's own tokens and the one that is sampled.

A request with a guess has a row before each token of it, and one after the last. Rows of other requests are left out.
"""

NOTHING_GUESSED: Guessed = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Places:
    """Lists where tokens are sampled: after a row's last own token, and after each token of its guess."""

    tokens: list[int]  # indices in the batch, after which tokens are sampled
    rows: list[int]  # of the plan, by place
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
            guess = row.guess
            if guess:
                guessed |= {len(tokens) + count: guess[:count] for count in range(len(guess) + 1)}
            if row.is_sampled:
                tokens += range(end - 1 - len(guess), end)
                rows += [index] * (1 + len(guess))
        return cls(tokens, rows, guessed)


def up_to_wrong(drawn: list[int], guess: Sequence[int]) -> list[int]:
    """Returns the tokens drawn before and after each token of a guess, up to and with the first wrong one."""
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drawn, guess, strict=False)))
    return drawn[: num_right + 1]
