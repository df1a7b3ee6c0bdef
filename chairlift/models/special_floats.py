"""Floats that JSON cannot represent, as transformers 5 writes them in a config.json: `{"__float__": "Infinity"}`."""

from typing import Any

_TAG = "__float__"
_VALUES = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def restore_floats(value: Any) -> Any:
    """`value`, parsed from JSON, with the float in place of each such object, at any depth. Others stay as they are."""
    if isinstance(value, dict):
        tag = value.get(_TAG)
        if len(value) == 1 and isinstance(tag, str) and tag in _VALUES:
            return _VALUES[tag]
        return {name: restore_floats(each) for name, each in value.items()}
    return [restore_floats(each) for each in value] if isinstance(value, list) else value
