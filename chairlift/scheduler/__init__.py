"""Requests, the step plan, and the policy that makes one from the other. Plain Python, no torch."""

from chairlift.scheduler.plan import RowPlan, StepPlan, TokenEvent
from chairlift.scheduler.request import Request
from chairlift.scheduler.scheduler import Scheduler

__all__ = ["Request", "RowPlan", "Scheduler", "StepPlan", "TokenEvent"]
