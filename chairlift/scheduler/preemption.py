"""Chooses which running request is preempted: for one of higher priority, or because memory is short."""

from collections.abc import Iterable, Sequence

from chairlift.scheduler.request import RequestState
from chairlift.scheduler.waiting import Policy


def choose_victim(running: Iterable[RequestState], next_request: RequestState, policy: Policy) -> RequestState | None:
    """Chooses the running request to preempt for the next waiting one. None if the policy allows none.

    Candidates have generated `preempt_after` tokens since they got a slot, and are at least `preempt_levels` below
    the next request's priority. Of these, it is the first with the lowest priority.
    None also while a request that was preempted has launches in flight.
    """
    if policy.preempt_after is None:
        return None
    victim, lowest = None, next_request.options.priority + policy.preempt_levels - 1
    for request in running:
        if request.is_yielding:
            return None
        num_generated = len(request.token_ids) - request.num_tokens_placed
        if request.options.priority > lowest and num_generated >= policy.preempt_after:
            victim, lowest = request, request.options.priority
    return victim


def choose_last(running: Sequence[RequestState]) -> RequestState | None:
    """Chooses the last of the running requests with the lowest priority, but never the first of all.

    None if there is no other, or while a request that was preempted has launches in flight.
    """
    others = running[1:]
    if not others or any(request.is_yielding for request in running):
        return None
    return max(reversed(others), key=lambda request: request.options.priority)
