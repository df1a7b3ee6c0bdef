"""Makes the odd bytes, numbers and JSON values that mutations put into files."""

import json
import math
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

POWERS = (7, 8, 15, 16, 24, 28, 31, 32, 40, 53, 62, 63, 64)
EDGES = (0, 1, -1, *(sign * 2**power + step for power in POWERS for sign in (1, -1) for step in (-1, 0, 1)))
ODD_FLOATS = (0.0, -0.0, 1e-320, 1e-30, -1.5, 3.4e38, 1e300, math.inf, -math.inf, math.nan)
ODD_TEXTS = ("", " ", "\n", "\x00", "a" * 5000, "../../etc/passwd", "\N{RIGHT-TO-LEFT OVERRIDE}é", "{{ x }}", "\ud800")
_MOST_DEPTH = 200_000  # of arrays in arrays
_NESTED = re.compile(r'"<nested (\d+)>"')
_LEAF_SHARE = 0.25  # how often the way down a JSON value ends before a leaf


def odd_integer(rng: Random) -> int:
    return rng.choice(EDGES) if rng.random() < 0.8 else rng.randrange(-300, 300)


def odd_bytes(rng: Random, size: int) -> bytes:
    """An odd number, or any bytes, little-endian in that many bytes."""
    if rng.random() < 0.2:
        return rng.randbytes(size)
    if size in (4, 8) and rng.random() < 0.2:
        number = rng.choice(ODD_FLOATS)
        return struct.pack("<f", min(max(number, -3.4e38), 3.4e38)) if size == 4 else struct.pack("<d", number)
    number_of_bits: int = odd_integer(rng) % (1 << 8 * size)
    return number_of_bits.to_bytes(size, "little")


def odd_value(rng: Random) -> Any:
    """A JSON value that does not belong anywhere."""
    return rng.choice(
        (
            lambda: odd_integer(rng),
            lambda: rng.choice(ODD_FLOATS),
            lambda: rng.choice(ODD_TEXTS),
            lambda: rng.choice((None, True, False, [], {}, [[]], [None], {"": None}, [0] * 1000, 10**400)),
            lambda: f"<nested {rng.randrange(1, _MOST_DEPTH)}>",
            lambda: {"__float__": rng.choice(("NaN", "Infinity", 3))},
        )
    )()


def written(value: Any) -> bytes:
    """Writes it as JSON, with nested arrays for what `odd_value` has in their place: Python writes no deep ones."""

    def nested(match: re.Match[str]) -> str:
        depth = int(match[1])
        return "[" * depth + "]" * depth

    return _NESTED.sub(nested, json.dumps(value)).encode()


def change_json(value: Any, rng: Random) -> Any:
    """Changes one place in a parsed JSON value: itself, or a place within it, which is changed where it is."""
    if not isinstance(value, dict | list) or not value:
        return _change_leaf(value, rng)
    if rng.random() < _LEAF_SHARE:
        _change_members(value, rng)
        return value
    place = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    value[place] = change_json(value[place], rng)
    return value


def _change_leaf(value: Any, rng: Random) -> Any:
    if type(value) in (int, float) and rng.random() < 0.5:
        steps: tuple[Callable[[Any], Any], ...] = (
            lambda number: number + 1,
            lambda number: number - 1,
            lambda number: number * 2,
            lambda number: number * 2**20,
            lambda number: -number,
            lambda number: number / 1 if abs(number) < 2**100 else number,
            str,
            lambda number: [number],
        )
        return rng.choice(steps)(value)
    if isinstance(value, str) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice(ODD_TEXTS) + value[place + rng.randrange(2) :]
    return odd_value(rng)


def _change_members(value: dict[str, Any] | list[Any], rng: Random) -> None:
    """Removes, adds, renames or copies a member."""
    action = rng.randrange(4)
    if isinstance(value, list):
        place = rng.randrange(len(value))
        if action == 0:
            del value[place]
        elif action == 1:
            value.insert(place, odd_value(rng))
        else:
            value[place] = value[rng.randrange(len(value))]
        return
    name = rng.choice(list(value))
    if action == 0:
        del value[name]
    elif action == 1:
        value[rng.choice(ODD_TEXTS[:-1])] = odd_value(rng)
    elif action == 2:
        value[name + "x"] = value.pop(name)
    else:
        value[name] = value[rng.choice(list(value))]
