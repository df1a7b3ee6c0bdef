"""Requests, the step plan, and the policy that makes one from the other. Plain Python, no torch."""

from chairlift.scheduler.plan import RowPlan, RowResult, SlotCopy, StepPlan, TokenEvent
from chairlift.scheduler.policy import Policy
from chairlift.scheduler.request import Grammar, Request
from chairlift.scheduler.scheduler import TIMED_OUT, Scheduler

__all__ = [
    "TIMED_OUT",
    "Grammar",
    "Policy",
    "Request",
    "RowPlan",
    "RowResult",
    "Scheduler",
    "SlotCopy",
    "StepPlan",
    "TokenEvent",
]
