"""Requests, the step plan, and the policy that makes one from the other. Plain Python, no torch."""

from chairlift.scheduler.plan import RowPlan, RowResult, StepPlan, TokenEvent
from chairlift.scheduler.request import Grammar, Request, RequestState
from chairlift.scheduler.scheduler import TIMED_OUT, Policy, Scheduler

__all__ = [
    "TIMED_OUT",
    "Grammar",
    "Policy",
    "Request",
    "RequestState",
    "RowPlan",
    "RowResult",
    "Scheduler",
    "StepPlan",
    "TokenEvent",
]
