"""Says what must never be."""


class Violation(AssertionError):
    """Holds what must never be."""


def require(is_so: bool, message: str) -> None:
    """Raises a `Violation` with this message unless that is so."""
    if not is_so:
        raise Violation(message)
