"""Makes what a test sends and when: conversations of turns, from the settings or from files, ahead of the clock.

Random prompts need no tokenizer: they are token ids for completions, short words for chat. All prompts of one test
differ, so that no server can answer one from the cache of another. Each purpose has its own random numbers: the same
seed gives the same prompts at any rate, and a larger number keeps the first ones.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, cycle, islice
from typing import Any

import numpy as np

from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.recordings import (
    BLOCK_TOKENS,
    ConversationLine,
    TraceLine,
    read_conversations,
    read_trace,
    trace_offsets,
)
from chairlift.loadtest.records import BenchError
from chairlift.loadtest.values import Lengths

DEFAULT_NUM_REQUESTS = 100
UNKNOWN_PROMPT_TOKENS = 128
# Printable ASCII in byte-level vocabularies, ordinary tokens in all others.
TOKEN_IDS = range(32, 127)
# Short and frequent, so that most vocabularies hold each (with its leading space) as a single token.
_WORD_LIST = """
    the of and to in is for on that by this with you it not or be are from at as your all have new more an was
    we will home can us about if page my has search free but our one other do no time they site he up may what
    which their news out use any there see only so his when here who web also now help get view first been
    would how were me some these its like than find
"""
WORDS = tuple(_WORD_LIST.split())

Draws = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to send. `prompt` holds the fields of its body that are its own: `prompt`, or the `messages` it adds.

    `prompt_tokens` is None where only the server can count them.
    """

    prompt: dict[str, Any]
    prompt_tokens: int | None
    output_tokens: int


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to measure, and those to warm up. `offsets` are seconds, one for each; None in a closed loop."""

    conversations: tuple[Conversation, ...]
    warm_up: tuple[Conversation, ...]
    offsets: Sequence[float] | None

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.conversations))


def build_workload(config: BenchConfig) -> Workload:
    """Everything that will be sent, and when. Raises `BenchError` on a file or a setting that makes it impossible."""
    offsets: list[float] | None = None
    conversations: Iterable[Conversation]
    if config.trace is not None:
        lines = read_trace(config.trace, config.num_requests)
        conversations = _traced(config, lines)
        offsets = trace_offsets(lines, config.trace_speedup)
    elif config.conversations is not None:
        conversations = _recorded(config, read_conversations(config.conversations))
    else:
        conversations = _random(config)
    conversations = tuple(conversations)
    rates = config.ramp if config.request_rate is None else (config.request_rate, config.request_rate)
    if rates is not None:
        offsets = random_offsets(len(conversations), *rates, config.burstiness, _generator(config, "arrivals"))
    return Workload(conversations, tuple(_warm_up(config, conversations)), offsets)


def random_offsets(
    count: int, first_rate: float, last_rate: float, burstiness: float, generator: np.random.Generator
) -> list[float]:
    """Seconds from the start at which each of `count` arrivals is due; the first is due at once.

    Gaps are gamma-distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson process, less comes in bursts,
    more is more even. Between different rates the rate grows linearly from arrival to arrival. As in `vllm bench serve`
    the gaps of a constant rate are scaled to add up to what the rate says, so that any seed offers the same load.
    """
    rates = np.linspace(first_rate, last_rate, num=count)[1:]
    gaps = generator.gamma(burstiness, 1 / (rates * burstiness))
    if first_rate == last_rate and count > 1:
        gaps *= (count - 1) / first_rate / gaps.sum()
    return [0.0, *np.cumsum(gaps).tolist()]


def distinct_draws(lengths: Sequence[int], num_choices: int, generator: np.random.Generator) -> list[Draws]:
    """For each length that many draws from [0, num_choices), no two alike. Raises `BenchError` if there are too few."""
    for length, needed in Counter(lengths).items():
        possible = num_choices ** min(length, 64)
        if possible < needed:
            raise BenchError(
                f"{needed} prompts of {length} tokens cannot all differ: {num_choices} choices for each token allow "
                f"only {possible}; raise --prompt-tokens or lower --num-requests"
            )
    drawn: dict[Draws, None] = {}
    for length in lengths:
        while (draws := draw_one(length, num_choices, generator)) in drawn:
            pass
        drawn[draws] = None
    return list(drawn)


def draw_one(length: int, num_choices: int, generator: np.random.Generator) -> Draws:
    """`length` independent draws from [0, num_choices)."""
    return tuple(generator.integers(num_choices, size=length).tolist())


def _generator(config: BenchConfig, purpose: str, *details: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, *purpose.encode(), *details])


def _num_choices(config: BenchConfig) -> int:
    """Counts the tokens or words that a random prompt is drawn from."""
    return len(WORDS if config.is_chat else TOKEN_IDS)


def _turn(config: BenchConfig, own: Draws, num_output_tokens: int, prefix: Draws = ()) -> Turn:
    """A turn with a random prompt after a shared prefix, which in a chat is the system message."""
    num_tokens = len(prefix) + len(own)
    if not config.is_chat:
        return Turn({"prompt": [TOKEN_IDS[draw] for draw in prefix + own]}, num_tokens, num_output_tokens)
    texts = {"system": prefix, "user": own} if prefix else {"user": own}
    messages = [{"role": role, "content": " ".join(WORDS[draw] for draw in text)} for role, text in texts.items()]
    return Turn({"messages": messages}, num_tokens, num_output_tokens)


def _random(config: BenchConfig) -> Iterator[Conversation]:
    count = config.num_requests or DEFAULT_NUM_REQUESTS
    lengths = Lengths.parse(config.prompt_tokens).draw(count, _generator(config, "prompt lengths"))
    prompts = distinct_draws(lengths, _num_choices(config), _generator(config, "prompts"))
    requests = iter(zip(prompts, _output_lengths(config, count), strict=True))
    for prefix in _prefixes(config, math.ceil(count / config.turns)):
        first, *later = islice(requests, config.turns)
        # Later turns repeat the server's replies, whose length it alone knows.
        yield _turn(config, *first, prefix), *(replace(_turn(config, *turn), prompt_tokens=None) for turn in later)


def _prefixes(config: BenchConfig, count: int) -> list[Draws]:
    """For each of `count` conversations its shared prefix."""
    if not config.prefix_tokens:
        return [()] * count
    lengths = [config.prefix_tokens] * config.num_prefixes
    families = distinct_draws(lengths, _num_choices(config), _generator(config, "prefixes"))
    return [families[n] for n in _generator(config, "families").integers(config.num_prefixes, size=count)]


def _traced(config: BenchConfig, lines: Sequence[TraceLine]) -> Iterator[Conversation]:
    """Random prompts of the recorded lengths; equal block ids are equal tokens."""
    generator, choices = _generator(config, "prompts"), _num_choices(config)
    block = cache(lambda number: draw_one(BLOCK_TOKENS, choices, _generator(config, "blocks", number)))
    for line in lines:
        shared = tuple(chain.from_iterable(map(block, line.hash_ids)))[: line.input_length]
        own = draw_one(line.input_length - len(shared), choices, generator)
        yield (_turn(config, shared + own, line.output_length),)


def _recorded(config: BenchConfig, lines: Sequence[ConversationLine]) -> Iterator[Conversation]:
    """Conversations for as many requests as wanted, repeated where the file has fewer; the last may be cut."""
    num_left = config.num_requests or sum(len(line.turns) for line in lines)
    outputs = iter(_output_lengths(config, num_left))
    for line in cycle(lines):
        turns = line.turns[:num_left]
        yield tuple(Turn({"messages": added}, None, line.output_tokens or next(outputs)) for added in turns)
        num_left -= len(turns)
        if not num_left:
            return


def _output_lengths(config: BenchConfig, count: int) -> list[int]:
    return Lengths.parse(config.output_tokens).draw(count, _generator(config, "output lengths"))


def _warm_up(config: BenchConfig, conversations: Sequence[Conversation]) -> Iterator[Conversation]:
    """Turns as long as the first to be measured, but of other tokens, so that they leave nothing useful in a cache."""
    generator = _generator(config, "warm up")
    for measured in islice(cycle(chain.from_iterable(conversations)), config.warmup):
        length = UNKNOWN_PROMPT_TOKENS if measured.prompt_tokens is None else measured.prompt_tokens
        yield (_turn(config, draw_one(length, _num_choices(config), generator), measured.output_tokens),)
