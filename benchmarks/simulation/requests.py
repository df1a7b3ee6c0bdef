"""Requests on their way, what became of each, and who got what of the machine."""

from array import array
from dataclasses import dataclass
from enum import IntEnum
from math import nan

import numpy as np
from numpy.typing import NDArray

from chairlift.params import FinishReason, RequestOptions, SamplingParams
from chairlift.plan import RowResult
from chairlift.scheduler import Request, RequestState, Scheduler, TokenEvent
from simulation.costs import CostModel, StepShape
from simulation.workload import Conversation, Turn, text


class Fate(IntEnum):
    """Says how a request ended."""

    FINISHED = 0  # an end token, or its length
    LEFT = 1  # its client went away
    TIMED_OUT = 2  # in a slot
    EXPIRED = 3  # before it had one
    REFUSED = 4  # the queue was full


@dataclass(frozen=True, slots=True)
class Ending:
    """One request that has ended. Times are seconds of the simulation; what never happened is not a number."""

    fate: Fate
    tenant: int
    priority: int
    arrival: float
    admission: float
    first_token: float
    end: float
    ideal: float  # seconds it takes with the machine to itself and nothing cached
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


class Records:
    """Endings in columns, in the order in which they came."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in Ending.__slots__}

    def __len__(self) -> int:
        return len(self._columns["fate"])

    def append(self, ending: Ending) -> None:
        """Takes one more."""
        for name, column in self._columns.items():
            column.append(getattr(ending, name))

    def column(self, name: str) -> NDArray[np.float64]:
        """A copy of one field of all endings, float64."""
        return np.array(self._columns[name], dtype=np.float64)


END_TOKEN = 2**31 - 1
_END_TOKENS = frozenset({END_TOKEN})
_PARAMS = SamplingParams(max_tokens=None)


@dataclass(slots=True)
class SimulatedRequest:
    """One turn of a conversation, made a request."""

    request: Request
    conversation: Conversation
    index: int  # of the turn
    arrival: float
    num_left: int  # tokens that the model has yet to say
    num_owed: int  # tokens that have yet to be computed
    result: RowResult  # of every step but the last
    state: RequestState  # the scheduler's, once it has boarded
    is_admitted: bool = False
    has_left: bool = False

    @classmethod
    def of(
        cls,
        conversation: Conversation,
        index: int,
        number: int,
        history: list[int],
        options: RequestOptions,
        now: float,
    ) -> "SimulatedRequest":
        """Behind what was said before comes the turn's own text, which has the request's number."""
        turn = conversation.turns[index]
        request = Request(
            str(number),
            history + text(number, turn.num_new_tokens),
            _PARAMS,
            turn.max_tokens,
            seed=number,
            eos_token_ids=_END_TOKENS,
            options=options,
        )
        return cls(
            request=request,
            state=RequestState(request, now),
            conversation=conversation,
            index=index,
            arrival=now,
            num_left=turn.num_output_tokens,
            num_owed=len(request.prompt_token_ids) + turn.num_output_tokens - 1,  # nothing is computed with the last
            result=RowResult([number % END_TOKEN]),
        )

    def board(self, scheduler: Scheduler) -> None:
        """Queues the request. `QueueFull` if it is refused."""
        scheduler.add(self.request)
        self.state = scheduler.find(self.request.request_id) or self.state

    @property
    def tenant(self) -> str:
        return self.conversation.tenant

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.index]

    def say(self, num_steps: int) -> RowResult:
        """Returns what the model says next: the same token again and again, and the end token when it is done."""
        self.num_left -= num_steps
        if self.num_left > 0:
            return self.result if num_steps == 1 else RowResult(self.result.token_ids * num_steps)
        num_surplus = -self.num_left
        said = self.result.token_ids * (num_steps - num_surplus - 1)
        return RowResult([*said, END_TOKEN, *[END_TOKEN] * num_surplus])

    def fate(self, event: TokenEvent) -> Fate:
        """Returns how it ended, by the event that says so."""
        if event.finish_reason is not FinishReason.ABORT:
            return Fate.FINISHED
        if self.has_left:
            return Fate.LEFT
        return Fate.EXPIRED if event.rejection is not None else Fate.TIMED_OUT

    def ending(self, fate: Fate, tenant: int, cost: CostModel, now: float) -> Ending:
        """Returns what is kept of it; `tenant` is its tenant's number."""
        request = self.state
        return Ending(
            fate=fate,
            tenant=tenant,
            priority=self.conversation.priority,
            arrival=self.arrival,
            admission=_or_nan(request.admission_time),
            first_token=_or_nan(request.first_token_time),
            end=now,
            ideal=_ideal(request, cost),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
        )


def _ideal(request: RequestState, cost: CostModel) -> float:
    """Seconds with the machine to itself: the prompt in one step, and a step for each further token."""
    decode = StepShape(0, 1, request.num_prompt_tokens + request.num_output_tokens // 2)
    num_steps = max(0, request.num_output_tokens - 1)
    return cost.seconds(StepShape(request.num_prompt_tokens, 0, 0)) + num_steps * cost.seconds(decode)


def _or_nan(time: float | None) -> float:
    return nan if time is None else time
