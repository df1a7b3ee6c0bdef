"""A discrete-event simulation of the engine: the real scheduler and the cache's books, a formula instead of a model.

A step takes the time that the cost model says. What happens meanwhile (requests come, clients leave) happens at its own
time, between `advance` and `update`, as it does in an engine that works beside its device.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from math import inf

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.state_books import PROMPT_TAIL, StateBooks
from chairlift.errors import QueueFull
from chairlift.params import RequestOptions
from chairlift.plan import StepPlan
from chairlift.scheduler import Policy, RequestState, Scheduler, TokenEvent
from simulation.costs import CostModel
from simulation.meter import Meter, Watch
from simulation.requests import Fate, SimulatedRequest
from simulation.steps import SimulatedStep
from simulation.workload import Conversation, Turn, Workload, opening


class Clock:
    """The time of the simulation, in seconds; the scheduler reads it by calling it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Agenda:
    """Holds what will happen: conversations of the workload as they are due, and what was planned meanwhile."""

    def __init__(
        self, workload: Workload, clock: Clock, begin: Callable[[Conversation], None], *, is_on_demand: bool
    ) -> None:
        """`is_on_demand`: conversations begin when `begin_next` says so, never by themselves."""
        self._workload = workload
        self._is_on_demand = is_on_demand
        self._clock = clock
        self._begin = begin
        self._next = next(workload, None)
        self._entries: list[tuple[float, int, Callable[[], None]]] = []  # a heap of time, serial number, act
        self._serials = count()  # of two at the same time the one that was planned first happens first

    @property
    def next_time(self) -> float:
        """Returns when something happens next; infinity if nothing does any more."""
        return min(self._next_arrival, self._entries[0][0] if self._entries else inf)

    def plan(self, time: float, act: Callable[[], None]) -> None:
        """`act` will be called at that time, which is not in the past."""
        heapq.heappush(self._entries, (time, next(self._serials), act))

    def pass_time(self, until: float) -> None:
        """Lets everything happen that is due by then, each at its time."""
        while (time := self.next_time) <= until:
            self._clock.now = max(self._clock.now, time)
            if self._next_arrival <= time:
                self.begin_next()
            else:
                heapq.heappop(self._entries)[2]()
        self._clock.now = until

    def begin_next(self) -> bool:
        """The workload's next conversation begins now, due or not. False if there is none."""
        conversation = self._next
        if conversation is None:
            return False
        self._next = next(self._workload, None)
        self._begin(conversation)
        return True

    @property
    def _next_arrival(self) -> float:
        return inf if self._next is None or self._is_on_demand else self._next.arrival


@dataclass(frozen=True, slots=True)
class Machine:
    """The sizes of the engine; as the fields of `EngineConfig`."""

    num_slots: int
    slot_tokens: int
    max_num_batched_tokens: int
    max_steps_per_launch: int = 1
    max_queue_size: int = 2**31
    cache_tokens: int | None = None  # that all slots together have memory for; None: all they can hold
    num_snapshots: int | None = None  # recurrent states that are kept; None: layers have no such states

    def make_slots(self) -> SlotLedger:
        """Makes the books of the cache. A copy of a state takes no time here."""
        states = None if self.num_snapshots is None else StateBooks(self.num_slots, PROMPT_TAIL, self.num_snapshots)
        return SlotLedger(self.num_slots, self.slot_tokens, self.cache_tokens, states)


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds what is compared: a policy, and which of a request's properties it is told of."""

    name: str
    policy: Policy
    knows_tenants: bool = True
    knows_priorities: bool = True

    def options(self, conversation: Conversation, turn: Turn) -> RequestOptions:
        """Returns how a request of that conversation is served."""
        tenant = conversation.tenant if self.knows_tenants else ""
        return _options(tenant, conversation.priority if self.knows_priorities else 0, turn.timeout)


@lru_cache(maxsize=4096)
def _options(tenant: str, priority: int, timeout: float | None) -> RequestOptions:
    return RequestOptions(tenant=tenant, priority=priority, timeout=timeout)


PREEMPT_AFTER = 32
"""Tokens that a row may generate before it can lose its slot, where preemption is on."""


def settings() -> dict[str, Setting]:
    """Returns what is compared, each one step further than the one before."""
    policy = Policy()
    compared = (
        Setting("first-come", Policy(enable_prefix_caching=False), knows_tenants=False, knows_priorities=False),
        Setting("prefixes", policy, knows_tenants=False, knows_priorities=False),
        Setting("fair", policy, knows_priorities=False),
        Setting("priorities", policy),
        Setting("preemption", Policy(preempt_after=PREEMPT_AFTER)),
    )
    return {setting.name: setting for setting in compared}


@dataclass(frozen=True, slots=True)
class Played:
    """Holds what a simulation leaves behind. `duration` is in seconds of the simulation."""

    meter: Meter
    num_slots: int
    duration: float
    num_steps: int
    num_checks: int


