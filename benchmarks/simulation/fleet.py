"""Replicas behind a router: each is the real scheduler over the cache's books, and all share one clock.

The router is one of four. The prefix-aware one is the class that the ingress on Ray Serve uses (`chairlift.routing`);
it sees token ids as bytes, as a router sees text. A replica may be lost at some time: what it was asked is asked of
others, as a client or an ingress does, and it comes back later with nothing in its cache.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count
from math import inf

import numpy as np

from chairlift.routing import PrefixRouter, name_blocks
from chairlift.scheduler import Policy, Scheduler, TokenEvent
from simulation.costs import CostModel
from simulation.figures import Spread
from simulation.requests import Records, SimulatedRequest
from simulation.simulation import Agenda, Clock, Machine, Setting
from simulation.steps import SimulatedStep
from simulation.workload import Conversation, Workload, opening

_BLOCK_TOKENS = 32
_SETTING = Setting("fleet", Policy())

Loads = Mapping[int, int]
"""Unfinished requests of every replica that lives."""


Router = Callable[[SimulatedRequest, Loads], int]
"""Chooses a replica."""


def route_in_turn() -> Router:
    """Round robin."""
    turns = count()
    return lambda _, loads: sorted(loads)[next(turns) % len(loads)]


def route_to_least_loaded() -> Router:
    """Fewest unfinished requests."""
    return lambda _, loads: min(loads, key=lambda replica: (loads[replica], replica))


def route_by_tenant() -> Router:
    """Rendezvous hashing, the consistent hashing in which only the lost replica's tenants move (Thaler, 1998)."""

    def weigh(tenant: str, replica: int) -> bytes:
        return blake2b(f"{tenant}/{replica}".encode(), digest_size=8).digest()

    return lambda request, loads: max(loads, key=lambda replica: weigh(request.tenant, replica))


def route_by_prefix() -> Router:
    """Returns where most of the prompt's beginning is warm, within a slack."""
    router = PrefixRouter[int]()

    def choose(request: SimulatedRequest, loads: Loads) -> int:
        prompt = array("i", request.request.prompt_token_ids).tobytes()
        blocks = name_blocks(b"", prompt, _BLOCK_TOKENS * 4)
        replica = router.rank(blocks, loads)[0]
        router.note(blocks, replica)
        return replica

    return choose


ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": route_in_turn,
    "least loaded": route_to_least_loaded,
    "hash of tenant": route_by_tenant,
    "prefix-aware": route_by_prefix,
}


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica dies at `time` and is back, empty, `downtime` later; in seconds."""

    time: float = inf
    downtime: float = 60.0


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Holds what one router came to. Times in seconds."""

    router: str
    num_replicas: int
    num_requests: int
    num_asked_again: int  # because their replica died
    duration: float
    hit_rate: float  # of prompt tokens, those that were reused
    known_rate: float  # of prompt tokens, those that somebody had computed before
    ttft: Spread | None
    ttft_after_loss: Spread | None  # of requests that came while the replica was away
    imbalance: float  # the busiest replica's time in steps over the mean
    utilization: float  # the mean replica's time in steps over the duration
    output_tokens_per_s: float


