"""The replies of `/v1/rerank` and `/v1/score`."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.replies.reply import UnstreamedReply
from chairlift.api.rerank.request import RerankRequest
from chairlift.api.wire.body import LeftOutIfNone, WholeReply
from chairlift.api.wire.usage import PromptUsage
from chairlift.engine.text.deltas import RequestDelta
from chairlift.prompt_work import PromptResult

Scores = Callable[[Sequence[PromptResult | None]], list[float]]
"""Makes a score for each pair of what was computed; see `Comparison`."""


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    """A document, by its place in the request, and its score."""

    index: int
    relevance_score: float
    document: Annotated[RankedText | None, LeftOutIfNone] = None


class Ranking(WholeReply):
    """The documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage

    @property
    def parts(self) -> list[Any]:
        """See `WholeReply`."""
        return self.results


class PairScore(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(WholeReply):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage

    @property
    def parts(self) -> list[Any]:
        """See `WholeReply`."""
        return self.data


class _ScoredReply(UnstreamedReply):
    """The base of both replies: one to one request."""

    def __init__(self, kind: str, model: str, scores: Scores) -> None:
        """`kind`: the beginning of its id."""
        self.id = f"{kind}-{uuid4().hex}"
        self._model, self._scores = model, scores

    def _scores_of(self, outputs: Sequence[RequestDelta]) -> list[float]:
        for output in outputs:
            output.check_result()
        return self._scores([output.prompt_result for output in outputs])


class RankingReply(_ScoredReply):
    """Ranks documents."""

    def __init__(self, body: RerankRequest, model: str, scores: Scores) -> None:
        super().__init__("rerank", model, scores)
        self._num_told = body.top_n
        self._texts = body.texts if body.return_documents is not False else None

    def whole(self, outputs: list[RequestDelta]) -> Ranking:
        """See `Reply`. Of equal documents the first comes first."""
        scores = self._scores_of(outputs)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._num_told]
        results = [
            RankedDocument(index=index, relevance_score=scores[index], document=self._document(index)) for index in best
        ]
        return Ranking(id=self.id, model=self._model, results=results, usage=PromptUsage.of(outputs))

    def _document(self, index: int) -> RankedText | None:
        return None if self._texts is None else RankedText(text=self._texts[index])


class ScoresReply(_ScoredReply):
    """Scores pairs."""

    def __init__(self, model: str, scores: Scores) -> None:
        super().__init__("score", model, scores)
        self._created = int(time.time())

    def whole(self, outputs: list[RequestDelta]) -> ScoreList:
        """See `Reply`."""
        scores = enumerate(self._scores_of(outputs))
        return ScoreList(
            id=self.id,
            created=self._created,
            model=self._model,
            data=[PairScore(index=index, score=score) for index, score in scores],
            usage=PromptUsage.of(outputs),
        )
