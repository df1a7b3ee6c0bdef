"""The bodies of `/v1/rerank` and `/v1/score`, and the pairs of texts that they mean."""

from typing import Annotated, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from chairlift.api.wire.body import Body, Label, Texts
from chairlift.api.wire.generation import SENDER
from chairlift.api.wire.marks import Refused
from chairlift.api.wire.scheduling import ScheduledRequest
from chairlift.engine.text.relevance import Pair
from chairlift.errors import InvalidRequest

INSTRUCTION = "tells a reranker what a document must be like to fit; other models read none"


class Document(Body):
    """A document, as an object."""

    text: str


class _PairsRequest(ScheduledRequest):
    """Holds the fields that both have in common."""

    instruction: str | None = Field(None, max_length=2**16, description=INSTRUCTION)
    user: Label | None = Field(None, description=SENDER)

    @property
    def sender(self) -> str:
        return self.user or ""


class RerankRequest(_PairsRequest):
    """Order documents by how well they fit a query."""

    query: str = Field(min_length=1)
    documents: list[str | Document] = Field(min_length=1, description="texts, or objects with a text")
    top_n: StrictInt | None = Field(None, ge=1, description="only the best of them; default: all")
    return_documents: StrictBool | None = Field(None, description="repeat the documents in the results (default: true)")
    max_tokens_per_doc: StrictInt | None = Field(
        None, ge=1, description="only so many of a document's first tokens are read"
    )
    rank_fields: Annotated[None, Refused("a document is its text; join the fields yourself")] = None
    max_chunks_per_doc: Annotated[None, Refused("a document is scored in one piece")] = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(_PairsRequest):
    """Score pairs of texts. One text goes with each of the others; two lists of one length go together."""

    text_1: str | Texts = Field(description="a query, or one for each text of text_2")
    text_2: str | Texts = Field(description="texts to be scored")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if isinstance(self.text_1, list) and len(self.text_1) not in (1, len(self._documents)):
            raise InvalidRequest(
                f"text_1 has {len(self.text_1)} texts and text_2 {len(self._documents)}; give one, or as many", "text_1"
            )
        if not self._documents or not self.text_1:
            raise InvalidRequest("text_1 and text_2 need at least one text each", "text_2")
        return self

    @property
    def _documents(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2

    def pairs(self) -> list[Pair]:
        """The pairs, in the order of text_2."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        queries = queries * len(self._documents) if len(queries) == 1 else queries
        return [Pair(query, document) for query, document in zip(queries, self._documents, strict=True)]