class _Replica:
    """One engine: its scheduler and slots, who is there, and how long it has computed."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.slots = machine.make_slots()
        sizes = machine.max_num_batched_tokens, machine.max_steps_per_launch, machine.max_queue_size
        self.scheduler = Scheduler(self.slots, *sizes, _SETTING.policy, clock)
        self.requests: dict[str, SimulatedRequest] = {}
        self.is_stepping = False


class Fleet:
    """One workload on replicas behind one router. Runs once."""

    def __init__(
        self, workload: Workload, machine: Machine, num_replicas: int, router: str, cost: CostModel, loss: Loss
    ) -> None:
        self._machine, self._router_name, self._cost, self._loss = machine, router, cost, loss
        self._route = ROUTERS[router]()
        self._clock = Clock()
        self._agenda = Agenda(workload, self._clock, self._begin, is_on_demand=False)
        self._replicas = {number: _Replica(machine, self._clock) for number in range(num_replicas)}
        self._busy = dict.fromkeys(self._replicas, 0.0)
        self._records = Records()
        self._arrivals: dict[str, float] = {}  # of requests that are asked again: when they were asked first
        self._numbers = count()
        self._num_known = 0
        self._families: set[int] = set()
        self._num_asked_again = 0

    def run(self) -> FleetFigures:
        """Plays until everything has ended."""
        if self._loss.time < inf:
            self._agenda.plan(self._loss.time, self._lose)
        while self._agenda.next_time < inf:
            self._agenda.pass_time(self._agenda.next_time)
        left = sum(len(replica.requests) for replica in self._replicas.values())
        assert left == 0, f"{left} requests never ended"
        return self._figures()

    def _begin(self, conversation: Conversation) -> None:
        families = {prefix.family: prefix.num_tokens for prefix in conversation.prefixes}
        self._num_known += sum(num for family, num in families.items() if family in self._families)
        self._families.update(families)
        self._ask(conversation, 0, opening(conversation.prefixes), self._clock.now)

    def _ask(self, conversation: Conversation, index: int, history: list[int], arrival: float) -> None:
        """One turn, of whichever replica the router chooses."""
        options = _SETTING.options(conversation, conversation.turns[index])
        number = next(self._numbers)
        simulated = SimulatedRequest.of(conversation, index, number, history, options, self._clock.now)
        self._arrivals[simulated.request.request_id] = arrival
        loads = {number: len(replica.requests) for number, replica in self._replicas.items()}
        chosen = self._route(simulated, loads)
        replica = self._replicas[chosen]
        replica.requests[simulated.request.request_id] = simulated
        simulated.board(replica.scheduler)
        if not replica.is_stepping:
            self._step(chosen, replica)

    def _step(self, number: int, replica: _Replica) -> None:
        """Begins a step, whose end is planned; at the end follows the next, if there is work."""
        replica.is_stepping = replica.scheduler.has_work
        if not replica.is_stepping:
            return
        step = SimulatedStep.begin(replica.scheduler, replica.slots, replica.requests, self._cost)
        self._busy[number] += step.seconds
        self._agenda.plan(self._clock.now + step.seconds, partial(self._end_step, number, replica, step))

    def _end_step(self, number: int, replica: _Replica, step: SimulatedStep) -> None:
        if self._replicas.get(number) is not replica:  # it died meanwhile
            return
        for event in step.end(replica.scheduler):
            if event.finish_reason is not None:
                self._note_end(replica, event)
        self._step(number, replica)

    def _note_end(self, replica: _Replica, event: TokenEvent) -> None:
        simulated = replica.requests.pop(event.request_id)
        simulated.arrival = self._arrivals.pop(event.request_id)
        self._records.append(simulated.ending(simulated.fate(event), 0, self._cost, self._clock.now))
        conversation, following = simulated.conversation, simulated.index + 1
        if following < len(conversation.turns):
            history = simulated.state.token_ids
            self._num_known += len(history)
            ask = partial(self._ask_next, conversation, following, history)
            self._agenda.plan(self._clock.now + conversation.turns[following].pause, ask)

    def _ask_next(self, conversation: Conversation, index: int, history: list[int]) -> None:
        self._ask(conversation, index, history, self._clock.now)

    def _lose(self) -> None:
        """The first replica dies; its requests are asked again, from their beginning."""
        lost = self._replicas.pop(0)
        self._agenda.plan(self._clock.now + self._loss.downtime, self._bring_back)
        for simulated in lost.requests.values():
            self._num_asked_again += 1
            num_new = simulated.turn.num_new_tokens
            history = list(simulated.request.prompt_token_ids[:-num_new])
            arrival = self._arrivals.pop(simulated.request.request_id)
            self._ask(simulated.conversation, simulated.index, history, arrival)

    def _bring_back(self) -> None:
        self._replicas[0] = _Replica(self._machine, self._clock)

    def _figures(self) -> FleetFigures:
        arrivals, duration = self._records.column("arrival"), self._clock.now
        ttfts = self._records.column("first_token") - arrivals
        is_after = (arrivals >= self._loss.time) & (arrivals < self._loss.time + self._loss.downtime)
        num_prompt = float(self._records.column("num_prompt_tokens").sum())
        busy = np.array(list(self._busy.values()))
        return FleetFigures(
            router=self._router_name,
            num_replicas=len(self._busy),
            num_requests=len(self._records),
            num_asked_again=self._num_asked_again,
            duration=duration,
            hit_rate=float(self._records.column("num_cached_tokens").sum()) / num_prompt,
            known_rate=self._num_known / num_prompt,
            ttft=Spread.of(ttfts),
            ttft_after_loss=Spread.of(ttfts[is_after]),
            imbalance=float(busy.max() / busy.mean()),
            utilization=float(busy.mean() / duration),
            output_tokens_per_s=float(self._records.column("num_output_tokens").sum()) / duration,
        )
