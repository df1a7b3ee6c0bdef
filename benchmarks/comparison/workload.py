"""What every engine is given: so many requests at once, with so many tokens in and out."""

import re
from dataclasses import dataclass
from random import Random
from typing import Self

_MAX_TOKEN_ID = 200  # ids that every vocabulary has, the byte tokenizer's too


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one size, all sent at the same time. Written `32x128+64`: 32 prompts of 128 tokens, 64 out each."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for anything that is not REQUESTSxPROMPT+OUTPUT, each at least 1."""
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)):
            raise ValueError(f"{text!r} is no workload: write REQUESTSxPROMPT+OUTPUT, for instance 8x128+128")
        return cls(*map(int, match.groups()))

    @property
    def name(self) -> str:
        return f"{self.num_requests}x{self.prompt_tokens}+{self.output_tokens}"

    @property
    def is_prefill(self) -> bool:
        """Only the first token is asked for, so prompt tokens are what is counted."""
        return self.output_tokens == 1

    @property
    def unit(self) -> str:
        return "prompt tokens/s" if self.is_prefill else "output tokens/s"

    @property
    def num_counted_tokens(self) -> int:
        """Of all requests: what a rate in `unit` divides by the seconds."""
        return self.num_requests * (self.prompt_tokens if self.is_prefill else self.output_tokens)

    def prompts(self, turn: str, vocab_size: int) -> list[list[int]]:
        """Random token ids: the same for every engine, others for every request and every `turn`."""
        rng, limit = Random(f"{self.name} {turn}"), min(_MAX_TOKEN_ID, vocab_size)
        return [[rng.randrange(limit) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]


DEFAULT_WORKLOADS = ["1x128+128", "8x128+128", "32x128+128", "1x1024+1", "32x1024+64"]
