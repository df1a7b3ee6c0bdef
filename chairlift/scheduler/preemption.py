"""Who has to make room for a request of higher priority."""

from collections.abc import Iterable

from chairlift.scheduler.request import Request


def choose_victim(running: Iterable[Request], waiting: Request, num_tokens: int) -> Request | None:
    """The first of the lowest priority, below `waiting`'s, of those that generated `num_tokens` since they got a slot.

    None if there is nobody, or somebody yields already: that takes until the launches in flight are over.
    """
    victim: Request | None = None
    for request in running:
        if request.is_yielding:
            return None
        priority = request.options.priority
        is_able = len(request.token_ids) - request.num_tokens_placed >= num_tokens
        if is_able and priority > (waiting if victim is None else victim).options.priority:
            victim = request
    return victim
