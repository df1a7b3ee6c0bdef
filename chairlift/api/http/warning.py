"""Writes the `Warning` header of a reply, which says what of a request was accepted and left out."""

from collections.abc import Mapping, Sequence

_MAX_WARNINGS = 8
_MAX_CHARACTERS = 300  # of one; proxies refuse headers of a few thousand bytes


def warning_header(sentences: Sequence[str]) -> Mapping[str, str]:
    """The header with these sentences, as RFC 7234 (5.5) has them: `299 - "one", 299 - "another"`; empty without any.

    Equal sentences are said once, and those over the limit are counted. Characters outside ASCII become "?".
    """
    told = list(dict.fromkeys(sentences))
    if len(told) > _MAX_WARNINGS:
        told = [*told[: _MAX_WARNINGS - 1], f"and {len(told) - _MAX_WARNINGS + 1} more warnings"]
    return {"Warning": ", ".join(f'299 - "{_quotable(each)}"' for each in told)} if told else {}


def _quotable(sentence: str) -> str:
    """The sentence as it may stand in a quoted string."""
    shown = sentence if len(sentence) <= _MAX_CHARACTERS else f"{sentence[: _MAX_CHARACTERS - 3]}..."
    plain = "".join(char if " " <= char <= "~" else "?" for char in shown)
    return plain.replace("\\", "\\\\").replace('"', '\\"')
