"""Requests, and the policy that makes step plans from them. Plain Python, no torch."""

from chairlift.scheduler.drafting import Drafter, Guess
from chairlift.scheduler.events import TokenEvent
from chairlift.scheduler.request import TIMED_OUT, Request, RequestState
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.speculation import Speculation
from chairlift.scheduler.step import begin_step
from chairlift.scheduler.waiting import Policy

__all__ = [
    "TIMED_OUT",
    "Drafter",
    "Guess",
    "Policy",
    "Request",
    "RequestState",
    "Scheduler",
    "Speculation",
    "TokenEvent",
    "begin_step",
]
