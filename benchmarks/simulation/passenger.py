"""A request on its way, and what its model and its client know of it that the scheduler does not."""

from dataclasses import dataclass
from math import nan

from chairlift.params import FinishReason, RequestOptions, SamplingParams
from chairlift.scheduler import Request, RowResult, TokenEvent
from simulation.costs import CostModel, StepShape
from simulation.records import Ending, Fate
from simulation.workload import Conversation, Turn, text

END_TOKEN = 2**31 - 1
_END_TOKENS = frozenset({END_TOKEN})
_PARAMS = SamplingParams(max_tokens=None)


@dataclass(slots=True)
class Passenger:
    """One turn of a conversation, made a request."""

    request: Request
    conversation: Conversation
    index: int  # of the turn
    arrival: float
    num_left: int  # tokens that the model has yet to say
    num_owed: int  # tokens that have yet to be computed
    result: RowResult  # of every step but the last
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
    ) -> "Passenger":
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
            conversation=conversation,
            index=index,
            arrival=now,
            num_left=turn.num_output_tokens,
            num_owed=request.num_prompt_tokens + turn.num_output_tokens - 1,  # nothing is computed with the last
            result=RowResult([number % END_TOKEN]),
        )

    @property
    def tenant(self) -> str:
        return self.conversation.tenant

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.index]

    def say(self, num_steps: int) -> RowResult:
        """What the model says next: the same token again and again, and the end token when it is done."""
        self.num_left -= num_steps
        if self.num_left > 0:
            return self.result if num_steps == 1 else RowResult(self.result.token_ids * num_steps)
        num_surplus = -self.num_left
        said = self.result.token_ids * (num_steps - num_surplus - 1)
        return RowResult([*said, END_TOKEN, *[END_TOKEN] * num_surplus])

    def fate(self, event: TokenEvent) -> Fate:
        """How it ended, by the event that says so."""
        if event.finish_reason is not FinishReason.ABORT:
            return Fate.FINISHED
        if self.has_left:
            return Fate.LEFT
        return Fate.EXPIRED if event.is_rejected else Fate.TIMED_OUT

    def ending(self, fate: Fate, tenant: int, cost: CostModel, now: float) -> Ending:
        """What is kept of it; `tenant` is its tenant's number."""
        request = self.request
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


def _ideal(request: Request, cost: CostModel) -> float:
    """Seconds with the machine to itself: the prompt in one step, and a step for each further token."""
    decode = StepShape(0, 1, request.num_prompt_tokens + request.num_output_tokens // 2)
    num_steps = max(0, request.num_output_tokens - 1)
    return cost.seconds(StepShape(request.num_prompt_tokens, 0, 0)) + num_steps * cost.seconds(decode)


def _or_nan(time: float | None) -> float:
    return nan if time is None else time
