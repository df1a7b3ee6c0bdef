"""Which settings of a load test go together: a setting that would have no effect is refused, not ignored."""

from collections.abc import Iterator, Set
from itertools import combinations

# Of each group at most one can be given.
_ALTERNATIVES = (
    ("request_rate", "ramp", "trace"),
    ("trace", "messages", "conversations", "prompt_tokens"),
    ("trace", "messages", "conversations", "prefix_tokens"),
    ("trace", "messages", "conversations", "turns"),
    ("trace", "output_tokens"),
    ("endpoint completions", "messages", "conversations", "turns"),
    ("sweep", "request_rate", "ramp", "trace"),
    ("sweep concurrency", "concurrency"),
)

# Each setting has an effect only beside one of these.
_COMPANIONS = {
    "burstiness": ("request_rate", "ramp", "sweep rate"),
    "trace_speedup": ("trace",),
    "num_prefixes": ("prefix_tokens",),
    "think_time": ("turns", "conversations"),
    "goodput_share": ("sweep",),
    "sweep": ("goodput",),
}


def complaints(given: Set[str]) -> list[str]:
    """What is wrong with these settings being given together, as sentences for the user.

    Beside their names `given` may hold a name with its value, where only that matters: "endpoint completions".
    """
    return [*_conflicts(given), *_idle(given)]


def _conflicts(given: Set[str]) -> Iterator[str]:
    pairs = {pair: None for group in _ALTERNATIVES for pair in combinations(group, 2)}
    for one, other in pairs:
        if one in given and other in given:
            yield f"give either {flag(one)} or {flag(other)}, not both"


def _idle(given: Set[str]) -> Iterator[str]:
    for name, companions in _COMPANIONS.items():
        if name in given and given.isdisjoint(companions):
            yield f"{flag(name)} needs {' or '.join(map(flag, companions))}"


def flag(name: str) -> str:
    """A setting as it is written on the command line."""
    return f"--{name.replace('_', '-')}"
