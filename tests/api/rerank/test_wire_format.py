"""Rerank replies have the fields and types that Cohere and Jina document; their clients are not installed for tests.

https://docs.cohere.com/reference/rerank and https://jina.ai/reranker, as pydantic reads them strictly.
"""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.api.conftest import Server
from tests.api.contract import post


class Strict(BaseModel):
    """JSON whose types are exactly those declared. Both clients leave fields out that they do not know."""

    model_config = ConfigDict(strict=True)


class Ranked(Strict):
    index: int
    relevance_score: float


class CohereReply(Strict):
    id: str
    results: list[Ranked]


class JinaText(Strict):
    text: str


class JinaRanked(Ranked):
    document: JinaText


class JinaUsage(Strict):
    total_tokens: int


class JinaReply(Strict):
    model: str
    usage: JinaUsage
    results: list[JinaRanked]


ASKED: dict[str, Any] = {"model": "bundled", "query": "a snail", "documents": ["the north wind", "a snail"], "top_n": 1}
JINA = {**ASKED, "return_documents": True}


@pytest.mark.parametrize(
    ("path", "body", "reply"),
    [
        ("/v1/rerank", ASKED, CohereReply),
        ("/v2/rerank", {**ASKED, "max_tokens_per_doc": 4096}, CohereReply),
        ("/v1/rerank", JINA, JinaReply),
    ],
    ids=["cohere-v1", "cohere-v2", "jina"],
)
async def test_replies_have_the_fields_that_are_documented(
    server: Server, path: str, body: dict[str, Any], reply: type[CohereReply | JinaReply]
) -> None:
    (best,) = reply.model_validate(await post(server, path, body)).results
    assert best.index == 1
    assert best.relevance_score == pytest.approx(1.0)
