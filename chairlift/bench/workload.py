"""What a test sends and when: conversations of one or more turns, made ahead of the clock from the settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

from chairlift.bench.arrivals import ramp_offsets, random_offsets
from chairlift.bench.config import BenchConfig
from chairlift.bench.prompts import Purpose, draw_one, generator_of
from chairlift.bench.sources import Conversation, Turn, conversations_of, trace_of, writer_of

UNKNOWN_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to measure, and those sent before. `offsets` are seconds, one for each; None in a closed loop."""

    conversations: tuple[Conversation, ...]
    warm_up: tuple[Conversation, ...]
    offsets: tuple[float, ...] | None

    @property
    def num_requests(self) -> int:
        return sum(len(conversation) for conversation in self.conversations)


def build_workload(config: BenchConfig) -> Workload:
    """Everything that will be sent, and when. Raises `BenchError` on a file or a setting that makes it impossible."""
    offsets: list[float] | None
    if config.trace is not None:
        timed = trace_of(config)
        offsets, conversations = timed.offsets, timed.conversations
    else:
        conversations = conversations_of(config)
        offsets = _drawn_offsets(config, len(conversations))
    return Workload(tuple(conversations), _warm_up(config, conversations), None if offsets is None else tuple(offsets))


def _drawn_offsets(config: BenchConfig, count: int) -> list[float] | None:
    generator = generator_of(config.seed, Purpose.ARRIVALS)
    if config.ramp is not None:
        return ramp_offsets(count, *config.ramp, config.burstiness, generator)
    if config.request_rate is not None:
        return random_offsets(count, config.request_rate, config.burstiness, generator)
    return None


def _warm_up(config: BenchConfig, conversations: Sequence[Conversation]) -> tuple[Conversation, ...]:
    """As long as the first requests to be measured, but of other tokens: nothing measured is in a cache by them."""
    generator, writer = generator_of(config.seed, Purpose.WARM_UP), writer_of(config)
    turns = []
    for model in islice(cycle(chain.from_iterable(conversations)), config.warmup):
        num_tokens = UNKNOWN_PROMPT_TOKENS if model.prompt_tokens is None else model.prompt_tokens
        prompt: dict[str, Any] = writer.write(draw_one(num_tokens, writer.num_choices, generator))
        turns.append(Turn(prompt, num_tokens, model.output_tokens))
    return tuple((turn,) for turn in turns)
