"""Whose turn it is among those who wait: priorities, ageing, tenants."""

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.params import RequestOptions, SamplingParams
from chairlift.scheduler import Request, RequestState
from chairlift.scheduler.fair_queue import AGEING_S, FairQueue

TOKENS = 128


def ask(name: str, *, priority: int = 0, tenant: str = "", num_tokens: int = 4) -> Request:
    options = RequestOptions(priority=priority, tenant=tenant)
    return Request(name, [7] * num_tokens, SamplingParams(), 8, 0, options=options)


def make(name: str, time: float = 0.0, *, priority: int = 0, tenant: str = "", num_tokens: int = 4) -> RequestState:
    return RequestState(ask(name, priority=priority, tenant=tenant, num_tokens=num_tokens), time)


def queue_of(*requests: RequestState) -> FairQueue:
    queue = FairQueue()
    for request in requests:
        queue.push(request)
    queue.check()
    return queue


def drained(queue: FairQueue, limit: int = 10_000, now: float = 0.0) -> list[str]:
    names: list[str] = []
    while any(True for _ in queue) and len(names) < limit:
        expected = queue.peek()
        request = queue.pop(now)
        assert request is expected
        names.append(request.request_id)
    return names


def tenants(names: Iterable[str]) -> str:
    return "".join(name[0] for name in names)


def several(tenant: str, count: int, num_tokens: int = TOKENS, priority: int = 0) -> list[RequestState]:
    names = [f"{tenant}{at} of {priority}" for at in range(count)]
    return [make(name, tenant=tenant, num_tokens=num_tokens, priority=priority) for name in names]


def test_tenants_take_turns_in_each_priority_for_itself() -> None:
    assert tenants(drained(queue_of(*several("a", 3), *several("b", 3), *several("c", 3)))) == "abcabcabc"
    urgent = several("a", 3, priority=-3)
    assert tenants(drained(queue_of(*several("a", 2), *several("b", 2), *urgent))) == "aaaabab"


