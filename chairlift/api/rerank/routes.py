"""The endpoints that score documents, and the jobs that their bodies become."""

from chairlift.api.http.access import Client
from chairlift.api.jobs import Job, JobMaker
from chairlift.api.rerank.reply import Ranking, RankingReply, ScoreList, ScoresReply
from chairlift.api.rerank.request import RerankRequest, ScoreRequest
from chairlift.api.routes import Route, generating
from chairlift.engine.text.relevance import Pair


def _read_rerank(jobs: JobMaker, body: RerankRequest, client: Client) -> Job:
    tokenizer, most = jobs.inputs.tokenizer, body.max_tokens_per_doc
    texts = body.texts if most is None else [tokenizer.first_tokens(text, most, "documents") for text in body.texts]
    comparison = jobs.inputs.relevance.compare([Pair(body.query, text) for text in texts], body.instruction)
    return jobs.of_prompts(
        body,
        client,
        comparison.prompts,
        comparison.task,
        lambda: RankingReply(body, jobs.model_name, comparison.scores),
        prompt_field="documents",
    )


def _read_scores(jobs: JobMaker, body: ScoreRequest, client: Client) -> Job:
    comparison = jobs.inputs.relevance.compare(body.pairs(), body.instruction)
    return jobs.of_prompts(
        body,
        client,
        comparison.prompts,
        comparison.task,
        lambda: ScoresReply(jobs.model_name, comparison.scores),
        prompt_field="text_2",
    )


_RERANK = generating(RerankRequest, _read_rerank)
_SCORE = generating(ScoreRequest, _read_scores)
_RERANK_TEXT = "Order documents by how well they fit a query"
_SCORE_TEXT = "Score pairs of texts"
ROUTES = (
    Route("POST", "/v1/rerank", "rerank", _RERANK_TEXT, _RERANK, Ranking, RerankRequest),
    Route("POST", "/v2/rerank", "rerank_v2", "The same, where Cohere's clients look", _RERANK, Ranking, RerankRequest),
    Route("POST", "/rerank", "rerank_bare", "The same, where vLLM's clients look", _RERANK, Ranking, RerankRequest),
    Route("POST", "/v1/score", "score", _SCORE_TEXT, _SCORE, ScoreList, ScoreRequest),
    Route("POST", "/score", "score_bare", "The same, where vLLM's clients look", _SCORE, ScoreList, ScoreRequest),
)
