"""Requests, the step plan, and the policy that makes one from the other. Plain Python, no torch."""

from chairlift.scheduler.plan import RowPlan, RowResult, StepPlan, TokenEvent
from chairlift.scheduler.request import Grammar, Request
from chairlift.scheduler.scheduler import Scheduler

__all__ = ["Grammar", "Request", "RowPlan", "RowResult", "Scheduler", "StepPlan", "TokenEvent"]
