"""Workloads made of random numbers: arrivals, heavy-tailed lengths, shared prefixes, tenants, priorities, patience.

Drawn in blocks, so that a million conversations are neither slow nor all in memory. The same settings give the same
workload, and asking for more requests keeps the first ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.lengths import Lengths
from simulation.costs import CostModel, StepShape
from simulation.workload import Conversation, Prefix, Turn, Workload

_BLOCK = 4096
_END_TOKEN_ROOM = 2  # who ends by an end token might have said this many times as much


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Settings of a synthetic workload. Shares are between 0 and 1; `priorities` are shares of the levels 0, 1, ...

    Raises `ValueError` with one line that says what to change.
    """

    num_requests: int
    slot_tokens: int
    rate: float | None  # conversations a second; None: all are there from the start
    burstiness: float = 1.0  # shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths.parse("lognormal:100,0.9,1000"))
    output_tokens: Lengths = field(default_factory=lambda: Lengths.parse("lognormal:30,0.8,500"))
    turns: Lengths = field(default_factory=lambda: Lengths.parse(1))
    pause: float = 5.0  # mean seconds between an answer and the next turn
    num_tenants: int = 1
    flood_share: float = 0.0  # of conversations that are the first tenant's; the others share the rest
    priorities: tuple[float, ...] = (1.0,)
    num_families: int = 0
    family_share: float = 0.5  # of conversations that begin with a family's prefix
    family_tokens: Lengths = field(default_factory=lambda: Lengths.parse(200))
    zipf: float = 1.0  # popularity of the k-th family is k ** -zipf
    impatient_share: float = 0.0
    patience: float = 10.0  # mean seconds until an impatient client goes away
    timeout_share: float = 0.0
    timeout: float = 30.0  # seconds
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.flood_share, self.family_share, self.impatient_share, self.timeout_share)
        if self.num_requests < 1:
            raise ValueError(f"a workload needs at least 1 request, not {self.num_requests}")
        if any(not 0 <= share <= 1 for share in (*shares, *self.priorities)):
            raise ValueError("a share must be between 0 and 1")
        if not np.isclose(sum(self.priorities), 1):
            raise ValueError(f"the shares of the priorities must add up to 1, not {sum(self.priorities):g}")
        if self.num_tenants < 1:
            raise ValueError(f"a workload needs at least 1 tenant, not {self.num_tenants}")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"the rate must be above 0 requests a second, not {self.rate:g}")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be above 0, not {self.burstiness:g}")
        if self.slot_tokens < 2:
            raise ValueError(f"a slot must hold a prompt token and an output token, not {self.slot_tokens} tokens")


def conversations(settings: Synthetic) -> Workload:
    """Conversations in order of arrival, with `num_requests` turns in all."""
    num_left = settings.num_requests
    for conversation in _endless(settings):
        yield _cut(conversation, num_left)
        num_left -= len(conversation.turns)
        if num_left <= 0:
            return


def _cut(conversation: Conversation, num_turns: int) -> Conversation:
    turns = conversation.turns[:num_turns]
    return Conversation(conversation.arrival, turns, conversation.tenant, conversation.priority, conversation.prefixes)


def _endless(settings: Synthetic) -> Workload:
    now = 0.0
    families = _family_lengths(settings)
    block = 0
    while True:
        draw = np.random.default_rng([settings.seed, block])
        arrivals = now + _gaps(settings, draw).cumsum()
        now = float(arrivals[-1])
        num_turns = settings.turns.draw(_BLOCK, draw)
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
    prompts, outputs = settings.prompt_tokens.draw(count, draw), settings.output_tokens.draw(count, draw)
    stops = (draw.random(count) < 0.5).tolist()
    pauses = draw.exponential(settings.pause, count).tolist()
    patience = draw.exponential(settings.patience, count).tolist()
    fates = draw.random((2, count)) < np.array([[settings.impatient_share], [settings.timeout_share]])
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
    evenly = draw.integers(0 if not settings.flood_share else 1, max(settings.num_tenants, 2), size=_BLOCK)
    if settings.num_tenants == 1:
        return [0] * _BLOCK
    tenants: list[int] = np.where(draw.random(_BLOCK) < settings.flood_share, 0, evenly).tolist()
    return tenants


def _priorities(settings: Synthetic, draw: np.random.Generator) -> list[int]:
    levels: list[int] = draw.choice(len(settings.priorities), size=_BLOCK, p=settings.priorities).tolist()
    return levels


def _members(settings: Synthetic, draw: np.random.Generator) -> list[int | None]:
    """For each conversation the family whose prefix it begins with, if any."""
    if not settings.num_families:
        return [None] * _BLOCK
    popularity = np.arange(1, settings.num_families + 1) ** -settings.zipf
    chosen = draw.choice(settings.num_families, size=_BLOCK, p=popularity / popularity.sum()).tolist()
    belongs = (draw.random(_BLOCK) < settings.family_share).tolist()
    return [family if is_member else None for family, is_member in zip(chosen, belongs, strict=True)]


def _family_lengths(settings: Synthetic) -> list[int]:
    """At most half a slot each."""
    draw = np.random.default_rng([settings.seed, settings.num_families, _BLOCK])
    lengths = settings.family_tokens.draw(settings.num_families, draw)
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
    sample = replace(settings, num_requests=_BLOCK, rate=None)
    turns = [turn for conversation in conversations(sample) for turn in conversation.turns]
    shared = [sum(p.num_tokens for p in conversation.prefixes) for conversation in conversations(sample)]
    num_prompt = round(fmean(turn.num_new_tokens for turn in turns) + fmean(shared))
    num_output = fmean(turn.num_output_tokens for turn in turns)
    step = cost.seconds(StepShape(0, num_slots, round(num_slots * (num_prompt + num_output / 2))))
    prompt = cost.seconds(StepShape(num_prompt, 0, 0)) - cost.seconds(StepShape(0, 0, 0))
    requests_per_s = 1 / (prompt + num_output * step / num_slots)
    return requests_per_s * len(shared) / len(turns)