def test_turns_are_counted_in_tokens() -> None:
    queue = queue_of(*several("a", 50), *several("b", 50, TOKENS // 4))
    assert Counter(tenants(drained(queue, limit=50))) == {"a": 10, "b": 40}


def test_what_was_generated_is_charged_to_who_waits_for_more_and_forgotten_of_who_does_not_wait() -> None:
    requests = [*several("a", 20), *several("b", 20)]
    queue, gone = queue_of(*requests), make("gone", tenant="c")
    for request, num_tokens in ((requests[0], 5 * TOKENS), (gone, 1000 * TOKENS)):
        request.token_ids += [7] * num_tokens
        queue.charge(request)
    queue.push(make("c0", tenant="c"))
    served = tenants(drained(queue, limit=15))
    assert served.replace("c", "") == "bbbbbabababab" + "a"
    assert "c" in served[:3]


# Leaving and coming back


def test_who_leaves_is_not_served() -> None:
    requests = [make(name, float(at)) for at, name in enumerate("abc")]
    queue = queue_of(*requests)
    queue.remove(requests[1])
    assert drained(queue) == ["a", "c"]


def come_back(queue: FairQueue, num_tokens: int) -> None:
    returned = make("a-returned", 1.0, tenant="a", num_tokens=num_tokens)
    returned.num_preemptions = 1
    queue.push(returned, is_first=True)


def test_who_comes_back_is_before_the_others_of_its_tenant_and_has_paid() -> None:
    queue = queue_of(*several("a", 2), *several("b", 2))
    come_back(queue, 8 * TOKENS)
    assert [name[:2] for name in drained(queue)] == ["a-", "a0", "b0", "a1", "b1"]


def test_who_comes_back_saves_up_no_turns_for_its_tenant_nor_for_newcomers() -> None:
    queue = queue_of(*several("b", 100))
    assert tenants(drained(queue, limit=50)) == "b" * 50
    come_back(queue, 4)
    for request in (*several("a", 1), *several("c", 3)):
        queue.push(request)
    assert tenants(drained(queue, limit=8)) == "aacbcbcb"


def test_each_priority_gets_a_slot_in_time_whatever_comes_above_it() -> None:
    queue = queue_of(*[make(f"low{at}", 0.0, priority=2) for at in range(10)])
    served_low = []
    for second in range(250):
        queue.push(make(f"urgent{second}", float(second)))
        if queue.pop(float(second)).options.priority:
            served_low.append(second)
    assert served_low == [60, 121, 182, 243]  # two levels of thirty seconds, and then before those that came later


def test_those_who_wait_can_be_listed_roughly_in_order() -> None:
    early = [make(f"{name}{at}", tenant=name) for name, at in (("a", 0), ("a", 1), ("b", 0))]
    queue = queue_of(make("late", 0.0, priority=1), *early)
    assert [request.request_id for request in queue] == ["a0", "b0", "a1", "late"]


def test_priorities_and_tenants_of_those_who_left_are_forgotten_though_others_still_wait() -> None:
    queue = queue_of(make("patient"))
    for at in range(300):
        requests = [make(f"p{at}", float(at), priority=at), make(f"t{at}", float(at), tenant=f"t{at}")]
        for request in requests:
            queue.push(request)
        for request in requests:
            queue.remove(request)
        queue.check()
    assert len(queue._levels) == 1
    assert max(len(queue._by_urgency), len(queue._levels[0]._by_counter)) < 100
    assert drained(queue) == ["patient"]


class Comparison(RuleBasedStateMachine):
    """Whatever comes and goes: whose turn it is has the most urgent priority, and is the first of its tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: dict[str, RequestState] = {}
        self.taken: list[RequestState] = []
        self.time = 0.0
        self.since: dict[int, float] = {}  # by priority: since when requests have waited of which none was served
        self.names = count()

    @rule(priority=st.integers(-2, 2), tenant=st.sampled_from("abc"), num_tokens=st.integers(1, 3 * TOKENS))
    def add(self, priority: int, tenant: str, num_tokens: int) -> None:
        self.time += 3.0
        request = make(str(next(self.names)), self.time, priority=priority, tenant=tenant, num_tokens=num_tokens)
        self.queue.push(request)
        self._note(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        self.time += 1.0
        urgency = min(map(self._urgency, self.waiting.values()))
        request = self.queue.pop(self.time)
        assert self._urgency(request) == urgency
        self.since[request.options.priority] = self.time
        request.group.has_started = True
        self.taken.append(request)
        self._forget(request)

    def _urgency(self, request: RequestState) -> float:
        return AGEING_S * request.options.priority + self.since[request.options.priority]

    def _note(self, request: RequestState) -> None:
        self.waiting[request.request_id] = request
        self.since.setdefault(request.options.priority, request.queue_time)

    def _forget(self, request: RequestState) -> None:
        priority = request.options.priority
        del self.waiting[request.request_id]
        if all(each.options.priority != priority for each in self.waiting.values()):
            del self.since[priority]

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), num_tokens=st.integers(0, 4 * TOKENS))
    def charge(self, data: st.DataObject, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.taken))
        request.token_ids += [7] * num_tokens
        self.queue.charge(request)

    @precondition(lambda self: self.taken)
    @rule()
    def put_back(self) -> None:
        self.time += 1.0
        request = self.taken.pop()
        request.num_preemptions += 1
        request.queue_time = self.time
        self.queue.push(request, is_first=True)
        self._note(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        request = self.waiting[name]
        self.queue.remove(request)
        self._forget(request)

    @rule(priority=st.integers(-2, 2), tenant=st.sampled_from("abcd"), num_tokens=st.integers(1, 3 * TOKENS))
    def compare(self, priority: int, tenant: str, num_tokens: int) -> None:
        """Those whom a newcomer may displace are those who would be served after it, the last one first."""
        newcomer = ask("newcomer", priority=priority, tenant=tenant, num_tokens=num_tokens)
        later = [each.request_id for group in self.queue.later_than([newcomer], self.time) for each in group]
        trial = deepcopy(self.queue)
        trial.push(RequestState(newcomer, self.time))
        order = drained(trial, now=self.time)
        after = order[order.index("newcomer") + 1 :]
        waiting = [name for name in after if not self.waiting[name].group.has_started]
        if {each.options.priority for each in self.waiting.values()} <= {priority}:
            assert later == waiting[::-1]
        assert set(later) <= set(waiting)

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert sorted(request.request_id for request in self.queue) == sorted(self.waiting)
        if self.waiting:
            assert self.queue.peek() is self.queue.peek()


TestComparison = Comparison.TestCase
TestComparison.settings = settings(stateful_step_count=50)
