"""The settings that are compared, each one step further than the one before."""

from collections.abc import Callable

from chairlift.scheduler import Policy
from simulation.simulation import Setting

PREEMPT_AFTER = 32
"""Tokens that a row may generate before it can lose its slot, where preemption is on."""


def _first_come(ageing: float) -> Setting:
    policy = Policy(enable_prefix_caching=False, priority_ageing=ageing)
    return Setting("first-come", policy, knows_tenants=False, knows_priorities=False)


def _prefixes(ageing: float) -> Setting:
    return Setting("prefixes", Policy(priority_ageing=ageing), knows_tenants=False, knows_priorities=False)


def _fair(ageing: float) -> Setting:
    return Setting("fair", Policy(priority_ageing=ageing), knows_priorities=False)


def _priorities(ageing: float) -> Setting:
    return Setting("priorities", Policy(priority_ageing=ageing))


def _preemption(ageing: float) -> Setting:
    return Setting("preemption", Policy(priority_ageing=ageing, preempt_after=PREEMPT_AFTER))


SETTINGS: dict[str, Callable[[float], Setting]] = {
    "first-come": _first_come,
    "prefixes": _prefixes,
    "fair": _fair,
    "priorities": _priorities,
    "preemption": _preemption,
}
"""By name, each made from the seconds of waiting that are worth one level of priority."""