class Simulation:
    """One workload on one machine under one setting. Runs once."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        setting: Setting,
        cost: CostModel,
        *,
        depth: int | None = None,
        check_every: int = 1,
        window: float = 10.0,
    ) -> None:
        """`depth`: so many requests wait at all times, whenever they were to arrive; None: they come when they are due.

        `check_every`: steps between full checks. `window`: seconds over which tenants' shares are compared.
        """
        self._setting, self._cost, self._depth = setting, cost, depth
        self._clock = Clock()
        self._slots = machine.make_slots()
        self._scheduler = Scheduler(
            self._slots,
            machine.max_num_batched_tokens,
            machine.max_steps_per_launch,
            machine.max_queue_size,
            setting.policy,
            self._clock,
        )
        self._agenda = Agenda(workload, self._clock, self._begin, is_on_demand=depth is not None)
        self._watch = Watch(self._scheduler, self._slots, machine.max_num_batched_tokens, check_every)
        self._meter = Meter(cost, window)
        self._requests: dict[str, SimulatedRequest] = {}
        self._seated: set[RequestState] = set()  # who had a slot in the step before
        self._num_requests = 0

    def run(self) -> Played:
        """Plays until everything has ended. Raises `Breach` if the scheduler does what it must not."""
        while True:
            self._agenda.pass_time(self._clock.now)
            self._keep_backlog()
            if self._scheduler.has_work:
                self._step()
            elif self._agenda.next_time < inf:
                self._agenda.pass_time(self._agenda.next_time)
            else:
                break
        self._watch.look_at_end(len(self._requests))
        watch = self._watch
        return Played(self._meter, self._slots.num_slots, self._clock.now, watch.num_steps, watch.num_checks)

    def _keep_backlog(self) -> None:
        if self._depth is not None:
            while self._scheduler.num_waiting < self._depth and self._agenda.begin_next():
                pass

    def _step(self) -> None:
        for event in self._scheduler.expire():
            self._note(event)
        if not self._scheduler.has_work:
            return
        step = SimulatedStep.begin(self._scheduler, self._slots, self._requests, self._cost, self._look_at)
        num_backlogged = self._scheduler.num_running if self._scheduler.num_waiting else 0
        self._meter.note_step(step.plan, step.requests, step.seconds, num_backlogged, step.num_copied, self._clock.now)
        self._agenda.pass_time(self._clock.now + step.seconds)
        for event in step.end(self._scheduler):
            self._note(event)
        self._watch.look_after()

    def _look_at(self, plan: StepPlan) -> None:
        self._watch.look_at(plan)
        self._note_admissions()

    def _note_admissions(self) -> None:
        """Notes who has a slot for the first time."""
        seated = set(self._scheduler.running)
        new = [self._requests[request.request_id] for request in seated - self._seated]
        admitted = [simulated for simulated in new if not simulated.is_admitted]
        for simulated in admitted:
            simulated.is_admitted = True
            is_right = simulated.state.admission_time == self._clock.now
            self._watch.demand(is_right, f"request {simulated.request.request_id} was not admitted when it says")
        self._meter.note_admissions(admitted, self._clock.now)
        self._seated = seated

    def _begin(self, conversation: Conversation) -> None:
        self._submit(conversation, 0, opening(conversation.prefixes))

    def _submit(self, conversation: Conversation, index: int, history: list[int]) -> None:
        """One turn, behind what was said before."""
        turn = conversation.turns[index]
        options = self._setting.options(conversation, turn)
        simulated = SimulatedRequest.of(conversation, index, self._num_requests, history, options, self._clock.now)
        request = simulated.request
        self._num_requests += 1
        self._requests[request.request_id] = simulated
        self._meter.note_arrival(simulated, self._clock.now)
        try:
            simulated.board(self._scheduler)
        except QueueFull:
            self._end(simulated, Fate.REFUSED)
            return
        if turn.patience is not None:
            self._agenda.plan(self._clock.now + turn.patience, partial(self._leave, request.request_id))

    def _leave(self, request_id: str) -> None:
        """The client goes away, if its request has not ended."""
        simulated = self._requests.get(request_id)
        if simulated is not None:
            simulated.has_left = True
            event = self._scheduler.abort(request_id)
            self._watch.demand(event is not None, f"request {request_id} cannot be aborted")
            if event is not None:
                self._note(event)

    def _note(self, event: TokenEvent) -> None:
        simulated = self._requests.get(event.request_id)
        if simulated is None:
            self._watch.demand(False, f"there is news of request {event.request_id}, which has ended")
        elif event.finish_reason is not None:
            self._end(simulated, simulated.fate(event))

    def _end(self, simulated: SimulatedRequest, fate: Fate) -> None:
        name = simulated.request.request_id
        del self._requests[name]
        if fate is Fate.FINISHED:
            is_whole = simulated.state.num_output_tokens == simulated.turn.num_output_tokens
            self._watch.demand(is_whole, f"request {name} was cut short")
        self._meter.note_end(simulated, fate, self._clock.now)
        self._go_on(simulated)

    def _go_on(self, simulated: SimulatedRequest) -> None:
        """The next turn of its conversation, after a pause."""
        conversation, following = simulated.conversation, simulated.index + 1
        if following < len(conversation.turns):
            submit = partial(self._submit, conversation, following, simulated.state.token_ids)
            self._agenda.plan(self._clock.now + conversation.turns[following].pause, submit)
