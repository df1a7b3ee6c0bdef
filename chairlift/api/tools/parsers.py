"""Which parser reads which family."""

from chairlift.api.tools.family import ToolFamily
from chairlift.api.tools.hermes import HermesParser
from chairlift.api.tools.llama3 import Llama3JsonParser
from chairlift.api.tools.pieces import ToolCallParser


def make_parser(family: ToolFamily, max_calls: int | None = None) -> ToolCallParser:
    """A parser of one answer. All text after `max_calls` calls (at least 1; None: no limit) is swallowed."""
    match family:
        case ToolFamily.HERMES:
            return HermesParser(max_calls)
        case ToolFamily.LLAMA3_JSON:
            return Llama3JsonParser(max_calls)
