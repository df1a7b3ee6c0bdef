"""Where conversations come from: random prompts, a trace, a file of messages or a file of conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle
from typing import Any

from chairlift.bench.config import BenchConfig
from chairlift.bench.messages import MessagesLine, read_conversations, read_messages
from chairlift.bench.prompts import (
    Draws,
    Purpose,
    TokenWriter,
    WordWriter,
    Writer,
    distinct_draws,
    draw_one,
    generator_of,
)
from chairlift.bench.trace import BLOCK_TOKENS, read_trace, trace_offsets

DEFAULT_NUM_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to be. `prompt` holds the fields of its body that are its own: `prompt`, or the `messages` it adds.

    `prompt_tokens` is None where only the server can count them.
    """

    prompt: dict[str, Any]
    prompt_tokens: int | None
    output_tokens: int


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TimedConversations:
    """Conversations, and for each the seconds after the first at which it begins."""

    offsets: list[float]
    conversations: list[Conversation]


def writer_of(config: BenchConfig) -> Writer:
    """What writes random prompts for the endpoint."""
    return WordWriter() if config.is_chat else TokenWriter(*config.token_range)


def conversations_of(config: BenchConfig) -> list[Conversation]:
    """What is to be measured, where no trace says when. Raises `BenchError` if it cannot be made."""
    if config.messages is not None:
        return _of_messages(config, read_messages(config.messages, config.num_requests))
    if config.conversations is not None:
        return _of_conversations(config, read_conversations(config.conversations))
    return _random(config)


def trace_of(config: BenchConfig) -> TimedConversations:
    """The requests of the trace, with random prompts of their lengths. Raises `BenchError` if it cannot be read."""
    assert config.trace is not None
    lines = read_trace(config.trace, config.num_requests)
    writer, generator = writer_of(config), generator_of(config.seed, Purpose.PROMPTS)
    num_choices = writer.num_choices
    block = cache(lambda number: draw_one(BLOCK_TOKENS, num_choices, generator_of(config.seed, Purpose.BLOCKS, number)))
    conversations: list[Conversation] = []
    for line in lines:
        shared = tuple(chain.from_iterable(block(number) for number in line.hash_ids))[: line.input_length]
        own = draw_one(line.input_length - len(shared), num_choices, generator)
        conversations.append((Turn(writer.write(shared + own), line.input_length, line.output_length),))
    return TimedConversations(trace_offsets(lines, config.trace_speedup), conversations)


def _random(config: BenchConfig) -> list[Conversation]:
    num_requests = config.num_requests or DEFAULT_NUM_REQUESTS
    writer = writer_of(config)
    lengths = config.prompt_lengths.draw(num_requests, generator_of(config.seed, Purpose.PROMPT_LENGTHS))
    prompts = distinct_draws(lengths, writer.num_choices, generator_of(config.seed, Purpose.PROMPTS))
    starts = range(0, num_requests, config.turns)
    prefixes = _prefixes(config, writer.num_choices, len(starts))
    turns = []
    for index, (prompt, output_tokens) in enumerate(zip(prompts, _output_lengths(config, num_requests), strict=True)):
        is_first = index in starts
        prefix = prefixes[index // config.turns] if is_first else ()
        num_tokens = len(prefix) + len(prompt) if is_first else None
        turns.append(Turn(writer.write(prompt, prefix), num_tokens, output_tokens))
    return [tuple(turns[start : start + config.turns]) for start in starts]


def _prefixes(config: BenchConfig, num_choices: int, count: int) -> list[Draws]:
    """For each of `count` conversations the prefix of its family."""
    if not config.prefix_tokens:
        return [()] * count
    lengths = [config.prefix_tokens] * config.num_prefixes
    families = distinct_draws(lengths, num_choices, generator_of(config.seed, Purpose.PREFIXES))
    chosen = generator_of(config.seed, Purpose.FAMILIES).integers(config.num_prefixes, size=count)
    return [families[family] for family in chosen.tolist()]


def _of_messages(config: BenchConfig, lines: Sequence[MessagesLine]) -> list[Conversation]:
    outputs = _output_lengths(config, len(lines))
    return [
        (Turn({"messages": line.as_sent}, None, line.output_tokens or output),)
        for line, output in zip(lines, outputs, strict=True)
    ]


def _of_conversations(config: BenchConfig, lines: Sequence[MessagesLine]) -> list[Conversation]:
    """So many requests of the conversations, from the first again where they do not suffice; the last may be cut."""
    num_left = config.num_requests or sum(len(line.turns) for line in lines)
    outputs = iter(_output_lengths(config, num_left))
    conversations: list[Conversation] = []
    for line in cycle(lines):
        turns = line.turns[:num_left]
        conversations.append(
            tuple(Turn({"messages": added}, None, line.output_tokens or next(outputs)) for added in turns)
        )
        num_left -= len(turns)
        if not num_left:
            break
    return conversations


def _output_lengths(config: BenchConfig, count: int) -> list[int]:
    return config.output_lengths.draw(count, generator_of(config.seed, Purpose.OUTPUT_LENGTHS))
