"""The one list of protocols. Each is a package that imports none of the others; without its lines here, and its tests,
it can be deleted.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from chairlift.api.anthropic.convention import CONVENTION as ANTHROPIC_CONVENTION
from chairlift.api.errors import Convention

if TYPE_CHECKING:  # it imports the engine, which the ingress of Ray Serve must not
    from chairlift.api.routes import Route

CONVENTIONS: Sequence[Convention] = [
    ANTHROPIC_CONVENTION,
]
"""The conventions of clients that expect other forms than OpenAI's."""


@cache
def all_routes() -> "tuple[Route, ...]":
    """The routes of all protocols, and those that belong to none. Imports the engine."""
    from chairlift.api.anthropic.routes import ROUTES as ANTHROPIC
    from chairlift.api.batches.routes import ROUTES as BATCHES
    from chairlift.api.description import described
    from chairlift.api.endpoints import OWN_ROUTES
    from chairlift.api.openai.routes import ROUTES as OPENAI
    from chairlift.api.rerank.routes import ROUTES as RERANK
    from chairlift.api.responses.routes import ROUTES as RESPONSES

    return described(
        (
            *OPENAI,
            *RESPONSES,
            *ANTHROPIC,
            *RERANK,
            *BATCHES,
            *OWN_ROUTES,
        )
    )
