"""The endpoints of Messages, and the jobs that their bodies become."""

from chairlift.api.anthropic.convention import KEY_HEADER, PATH
from chairlift.api.anthropic.errors import AnthropicErrorBody
from chairlift.api.anthropic.events import MessagesEvent
from chairlift.api.anthropic.message import AnthropicMessage, TokenCount
from chairlift.api.anthropic.reply import MessagesReply
from chairlift.api.anthropic.request import CountTokensRequest, MessagesRequest
from chairlift.api.http.access import Client
from chairlift.api.jobs import Job, JobMaker
from chairlift.api.routes import Route, at_once, generating


def _read(jobs: JobMaker, body: MessagesRequest, client: Client) -> Job:
    return jobs.of_conversation(
        body,
        client,
        body.params(jobs.inputs.default_chat_params),
        lambda new_reader: MessagesReply(body, jobs.model_name, jobs.inputs.vocabulary, new_reader),
        clamps_max_tokens=True,  # clients often ask for more tokens than there is room for
    )


def _count_tokens(jobs: JobMaker, body: CountTokensRequest) -> TokenCount:
    """Counts the tokens of the prompt that the same body would have as a request for an answer."""
    return TokenCount(input_tokens=len(jobs.encode(body).token_ids))


ROUTES = (
    Route(
        "POST",
        PATH,
        "messages",
        "Answer a conversation, in the format of Anthropic's clients",
        generating(MessagesRequest, _read),
        AnthropicMessage,
        MessagesRequest,
        MessagesEvent,
        AnthropicErrorBody,
        key_header=KEY_HEADER,
    ),
    Route(
        "POST",
        f"{PATH}/count_tokens",
        "count_tokens",
        "Count the tokens of such a conversation's prompt",
        at_once(CountTokensRequest, _count_tokens),
        TokenCount,
        CountTokensRequest,
        error=AnthropicErrorBody,
        key_header=KEY_HEADER,
    ),
)
