"""Says what is put on the simulated engine: conversations, each of one or more turns; drawn at random, or read from a
file.

Token ids stand for text, and only whether two prompts begin alike matters: a text that nobody shares counts up from a
number of its own, and a shared beginning from a number of its family's. Random workloads are drawn in blocks, so that a
million conversations are neither slow nor all in memory. The same settings give the same workload, and asking for more
requests keeps the first ones.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from chairlift.loadtest import LENGTH_FORMS, Lengths
from chairlift.loadtest.recordings import BLOCK_TOKENS, TraceLine, read_json_lines, trace_offsets
from simulation.costs import CostModel, StepShape

_BLOCK = 4096
_END_TOKEN_ROOM = 2  # an answer that ends by an end token could have been this many times as long
_NUM_FIRST_IDS = 2**29  # ids fit into 31 bits, with room to count up in
_SCATTER = 2_654_435_761  # odd, so that every number below _NUM_FIRST_IDS gets a first id of its own


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. Its prompt is all that was said before and `num_new_tokens` more."""

    num_new_tokens: int
    num_output_tokens: int
    max_tokens: int  # more than the above if it ends by an end token
    pause: float = 0.0  # seconds after the end of the turn before
    patience: float | None = None  # seconds until its client goes away
    timeout: float | None = None  # seconds until the engine gives up


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that a family of conversations shares, such as a system prompt."""

    family: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another; the first is due at `arrival`, seconds after the start."""

    arrival: float
    turns: tuple[Turn, ...]
    tenant: str = ""
    priority: int = 0
    prefixes: tuple[Prefix, ...] = ()


Workload = Iterator[Conversation]
"""In order of arrival."""


def text(number: int, num_tokens: int) -> list[int]:
    """Token ids of a text of its own."""
    first = _first_id(number)
    return list(range(first, first + num_tokens))


def opening(prefixes: tuple[Prefix, ...]) -> list[int]:
    """Token ids that all conversations with these prefixes begin with."""
    tokens: list[int] = []
    for prefix in prefixes:
        first = 2 * _NUM_FIRST_IDS + _first_id(prefix.family)
        tokens += range(first, first + prefix.num_tokens)
    return tokens


def _first_id(number: int) -> int:
    return number * _SCATTER % _NUM_FIRST_IDS


