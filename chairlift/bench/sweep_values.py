"""What a sweep goes through: `rate=1,2,4,8` or `concurrency=1,2,4,8`."""

import math
from dataclasses import dataclass
from typing import Self

# What may be swept, and the field of the configuration that each value becomes.
FIELDS = {"rate": "request_rate", "concurrency": "concurrency"}


@dataclass(frozen=True, slots=True)
class SweepValues:
    """Values in ascending order, each once."""

    name: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` with an example for what cannot be read."""
        name, _, listed = text.partition("=")
        try:
            values = tuple(sorted({float(value) for value in listed.split(",")}))
        except ValueError:
            values = ()
        if name not in FIELDS or not values or not all(_is_value(name, value) for value in values):
            raise ValueError(
                f"cannot read the sweep {text!r}: it must look like rate=1,2,4,8 or concurrency=1,2,4,8, "
                "with numbers above 0 (whole ones for concurrency)"
            )
        return cls(name, values)

    def settings(self, value: float) -> dict[str, float]:
        """The settings that one value stands for."""
        return {FIELDS[self.name]: int(value) if self.name == "concurrency" else value}


def _is_value(name: str, value: float) -> bool:
    return 0 < value < math.inf and (name == "rate" or value == int(value))
