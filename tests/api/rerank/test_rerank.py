"""`/v1/rerank` and `/v1/score`, which score texts by the vectors of the bundled model."""

from typing import Any

import pytest

from tests.api.conftest import Server
from tests.api.contract import error_of, post

RERANK, SCORE = "/v1/rerank", "/v1/score"
DOCUMENTS = ["the north wind", "a snail", {"text": "a snail's house"}]
ASKED: dict[str, Any] = {"query": "a snail", "documents": DOCUMENTS}


async def scores_of(server: Server, one: Any, others: Any) -> list[float]:
    reply = await post(server, SCORE, {"text_1": one, "text_2": others})
    assert [each["index"] for each in reply["data"]] == list(range(len(reply["data"])))
    return [each["score"] for each in reply["data"]]


async def test_documents_are_ordered_by_their_scores(server: Server) -> None:
    reply = await post(server, RERANK, ASKED)
    told = [(each["index"], each["document"]["text"]) for each in reply["results"]]
    assert told[0] == (1, "a snail")
    assert sorted(told) == [(0, "the north wind"), (1, "a snail"), (2, "a snail's house")]
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1.0)
    assert reply["usage"] == {"prompt_tokens": 36, "total_tokens": 36}  # the query is one of the documents
    by_index = {each["index"]: each["relevance_score"] for each in reply["results"]}
    plain = ["the north wind", "a snail", "a snail's house"]
    assert await scores_of(server, "a snail", plain) == pytest.approx([by_index[index] for index in range(3)])


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
async def test_the_best_come_alone_if_asked_for(server: Server, path: str) -> None:
    reply = await post(server, path, {**ASKED, "top_n": 1, "return_documents": False})
    assert [(each["index"], set(each)) for each in reply["results"]] == [(1, {"index", "relevance_score"})]


async def test_lists_of_one_length_are_scored_in_pairs(server: Server) -> None:
    texts = ["a snail", "the north wind"]
    pairs = await scores_of(server, texts, texts[::-1])
    assert pairs == pytest.approx(await scores_of(server, "a snail", texts[1:]) * 2)
    assert await scores_of(server, texts, texts) == pytest.approx([1.0, 1.0])


async def test_of_long_documents_the_beginning_is_read(server: Server) -> None:
    cut = await post(server, RERANK, {**ASKED, "max_tokens_per_doc": 7})
    assert cut["usage"]["prompt_tokens"] == 14
    assert {each["index"] for each in cut["results"][:2]} == {1, 2}  # what is read of them is the same
    assert cut["results"][1]["document"] == {"text": "a snail's house"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {**ASKED, "documents": []}, "documents"),
        (RERANK, {**ASKED, "documents": [{"title": "a"}]}, "documents"),
        (RERANK, {**ASKED, "top_n": 0}, "top_n"),
        (RERANK, {**ASKED, "rank_fields": ["title"]}, "rank_fields"),
        (RERANK, {**ASKED, "instruction": "find it"}, "instruction"),
        (RERANK, {**ASKED, "documents": ["a" * 600]}, "documents"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
    ],
)
async def test_what_cannot_be_scored_is_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    error = await error_of(server, path, body)
    assert str(error["param"]).startswith(param)