def _flag(default: Any, help_text: str, parse: type = float) -> Any:
    """A setting that is a flag of the command line too. A tuple is a flag with several values."""
    return field(default=default, metadata={"help": help_text, "parse": parse})


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Settings of a synthetic workload; the names of the flags are those of the fields.

    Raises `ValueError` with one line that says what to change.
    """

    slot_tokens: int
    requests: int = 20_000
    rate: float | None = None  # conversations a second; None: all are there from the start
    burstiness: float = _flag(1.0, "1 is a Poisson process, less comes in bursts")
    prompt_tokens: str = _flag("lognormal:100,0.9,1000", "of a turn, without the prefix", str)
    output_tokens: str = _flag("lognormal:30,0.8,500", "of an answer", str)
    turns: str = _flag("1", "of a conversation", str)
    pause: float = _flag(5.0, "mean seconds between turns")
    tenants: int = _flag(1, "how many share the machine", int)
    flood: float = _flag(0.0, "share of conversations that one tenant sends; the others send the rest alike")
    priorities: tuple[float, ...] = _flag((1.0,), "shares of the levels 0, 1, ...")
    families: int = _flag(0, "number of shared prefixes", int)
    family_share: float = _flag(0.5, "share of conversations that begin with a shared prefix")
    family_tokens: str = _flag("200", "length of a shared prefix", str)
    zipf: float = _flag(1.0, "the k-th prefix is wanted k ** -ZIPF times as often")
    impatient: float = _flag(0.0, "share of requests whose clients go away")
    patience: float = _flag(10.0, "mean seconds until they do")
    timeouts: float = _flag(0.0, "share of requests with a timeout")
    timeout: float = _flag(30.0, "seconds")
    seed: int = _flag(0, "of the random numbers", int)

    def __post_init__(self) -> None:
        shares = (self.flood, self.family_share, self.impatient, self.timeouts)
        if self.requests < 1:
            raise ValueError(f"a workload needs at least 1 request, not {self.requests}")
        if any(not 0 <= share <= 1 for share in (*shares, *self.priorities)):
            raise ValueError("a share must be between 0 and 1")
        if not np.isclose(sum(self.priorities), 1):
            raise ValueError(f"the shares of the priorities must add up to 1, not {sum(self.priorities):g}")
        if self.tenants < 1:
            raise ValueError(f"a workload needs at least 1 tenant, not {self.tenants}")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"the rate must be above 0 requests a second, not {self.rate:g}")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be above 0, not {self.burstiness:g}")
        if self.slot_tokens < 2:
            raise ValueError(f"a slot must hold a prompt token and an output token, not {self.slot_tokens} tokens")
        for text in (self.prompt_tokens, self.output_tokens, self.turns, self.family_tokens):
            Lengths.parse(text)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """All fields but those that the machine has too."""
        group = parser.add_argument_group(f"requests of a synthetic workload; lengths are {LENGTH_FORMS}")
        for each in fields(cls):
            if each.metadata:
                name, several = each.name.replace("_", "-"), "+" if isinstance(each.default, tuple) else None
                parse, help_text = each.metadata["parse"], each.metadata["help"]
                group.add_argument(f"--{name}", type=parse, nargs=several, default=each.default, help=help_text)

    @classmethod
    def of_flags(cls, arguments: argparse.Namespace, requests: int) -> "Synthetic":
        """Returns what the command line asks for."""
        given = {each.name: getattr(arguments, each.name) for each in fields(cls)}
        return cls(**given | {"requests": requests, "priorities": tuple(given["priorities"])})


def conversations(settings: Synthetic) -> Workload:
    """Conversations in order of arrival, with `requests` turns in all."""
    num_left = settings.requests
    for conversation in _endless(settings):
        yield replace(conversation, turns=conversation.turns[:num_left])
        num_left -= len(conversation.turns)
        if num_left <= 0:
            return


def _endless(settings: Synthetic) -> Workload:
    now = 0.0
    families = _family_lengths(settings)
    block = 0
    while True:
        draw = np.random.default_rng([settings.seed, block])
        arrivals = now + _gaps(settings, draw).cumsum()
        now = float(arrivals[-1])
        num_turns = Lengths.parse(settings.turns).draw(_BLOCK, draw)
        turns = _turns(settings, sum(num_turns), draw)
        owners = zip(arrivals.tolist(), num_turns, _tenants(settings, draw), _priorities(settings, draw), strict=True)
        members = _members(settings, draw)
        for (arrival, count, tenant, priority), family in zip(owners, members, strict=True):
            prefixes = () if family is None else (Prefix(family, families[family]),)
            own = tuple(islice(turns, count))
            room = settings.slot_tokens - sum(prefix.num_tokens for prefix in prefixes)
            yield Conversation(arrival, _fitting(own, room), f"t{tenant}", priority, prefixes)
        block += 1


def _gaps(settings: Synthetic, draw: np.random.Generator) -> NDArray[np.float64]:
    if settings.rate is None:
        return np.zeros(_BLOCK)
    return draw.gamma(settings.burstiness, 1 / (settings.rate * settings.burstiness), size=_BLOCK)


def _turns(settings: Synthetic, count: int, draw: np.random.Generator) -> Iterator[Turn]:
    """Half of the turns end by an end token, before the most that they may say."""
    prompts = Lengths.parse(settings.prompt_tokens).draw(count, draw)
    outputs = Lengths.parse(settings.output_tokens).draw(count, draw)
    stops = (draw.random(count) < 0.5).tolist()
    pauses = draw.exponential(settings.pause, count).tolist()
    patience = draw.exponential(settings.patience, count).tolist()
    fates = draw.random((2, count)) < np.array([[settings.impatient], [settings.timeouts]])
    is_impatient, has_timeout = fates.tolist()
    for i in range(count):
        yield Turn(
            prompts[i],
            outputs[i],
            outputs[i] * _END_TOKEN_ROOM if stops[i] else outputs[i],
            pauses[i],
            patience[i] if is_impatient[i] else None,
            settings.timeout if has_timeout[i] else None,
        )


def _tenants(settings: Synthetic, draw: np.random.Generator) -> list[int]:
    evenly = draw.integers(0 if not settings.flood else 1, max(settings.tenants, 2), size=_BLOCK)
    if settings.tenants == 1:
        return [0] * _BLOCK
    tenants: list[int] = np.where(draw.random(_BLOCK) < settings.flood, 0, evenly).tolist()
    return tenants


def _priorities(settings: Synthetic, draw: np.random.Generator) -> list[int]:
    levels: list[int] = draw.choice(len(settings.priorities), size=_BLOCK, p=settings.priorities).tolist()
    return levels


def _members(settings: Synthetic, draw: np.random.Generator) -> list[int | None]:
    """For each conversation the family whose prefix it begins with, if any."""
    if not settings.families:
        return [None] * _BLOCK
    popularity = np.arange(1, settings.families + 1) ** -settings.zipf
    chosen = draw.choice(settings.families, size=_BLOCK, p=popularity / popularity.sum()).tolist()
    belongs = (draw.random(_BLOCK) < settings.family_share).tolist()
    return [family if is_member else None for family, is_member in zip(chosen, belongs, strict=True)]


def _family_lengths(settings: Synthetic) -> list[int]:
    """At most half a slot each."""
    draw = np.random.default_rng([settings.seed, settings.families, _BLOCK])
    lengths = Lengths.parse(settings.family_tokens).draw(settings.families, draw)
    return [min(length, settings.slot_tokens // 2) for length in lengths]


def _fitting(turns: Sequence[Turn], room: int) -> tuple[Turn, ...]:
    """The turns for which a slot has room; the first is made to fit."""
    first = _squeezed(turns[0], room)
    fitting = [first]
    room -= first.num_new_tokens + first.num_output_tokens
    for turn in turns[1:]:
        if turn.num_new_tokens + turn.max_tokens > room:
            break
        fitting.append(turn)
        room -= turn.num_new_tokens + turn.num_output_tokens
    return tuple(fitting)


def _squeezed(turn: Turn, room: int) -> Turn:
    num_new_tokens = min(turn.num_new_tokens, max(1, room - turn.max_tokens))
    max_tokens = min(turn.max_tokens, room - num_new_tokens)
    num_output_tokens = min(turn.num_output_tokens, max_tokens)
    return replace(turn, num_new_tokens=num_new_tokens, max_tokens=max_tokens, num_output_tokens=num_output_tokens)


def capacity(settings: Synthetic, num_slots: int, cost: CostModel) -> float:
    """Conversations a second that could be served at most, nothing being reused: an estimate from mean lengths.

    Each request takes the time of its prompt's tokens, and of every output token a share of a step with all slots busy.
    """
    prompts, outputs, num_conversations = [], [], 0
    for conversation in conversations(replace(settings, requests=_BLOCK, rate=None)):
        num_conversations += 1
        num_said = sum(prefix.num_tokens for prefix in conversation.prefixes)
        for turn in conversation.turns:
            prompts.append(num_said + turn.num_new_tokens)
            outputs.append(turn.num_output_tokens)
            num_said = prompts[-1] + outputs[-1]
    num_prompt, num_output = round(fmean(prompts)), fmean(outputs)
    step = cost.seconds(StepShape(0, num_slots, round(num_slots * (num_prompt + num_output / 2))))
    prompt = cost.seconds(StepShape(num_prompt, 0, 0)) - cost.seconds(StepShape(0, 0, 0))
    requests_per_s = 1 / (prompt + num_output * step / num_slots)
    return requests_per_s * num_conversations / len(prompts)


class WorkloadLine(TraceLine):
    """One request of a file: a line of the load test's traces, with what a scheduler can tell apart."""

    tenant: str = ""
    priority: Annotated[int, Field(strict=True)] = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def read_workload(path: Path, slot_tokens: int, num_requests: int | None, speedup: float) -> list[Conversation]:
    """The first `num_requests` of the file, or all, in order of time, which passes `speedup` times as fast.

    Raises `BenchError` with a bad line's number and text; `ValueError` for what does not fit into a slot.
    """
    lines = sorted(read_json_lines(path, WorkloadLine), key=lambda line: line.timestamp)[:num_requests]
    longest = max(line.input_length + line.output_length for line in lines)
    if longest > slot_tokens:
        raise ValueError(f"{path} has a request of {longest} tokens: raise --slot-tokens, which is {slot_tokens}")
    if not speedup > 0:
        raise ValueError(f"--speedup must be above 0, not {speedup:g}")
    offsets = trace_offsets(list(lines), speedup)
    return [_recorded(line, offset) for line, offset in zip(lines, offsets, strict=True)]


def _recorded(line: WorkloadLine, arrival: float) -> Conversation:
    starts = range(0, line.input_length, BLOCK_TOKENS)
    blocks = zip(line.hash_ids, starts, strict=False)
    prefixes = tuple(Prefix(block, min(BLOCK_TOKENS, line.input_length - start)) for block, start in blocks)
    num_own = line.input_length - sum(prefix.num_tokens for prefix in prefixes)
    turn = Turn(num_own, line.output_length, line.output_length, timeout=line.timeout)
    return Conversation(arrival, (turn,), line.tenant, line.priority, prefixes)
