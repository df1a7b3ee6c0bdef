"""The endpoints of Responses, and the jobs that their bodies become."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web
from pydantic_core import to_json

from chairlift.api.endpoints import json_reply
from chairlift.api.http.access import Client
from chairlift.api.jobs import EncodedChat, Job, JobMaker
from chairlift.api.responses.items import messages_of
from chairlift.api.responses.reply import ResponsesReply
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.responses.response_object import DeletedResponse, ResponseObject, ResponsesEvent
from chairlift.api.responses.truncation import encode_end
from chairlift.api.routes import Route, generating
from chairlift.api.service import Service
from chairlift.api.store import StoredReply
from chairlift.engine.text.chat_template import Message
from chairlift.errors import InvalidRequest

NOT_STORED = "there is no such stored response, or no longer; ask for responses with store: true to have them kept"

_STORED = web.ResponseKey("chairlift_stored", StoredReply)


def _read(jobs: JobMaker, body: ResponsesRequest, client: Client) -> Job:
    body = _with_earlier_messages(jobs, body, client)
    params = body.params(jobs.inputs.default_chat_params)
    keep = _keeper(jobs, body, client)
    return jobs.of_conversation(
        body,
        client,
        params,
        lambda new_reader: ResponsesReply(body, params, jobs.model_name, jobs.inputs.vocabulary, new_reader, keep),
        encode=None if params.truncates_prompt or body.truncation != "auto" else partial(_encode_end, jobs, body),
    )


def _with_earlier_messages(jobs: JobMaker, body: ResponsesRequest, client: Client) -> ResponsesRequest:
    if body.previous_response_id is None:
        return body
    stored = jobs.store.find(client.owner, body.previous_response_id)
    if stored is None:
        raise InvalidRequest(
            f"previous_response_id: {NOT_STORED}, or send the whole conversation as input", "previous_response_id"
        )
    return body.going_on_with(messages_of(stored))


def _encode_end(jobs: JobMaker, body: ResponsesRequest, messages: Sequence[Message]) -> EncodedChat:
    """The prompt of as many of the last messages as fit."""
    encode = partial(jobs.inputs.encode_chat, options=body.chat_options())
    num_wanted = None if jobs.clamps_max_tokens else body.max_output_tokens
    token_ids, num_left_out = encode_end(messages, encode, jobs.inputs.max_seq_len, num_wanted)
    warning = f"truncation: the first {num_left_out} messages did not fit and were left out"
    return EncodedChat(token_ids, [warning] if num_left_out else [])


def _keeper(jobs: JobMaker, body: ResponsesRequest, client: Client) -> Callable[[ResponseObject], None] | None:
    """The function that stores the reply; None if the client does not ask for that."""
    if not body.store:
        return None
    conversation, owner, store = to_json(body.spoken_messages()), client.owner, jobs.store

    def keep(reply: ResponseObject) -> None:
        store.keep(owner, reply.id, StoredReply(conversation, reply.model_dump_json().encode()))

    return keep


async def _find(service: Service, request: web.Request) -> web.Response:
    owner = service.keys.client_of(request).owner
    stored = await asyncio.to_thread(service.store.find, owner, request.match_info["id"])
    if stored is None:
        raise web.HTTPNotFound(text=NOT_STORED)
    response = web.Response(body=stored.reply, content_type="application/json")
    response[_STORED] = stored  # so that others who ask for it meanwhile share it
    return response


async def _delete(service: Service, request: web.Request) -> web.Response:
    response_id = request.match_info["id"]
    owner = service.keys.client_of(request).owner
    if not await asyncio.to_thread(service.store.delete, owner, response_id):
        raise web.HTTPNotFound(text=NOT_STORED)
    return json_reply(DeletedResponse(id=response_id))


ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        "responses",
        "Answer a conversation, in items and named events",
        generating(ResponsesRequest, _read),
        ResponseObject,
        ResponsesRequest,
        ResponsesEvent,
    ),
    Route("GET", "/v1/responses/{id}", "stored_response", "A stored response", _find, ResponseObject),
    Route("DELETE", "/v1/responses/{id}", "delete_response", "Forget a stored response", _delete, DeletedResponse),
)
