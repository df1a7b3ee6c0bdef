"""Requests, the step plan, and the policy that makes one from the other. Plain Python, no torch."""

from chairlift.scheduler.drafting import Drafter, Guess
from chairlift.scheduler.plan import RowPlan, RowResult, StepPlan, TokenEvent
from chairlift.scheduler.request import TIMED_OUT, Grammar, Request, RequestState
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.speculation import Speculation
from chairlift.scheduler.waiting import Policy

__all__ = [
    "TIMED_OUT",
    "Drafter",
    "Grammar",
    "Guess",
    "Policy",
    "Request",
    "RequestState",
    "RowPlan",
    "RowResult",
    "Scheduler",
    "Speculation",
    "StepPlan",
    "TokenEvent",
]
