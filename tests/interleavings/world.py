"""The world that a search explores: the real scheduler and its books, the device, and what each client has heard.

An action is what may happen between two steps of an engine, or a step. A step is what `EngineCore.step` does with the
same parts; the rest of the engine adds nothing to the books. What goes wrong in a step goes wrong in its launch, or in
the time before its results come.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.state_books import PROMPT_TAIL, StateBooks
from chairlift.errors import QueueFull
from chairlift.params import FinishReason
from chairlift.plan import StepPlan
from chairlift.prompt_work import PooledStates, PoolTask, scores_in
from chairlift.scheduler import RequestState, Scheduler, Speculation, TokenEvent, begin_step
from tests.interleavings.device import NO_MEMORY, WHOLE, Device, Launch, Masks
from tests.interleavings.device_states import check_junctions
from tests.interleavings.disk import Disk
from tests.interleavings.scope import Case, CountingGrammar, Scope
from tests.interleavings.violation import require

STEP = "step"


class Impossible(Exception):
    """The action cannot happen here, though that is known only once it was tried."""


class Crash(Exception):
    """The device fails in a launch."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__("the device failed")
        self.plan = plan


class Clock:
    """Seconds, which pass when the search says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Client:
    """Holds what the sender of a request has heard."""

    is_here: bool = False  # it has sent its request
    has_ended: bool = False
    has_left: bool = False  # it aborted its request
    may_fail: bool = False  # a step with its request ran out of memory
    is_held: bool = False  # it reads nothing for now
    num_tokens: int = 0
    num_scored: int = 0
    num_pooled: int = 0  # tokens
    pooled: int = 0  # the sum of their numbers


class World:
    """One state. `actions` lists what may happen; `perform` lets it happen, and `check` judges the outcome."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.clock = Clock()
        states = None
        if scope.num_snapshots is not None:
            max_tentative = max(PROMPT_TAIL, scope.num_guessed + 1)  # as the engine does
            states = StateBooks(scope.num_slots, max_tentative, scope.num_snapshots, row_bytes=1)
            states.stops_at_ends = not scope.num_guessed
        self.disk = None if scope.saved is None else Disk(scope, saved=list(scope.saved))
        self.ledger = SlotLedger(scope.num_slots, scope.max_seq_len, scope.cache_tokens, states)
        self.scheduler = Scheduler(
            self.ledger,
            scope.max_num_batched_tokens,
            scope.max_steps,
            scope.max_queue_size,
            scope.policy,
            self.clock,
            scope.max_num_running,
            Speculation(scope.num_guessed) if scope.num_guessed else None,
            saved=self.disk,
        )
        self.device = Device(scope)
        self.launches: deque[Launch] = deque()
        self.clients = {name: Client() for name in scope.cases}
        self.epoch = 0
        self.epoch_of: dict[str, int] = {}  # by request with a slot: when it got it
        self.left = {
            "abort": scope.num_aborts,
            "hold": scope.num_holds,
            "forget": scope.num_resets,
            "trim": scope.num_trims,
            "out of memory": scope.num_out_of_memory,
            "late": scope.num_late,
            "crash": scope.num_crashes,
            "tick": scope.num_ticks,
            "lose": scope.num_lost,
            "stale": scope.num_stale,
        }

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.launches)

    @property
    def fair_action(self) -> str | None:
        """The next action if nothing else comes: late clients and masks return, and steps follow. None at the end."""
        for name, client in self.clients.items():
            if client.is_held:
                return f"resume {name}"
        for request in self.scheduler.running:
            if _is_mask_pending(request):
                return f"mask {request.request_id}"
        if self.disk is not None and self.disk.readings:
            return f"read {next(iter(self.disk.readings))}"
        return STEP if self.has_work else None

    def actions(self) -> Iterator[str]:
        """Lists everything that may happen now."""
        yield from self._arrivals()
        if self.has_work:
            yield from self._steps()
        for name, client in self.clients.items():
            is_open = client.is_here and not client.has_ended
            if self.left["abort"] and is_open:
                yield f"abort {name}"
            if client.is_held:
                yield f"resume {name}"
            elif self.left["hold"] and is_open:
                yield f"hold {name}"
        for request in self.scheduler.running:
            if _is_mask_pending(request):
                yield f"mask {request.request_id}"
        if self.disk is not None:
            yield from self.disk.actions(self.left)
        yield from (verb for verb in ("forget", "tick") if self.left[verb])
        if self.left["trim"] and not self.has_work:
            yield "trim"

    def perform(self, action: str) -> StepPlan | None:
        """Lets an action happen. Returns the plan of a step that launches one. `Impossible` if it cannot happen."""
        plan = None
        verb, _, name = action.partition(" ")
        match verb:
            case "step":
                plan = self._step(name)
            case "add":
                self._add(self.scope.cases[name])
            case "abort":
                self._spend("abort")
                self.clients[name].has_left = True
                event = self.scheduler.abort(name)
                require(event is not None, f"{name} has not ended, and is not here")
                self._note([event] if event is not None else [])
            case "hold" | "resume":
                self._hold(name, is_held=verb == "hold")
            case "read" | "lose" | "stale":
                self._read(verb, int(name))
            case "mask":
                self._grammar_of(name).is_ready = True
            case "forget":
                self._forget()
            case "tick":
                self._spend("tick")
                self.clock.now += 1.0
            case "trim":
                self._spend("trim")
                self.scheduler.placement.trim()
                self._settle()
                self.device.states.check_freed(self.ledger.states)
            case _:
                raise ValueError(action)
        self._look_around()
        return plan

    def check(self) -> None:
        """Checks the books, what slots hold, and that clients know of the end of requests that are not here."""
        self.scheduler.check()
        self.device.check(self.ledger)
        in_doubt = {row.slot for each in self.launches if each.is_out_of_memory for row in each.plan.rows}
        in_doubt = in_doubt.union(*(each.void_slots for each in self.launches))
        running = {request.request_id: request for request in self.scheduler.running}
        for name, client in self.clients.items():
            is_open = client.is_here and not client.has_ended
            request = self.scheduler.find(name)
            require((request is not None) == is_open, f"{name} has ended for one of its client and the scheduler")
            if name in running and not self.ledger.owed and running[name].slot not in in_doubt:
                slot = running[name].slot
                assert slot is not None
                self.device.check_slot(slot, running[name].num_computed, self.scope.cases[name])
        owners = {
            request.slot: self.scope.cases[name]
            for name, request in running.items()
            if request.slot is not None and request.slot not in in_doubt
        }
        index = self.scheduler.placement._index
        self.device.states.check(self.ledger, index, owners, is_in_flight=bool(self.launches))
        if not self.has_work:
            require(not self.ledger.claimed, "a slot is claimed, and there is no work")

    def _forget(self) -> None:
        self._spend("forget")
        self.scheduler.reset_prefix_cache()
        self.epoch += 1
        if self.disk is not None:
            self.disk.forget_all()

    def _read(self, verb: str, ticket: int) -> None:
        """A part of a saved prefix comes, or is lost, or comes when nobody waits for it any more."""
        assert self.disk is not None
        if verb != "read":
            self._spend(verb)
        num_owed, begun = len(self.ledger.owed), self.disk.epoch_of(ticket)
        self.scheduler.placement.restoring.load(self.disk.read(verb, ticket))
        is_used = len(self.ledger.owed) > num_owed
        require(not is_used or verb == "read", f"reading {ticket} is used, though nobody waits for it")
        require(not is_used or begun == self.epoch, f"reading {ticket} is used, though it was forgotten")

    def _arrivals(self) -> Iterator[str]:
        coming = [f"add {name}" for name, client in self.clients.items() if not client.is_here]
        return iter(coming[:1] if self.scope.is_in_order else coming)

    def _steps(self) -> Iterator[str]:
        yield STEP
        if self.launches:
            yield "step land"
        if self.left["out of memory"]:
            yield "step out of memory"
        if self.left["crash"]:
            yield "step crash"
        if self.left["late"]:
            names = [request.request_id for request in self.scheduler.running if request.grammar is not None]
            for num_late in range(1, min(self.left["late"], len(names)) + 1):
                for late in combinations(names, num_late):
                    yield f"step late {' '.join(late)}"
            if self.scope.num_guessed:
                yield from (f"step short {name}" for name in names)

    def _step(self, event: str) -> StepPlan | None:
        """A step, in which something may go wrong; "land" takes the results of the oldest launch and no more."""
        plan = None
        if event != "land":
            self._note(self.scheduler.expire())
            plan = self._launch(event)
            if plan is not None and len(self.launches) <= self.scope.num_ahead:
                return plan
        if self.launches and event != "crash":
            launch = self.launches[0]
            events = self.scheduler.update(launch.plan, launch.results)
            self.launches.popleft()
            self._note(events)
        return plan

    def _launch(self, event: str) -> StepPlan | None:
        if self.launches and self.launches[-1].is_out_of_memory:
            return _without_plan(event)
        num_owed = len(self.ledger.owed)
        marks: dict[str, tuple[int, ...]] = {}

        def look(plan: StepPlan) -> None:
            self._note_placed()
            if plan.rows:
                self._check_size(plan)
                marks.update({request.request_id: request.state_marks for request in self.scheduler.running})

        def launch(plan: StepPlan) -> None:
            check_junctions(plan, marks, self.scheduler, self.ledger)
            self.device.perform(plan.jobs[:num_owed], self.ledger)
            self.device.perform(plan.jobs[num_owed:], self.ledger, since=self.epoch)
            self._run(plan, event)

        try:
            plan = begin_step(self.scheduler, self.ledger, launch, look)
        except Crash as crash:
            self._crash()
            return crash.plan
        return plan if plan.rows else _without_plan(event)

    def _run(self, plan: StepPlan, event: str) -> None:
        """Computes a plan, unless the event is that this fails."""
        match event:
            case "crash":
                self._spend(event)
                self.device.fail(plan)
                raise Crash(plan)
            case "out of memory":
                self._spend(event)
                self._run_out_of_memory(plan)
            case _:
                results = self.device.compute(plan, self.ledger, self.epoch, self.epoch_of, self._masks(plan, event))
                self.launches.append(Launch(plan, results))

    def _masks(self, plan: StepPlan, event: str) -> Masks:
        """Notes which masks are late in a launch. `Impossible` if its rows need none of them."""
        what, _, names = event.partition(" ")
        by_name = {row.key.tag: row for row in plan.rows if row.is_sampled}
        coming = {name: sum(each.num_coming(name) for each in self.launches) for name in by_name}
        late, short = (tuple(names.split()), "") if what == "late" else ((), names)
        masks = Masks(late, short, coming)
        is_needed = not masks.short or (masks.short in by_name and by_name[masks.short].guess)
        if not is_needed or any(name not in by_name for name in masks.late):
            raise Impossible
        for name in masks.late:
            self._spend("late")
            self._grammar_of(name).is_ready = False
        if masks.short:
            self._spend("late")
        return masks

    def _run_out_of_memory(self, plan: StepPlan) -> None:
        results = self.device.run_out_of_memory(plan)
        for row, result in zip(plan.rows, results, strict=True):
            self.clients[row.key.tag].may_fail |= result.error is not None
        self.launches.append(Launch(plan, results, is_out_of_memory=True))

    def _crash(self) -> None:
        """A step raises: requests with a slot are dropped without an event, and whoever drives the engine says so."""
        for name in [request.request_id for request in self.scheduler.running]:
            self.clients[name].has_ended, self.clients[name].is_held = True, False
        self.launches.clear()
        self.scheduler.abandon()
        self._settle()

    def _add(self, case: Case) -> None:
        client = self.clients[case.name]
        client.is_here = True
        try:
            self._note(self.scheduler.add(case.request))
        except QueueFull:
            client.has_ended = True

    def _hold(self, name: str, is_held: bool) -> None:
        if is_held:
            self._spend("hold")
        self.clients[name].is_held = is_held
        request = self.scheduler.find(name)
        assert request is not None, f"{name} is not here"
        request.is_paused = is_held

    def _note(self, events: list[TokenEvent]) -> None:
        """Clients hear of these, and released slots are scrubbed, as in `EngineCore`."""
        self._settle()
        for event in events:
            self._hear(event, self.clients[event.request_id], self.scope.cases[event.request_id])

    def _hear(self, event: TokenEvent, client: Client, case: Case) -> None:
        name = case.name
        require(client.is_here and not client.has_ended, f"{name} hears more after its end")
        for scores in scores_in(event.prompt_result):
            client.num_scored += 1
            require(
                next(iter(scores or ()), None) == case.tokens[client.num_scored],
                f"{name} hears wrong scores of its prompt",
            )
        if isinstance(event.prompt_result, PooledStates):
            client.num_pooled += event.prompt_result.num_tokens
            client.pooled = (client.pooled + int(event.prompt_result.sums[0])) % WHOLE
        before, now = client.num_tokens, client.num_tokens + len(event.new_token_ids)
        wanted = case.answer[before:now]
        require(tuple(event.new_token_ids) == wanted, f"{name} hears {event.new_token_ids} where {list(wanted)} follow")
        client.num_tokens = now
        if event.finish_reason is None:
            return
        client.has_ended, client.is_held = True, False
        if event.finish_reason is FinishReason.ABORT and case.reason is not FinishReason.ABORT:
            is_excused = client.has_left or event.rejection is not None or event.stop_reason == "timeout"
            is_excused |= client.may_fail and event.error == NO_MEMORY
            require(is_excused, f"{name} is aborted without a reason: {event.error}")
            return
        if event.finish_reason is FinishReason.ABORT and (client.has_left or event.error == NO_MEMORY):
            return
        require(event.finish_reason is case.reason, f"{name} ends with {event.finish_reason}, not {case.reason}")
        require(now == len(case.answer), f"{name} ends after {now} tokens, not {len(case.answer)}")
        task = case.request.prompt_task
        if isinstance(task, PoolTask) and case.reason is not FinishReason.ABORT:
            span = task.span(len(case.request.prompt_token_ids))
            heard = client.num_pooled, client.pooled
            wanted_sum = sum(case.numbers[span.start : span.stop]) % WHOLE
            require(heard == (len(span), wanted_sum), f"{name} hears a vector of {client.num_pooled} tokens")
        elif task is not None and case.reason is not FinishReason.ABORT:
            num_scored = len(case.request.prompt_token_ids) - 1
            require(client.num_scored == num_scored, f"{name} hears {client.num_scored} scores, not {num_scored}")

    def _settle(self) -> None:
        """Has the device perform what is pending."""
        self.device.perform(list(self.ledger.owed), self.ledger)
        self.ledger.performed(len(self.ledger.owed))

    def _look_around(self) -> None:
        """After an action: what is invalid now is overwritten, and it is noted who has slots."""
        self._note_placed()
        self.device.forget_invalid(self.ledger, {row.slot for each in self.launches for row in each.plan.rows})

    def _note_placed(self) -> None:
        running = {request.request_id for request in self.scheduler.running}
        self.epoch_of = {name: self.epoch_of.get(name, self.epoch) for name in running | set(self._in_flight())}

    def _in_flight(self) -> Iterator[str]:
        return (row.key.tag for each in self.launches for row in each.plan.rows)

    def _check_size(self, plan: StepPlan) -> None:
        num_tokens = sum(plan.num_new_tokens)
        require(num_tokens <= self.scope.max_num_batched_tokens, f"a step computes {num_tokens} tokens")
        require(len(set(plan.slots)) == len(plan.rows), "a slot has two rows in a step")
        require(plan.num_steps == 1 or plan.is_decode, "a launch with a prompt has several steps")
        waiting = [row.key.tag for row in plan.rows if self.clients[row.key.tag].has_ended]
        require(not waiting, f"{waiting} are computed after their ends")

    def _spend(self, what: str) -> None:
        self.left[what] -= 1

    def _grammar_of(self, name: str) -> CountingGrammar:
        request = self.scheduler.find(name)
        assert request is not None
        assert isinstance(request.grammar, CountingGrammar)
        return request.grammar


def _without_plan(event: str) -> StepPlan | None:
    if event:  # it can go wrong only where there is something to compute
        raise Impossible
    return None


def _is_mask_pending(request: RequestState) -> bool:
    return request.grammar is not None and not request.grammar.is_ready
