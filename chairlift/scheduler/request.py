"""One sequence on its way through the engine: token ids only, no text.

There are no phases. `num_computed` tokens have keys and values in the slot and chase the `num_tokens` that there are;
a prompt, a chunk of one and a decode step are all "catching up":

    token_ids  |=== prompt ===============|=== generated ===|- pending -|
               0                     num_computed ^                     ^ num_tokens
                                                  |-- num_uncomputed ---|      decoding: exactly 1

Pending are the tokens of launches in flight: where the device works beside the host, the next step is planned before
they are known. A launch counts as computed as soon as it has begun, on the assumption that the sequence goes on.
"""

from dataclasses import dataclass, field
from typing import Protocol

from chairlift.params import DEFAULT_OPTIONS, FinishReason, RequestOptions, SamplingParams


class Grammar(Protocol):
    """What a sequence must look like, and how far it has come. One per sequence."""

    def advance(self, token_id: int) -> bool:
        """Takes the next token. True if the text is complete and nothing can follow. Raises if it does not fit."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what has been generated for it. `max_tokens` is resolved: it fits into a slot.

    With a grammar the end of the grammar is the end of the text: `min_tokens` and `ignore_eos` do not count.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None  # likeliest tokens to report at each position of the prompt
    options: RequestOptions = DEFAULT_OPTIONS
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = field(init=False, default=0)
    num_reused: int = field(init=False, default=0)  # of those computed: found in the slot, or copied into it
    num_cached_tokens: int = field(init=False, default=0)  # of the prompt: reused when it got its first slot
    num_pending: int = field(init=False, default=0)
    num_launches: int = field(init=False, default=0)  # in flight that write to the slot
    slot: int | None = field(init=False, default=None)
    is_proven: bool = field(init=False, default=False)  # a token was sampled from its slot, which so holds numbers
    num_reused_proven: int = field(init=False, default=0)  # of those reused: there, and from a slot that held numbers
    has_bad_surplus: bool = field(init=False, default=False)  # behind what counts its slot may hold no numbers
    is_yielding: bool = field(init=False, default=False)  # it loses its slot when no launch writes to that any more
    num_preemptions: int = field(init=False, default=0)
    num_tokens_placed: int = field(init=False, default=0)  # those that it had when it got its slot
    leader: "Request | None" = field(init=False, default=None)  # computes a prefix that this one waits for, to copy it
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)
    has_end_token: bool = field(init=False, default=False)
    min_tokens: int = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)  # sampling one of them ends the sequence
    # When it was added, got its first slot, its first token, and ended: the scheduler's clock, None before.
    arrival_time: float | None = field(init=False, default=None)
    queue_time: float = field(init=False, default=0.0)  # when it came, or came back, to the queue
    admission_time: float | None = field(init=False, default=None)
    first_token_time: float | None = field(init=False, default=None)
    end_time: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.min_tokens = self.params.min_tokens if self.grammar is None else 0
        if self.params.ignore_eos and self.grammar is None:
            self.eos_token_ids = frozenset()
        self.end_token_ids = self.eos_token_ids.union(self.params.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def wants_prompt_scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be reported; who had to start anew has them."""
        return self.prompt_logprobs is not None and not self.num_preemptions

    @property
    def num_proven(self) -> int:
        """Computed tokens whose keys and values are known to be numbers."""
        return self.num_computed if self.is_proven else self.num_reused_proven

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated; not more than 0 if it will have ended with those pending."""
        return self.max_tokens - self.num_output_tokens

    @property
    def can_be_planned(self) -> bool:
        """Whether its next step can be planned: a grammar has to see a token first, and a length's end is known."""
        return not self.num_pending or (self.grammar is None and self.num_remaining > 0 and not self.is_yielding)

    def accept(self, sampled: list[int]) -> list[int]:
        """Appends sampled tokens up to and including the one that ends the sequence; returns those kept."""
        if sampled and self.max_tokens == 0:  # only the prompt was to be computed
            self.finish_reason = FinishReason.LENGTH
            return []
        for index, token in enumerate(sampled):
            self.token_ids.append(token)
            if self._ends_with(token):
                return sampled[: index + 1]
        return sampled

    def drop_surplus(self) -> None:
        """Once it has ended: what was computed for tokens that did not come, or will not count, is of no use."""
        self.num_computed = min(self.num_computed, max(self.num_prompt_tokens, len(self.token_ids) - 1))

    def fail(self, reason: str) -> None:
        """Ends the sequence: it cannot be computed."""
        self.finish_reason = FinishReason.ABORT
        self.error = reason

    def _ends_with(self, token: int) -> bool:
        num_output = len(self.token_ids) - self.num_prompt_tokens  # the pending ones come after it
        if token in self.end_token_ids and num_output > self.min_tokens:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = None if token in self.eos_token_ids else token
            self.has_end_token = True
        elif self.grammar is not None and self._completes_grammar(self.grammar, token):
            self.finish_reason = self.finish_reason or FinishReason.STOP
        elif num_output >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        else:
            return False
        return True

    def _completes_grammar(self, grammar: Grammar, token: int) -> bool:
        try:
            return grammar.advance(token)
        except Exception as error:  # whatever is wrong with a grammar is wrong with its request alone
            self.fail(f"the grammar failed: {error}")
            return True
