"""The endpoints of OpenAI's older clients, and the jobs that their bodies become."""

from chairlift.api.http.access import Client
from chairlift.api.jobs import Job, JobMaker
from chairlift.api.openai.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from chairlift.api.openai.completions import Completion, CompletionRequest
from chairlift.api.openai.embeddings import EMBEDDING_ROUTES
from chairlift.api.openai.replies import ChatReply, CompletionReply
from chairlift.api.openai.tokens import TOKEN_ROUTES
from chairlift.api.routes import Route, generating


def _read_chat(jobs: JobMaker, body: ChatCompletionRequest, client: Client) -> Job:
    params = body.params(jobs.inputs.default_chat_params)  # checks `n`, the number of choices that the reply creates
    return jobs.of_conversation(
        body,
        client,
        params,
        lambda new_reader: ChatReply(body, jobs.model_name, jobs.inputs.vocabulary, new_reader, jobs.fingerprint),
    )


def _read_completion(jobs: JobMaker, body: CompletionRequest, client: Client) -> Job:
    return jobs.of_texts(
        body,
        client,
        body.prompts(),
        body.params(jobs.inputs.default_params),
        lambda: CompletionReply(body, jobs.model_name, jobs.inputs, jobs.fingerprint),
        keeps_text=bool(body.echo),
    )


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "Answer a conversation",
        generating(ChatCompletionRequest, _read_chat),
        ChatCompletion,
        ChatCompletionRequest,
        ChatCompletionChunk,
    ),
    Route(
        "POST",
        "/v1/completions",
        "completions",
        "Continue texts",
        generating(CompletionRequest, _read_completion),
        Completion,
        CompletionRequest,
        Completion,
    ),
    *EMBEDDING_ROUTES,
    *TOKEN_ROUTES,
)
