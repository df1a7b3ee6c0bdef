"""Makes engine jobs of checked bodies, and replies of jobs, streamed or whole, for all endpoints."""

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel
from pydantic_core import to_json

import chairlift
from chairlift.api import ServerConfig
from chairlift.api.answers import NewReader
from chairlift.api.answers.dialect import Dialect
from chairlift.api.answers.structure import WantedStructure
from chairlift.api.errors import ErrorReply, error_reply
from chairlift.api.http.access import Client
from chairlift.api.http.event_stream import EventStream
from chairlift.api.replies.anthropic import MessagesReply
from chairlift.api.replies.choices import ChatReply, CompletionReply
from chairlift.api.replies.reply import Reply
from chairlift.api.replies.responses import NOT_STORED, ResponsesReply, StoredResponse
from chairlift.api.telemetry import Observation, request_id_of
from chairlift.api.truncation import encode_end
from chairlift.api.turns import TURNS_WARNING, speakers_in_turn, without_billing_line
from chairlift.api.wire.anthropic import CountTokensRequest, MessagesRequest
from chairlift.api.wire.anthropic_message import TokenCount
from chairlift.api.wire.complaints import own_field_names
from chairlift.api.wire.completions import ChatCompletionRequest, CompletionRequest
from chairlift.api.wire.response_object import ResponseObject
from chairlift.api.wire.responses import Conversation, ResponsesRequest
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.engine.text.inputs import DEFAULT_TEXT, Generation, Prompt, TextOptions
from chairlift.errors import ChairliftError, ContextLengthExceeded, InvalidGrammar, InvalidRequest, RequestFailed
from chairlift.params import GRAMMAR_LIMIT, RequestOptions, RequestOutput, SamplingParams, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UncheckedJob:
    """What a body asks for, before its prompts are checked."""

    prompts: list[Prompt]
    params: SamplingParams
    options: RequestOptions
    reply: Reply
    is_streamed: bool
    structure: WantedStructure | None
    prompt_field: str
    text_options: TextOptions = DEFAULT_TEXT
    keeps_text: bool = False  # whether the reply needs the prompts' text
    field_names: Mapping[str, str] = field(default_factory=dict)  # see `TemplateInput`
    warnings: Sequence[str] = ()  # see `Body.warnings`


@dataclass(frozen=True, slots=True)
class _EncodedChat:
    """The prompt that a conversation became, and what its client is warned of."""

    token_ids: list[int]
    warnings: Sequence[str] = ()


class Store(Protocol):
    """Stores responses: a `ResponseStore`, or a proxy for one in another process. Usable from any thread."""

    def keep(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Does not wait, so other processes may not find the response yet; see `settled`."""
        ...

    async def settled(self) -> None:
        """Returns once every process can find what was kept before."""
        ...

    def find(self, owner: str, response_id: str) -> StoredResponse | None: ...

    def delete(self, owner: str, response_id: str) -> bool:
        """False if there is no such response."""
        ...


class JobMaker:
    """Reads bodies in a worker's thread, and turns them into generations on the event loop."""

    def __init__(self, llm: AsyncLLM, model_name: str, store: Store, config: ServerConfig) -> None:
        """ConfigurationError if the model lacks the configured marks."""
        self._llm = llm
        self._model_name = model_name
        self._store = store
        self._keeps_billing_line = config.keep_billing_line
        self._clamps_max_tokens = config.clamp_max_tokens
        self._allows_more = config.allow_additional_properties
        self._dialect = Dialect(llm.inputs, config)
        served = f"{chairlift.__version__} {model_name} {llm.config}"
        self._fingerprint = f"fp_{hashlib.sha256(served.encode()).hexdigest()[:10]}"

    def read(self, body: object, client: Client) -> UncheckedJob:
        """Raises `InvalidRequest` or `pydantic.ValidationError` if the body asks for something unsupported."""
        if isinstance(body, CompletionRequest):
            return self._read_completion(body, client)
        assert isinstance(body, Conversation), "what the table of endpoints has"
        return self._read_conversation(body, client)

    def count_tokens(self, body: CountTokensRequest) -> TokenCount:
        """Counts the tokens of the prompt that the same body would have as a request for an answer."""
        return TokenCount(input_tokens=len(self._encode(body, body.chat_options()).token_ids))

    async def prepare(self, job: UncheckedJob, off_loop: OffLoop) -> list[Generation]:
        """One generation per prompt, checked and tokenized. Errors name the fields that the client wrote."""
        params, structure = job.params, job.structure
        self._check_number(len(job.prompts), params.n, job.prompt_field)
        if structure is not None:
            params = params.model_copy(update={"structured_outputs": structure.outputs})
        generations: list[Generation] = []
        for index, prompt in enumerate(job.prompts):
            request_id = f"{job.reply.id}-{index}"
            try:
                with own_field_names(job.field_names):
                    generation = await self._llm.prepare(
                        prompt, params, request_id, job.prompt_field, job.options, job.text_options, off_loop
                    )
            except InvalidGrammar as error:
                assert structure is not None, "nothing else asks for a grammar"
                raise structure.refusal(error) from error
            generations.append(generation if job.keeps_text else replace(generation, prompt=None))
        return generations

    def _check_number(self, num_prompts: int, num_choices: int, field: str) -> None:
        capacity = self._llm.config.max_batch_size + self._llm.config.max_queue_size
        if num_prompts > 1 and num_prompts * num_choices > capacity:
            raise InvalidRequest(
                f"{num_prompts} prompts with n {num_choices} are more than the {capacity} requests that can run and"
                " wait here; send fewer at once",
                field,
            )

    def _read_completion(self, body: CompletionRequest, client: Client) -> UncheckedJob:
        structure = self._structure_of(body)
        return UncheckedJob(
            prompts=list(body.prompts()),
            params=body.params(self._llm.inputs.default_params),
            options=client.options_of(body),
            reply=CompletionReply(body, self._model_name, self._llm.inputs, self._fingerprint),
            is_streamed=bool(body.stream),
            structure=structure,
            prompt_field="prompt",
            text_options=replace(DEFAULT_TEXT, clamps_max_tokens=self._clamps_max_tokens),
            keeps_text=bool(body.echo),
            warnings=[*body.warnings, *_left_out(structure)],
        )

    def _read_conversation(self, body: Conversation, client: Client) -> UncheckedJob:
        if isinstance(body, ResponsesRequest):
            body = self._with_earlier_messages(body, client)
        inputs = self._llm.inputs
        params = body.params(inputs.default_chat_params)  # checks `n`, the number of choices that the reply creates
        functions = body.functions_to_call()
        structure = self._structure_of(body)
        if functions:
            structure = self._dialect.constrain_calls(functions, body, structure)
        warnings = [*body.warnings, *_left_out(structure), *self._dialect.check_effort(body)]
        options = client.options_of(body)
        chat_options = body.chat_options()
        encoded = self._encode(body, chat_options, params)
        # Clients of Anthropic's API often ask for more tokens than there is room for.
        clamps = self._clamps_max_tokens or isinstance(body, MessagesRequest)
        reading = self._dialect.reading(
            body, functions, encoded.token_ids, chat_options.continue_final_message, is_free=structure is None
        )
        return UncheckedJob(
            prompts=[encoded.token_ids],
            params=params,
            options=options,
            reply=self._reply(body, client, params, reading.new_reader),
            is_streamed=bool(body.stream),
            structure=structure,
            prompt_field="messages",
            text_options=replace(reading.text_options, clamps_max_tokens=clamps),
            field_names=body.field_names,
            warnings=[*warnings, *self._dialect.warnings(functions), *encoded.warnings],
        )

    def _structure_of(self, body: CompletionRequest | Conversation) -> WantedStructure | None:
        """What the answer must look like, ready to be enforced."""
        wanted = body.wanted_structure()
        return None if wanted is None else wanted.enforceable(self._allows_more)

    def _encode(
        self, body: Conversation | CountTokensRequest, options: ChatOptions, params: SamplingParams | None = None
    ) -> _EncodedChat:
        """The prompt; if the template refuses the messages, that of `speakers_in_turn`."""
        truncates = params is not None and params.truncates_prompt
        with own_field_names(body.field_names):
            messages: Sequence[Message] = body.template_messages()
            if not self._keeps_billing_line:
                messages = without_billing_line(messages)
            encode = partial(self._encode_messages, body, options, truncates)
            try:
                return encode(messages)
            except InvalidRequest as refusal:
                turns = speakers_in_turn(messages)
                if turns == messages or isinstance(refusal, ContextLengthExceeded):
                    raise
                try:
                    encoded = encode(turns)
                except ContextLengthExceeded:
                    raise
                except InvalidRequest:
                    raise refusal from None  # it is about what the client wrote
                return replace(encoded, warnings=[TURNS_WARNING, *encoded.warnings])

    def _encode_messages(
        self,
        body: Conversation | CountTokensRequest,
        options: ChatOptions,
        truncates: bool,
        messages: Sequence[Message],
    ) -> _EncodedChat:
        inputs = self._llm.inputs
        if truncates or not isinstance(body, ResponsesRequest) or body.truncation != "auto":
            return _EncodedChat(inputs.encode_chat(messages, options, truncates))
        encode = partial(inputs.encode_chat, options=options)
        num_wanted = None if self._clamps_max_tokens else body.max_output_tokens
        token_ids, num_left_out = encode_end(messages, encode, inputs.max_seq_len, num_wanted)
        warning = f"truncation: the first {num_left_out} messages did not fit and were left out"
        return _EncodedChat(token_ids, [warning] if num_left_out else [])

    def _reply(self, body: Conversation, client: Client, params: SamplingParams, new_reader: NewReader) -> Reply:
        model, vocabulary = self._model_name, self._llm.inputs.vocabulary
        match body:
            case ChatCompletionRequest():
                return ChatReply(body, model, vocabulary, new_reader, self._fingerprint)
            case ResponsesRequest():
                return ResponsesReply(body, params, model, vocabulary, new_reader, self._keeper(body, client))
            case MessagesRequest():
                return MessagesReply(body, model, vocabulary, new_reader)

    def _with_earlier_messages(self, body: ResponsesRequest, client: Client) -> ResponsesRequest:
        if body.previous_response_id is None:
            return body
        stored = self._store.find(client.owner, body.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                f"previous_response_id: {NOT_STORED}, or send the whole conversation as input", "previous_response_id"
            )
        return body.going_on_with(stored.messages())

    def _keeper(self, body: ResponsesRequest, client: Client) -> Callable[[ResponseObject], None] | None:
        """The function that stores the reply; None if the client does not ask for that."""
        if not body.store:
            return None
        conversation, owner, store = to_json(body.spoken_messages()), client.owner, self._store

        def keep(reply: ResponseObject) -> None:
            store.keep(owner, reply.id, StoredResponse(conversation, reply.model_dump_json().encode()))

        return keep


def _left_out(structure: WantedStructure | None) -> Sequence[str]:
    return () if structure is None else structure.left_out


_LARGE = 500  # scored tokens, which take 5 to 10 microseconds each
_CHARACTERS_PER_SCORE = 100  # that take as long as one scored token
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run."""

    generations: list[Generation]
    reply: Reply
    observation: Observation
    off_loop: OffLoop
    settled: Callable[[], Awaitable[None]]  # awaited before the end of the reply; see `Store`
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_of_repeats(self) -> int:
        """The cost of repeating the request; see `_size_of`."""
        return self.reply.num_repeated // _CHARACTERS_PER_SCORE

    async def make(self, size: int, function: Callable[..., _Made], *args: Any) -> _Made:
        """Calls a method of the reply, off the event loop if that is much work; `size`: see `_size_of`."""
        return function(*args) if size <= _LARGE else await self.off_loop(function, *args)


async def answer(llm: AsyncLLM, job: Job, request: web.Request) -> web.StreamResponse:
    """Replies to a request. An error before the first event of a stream still gets a status of its own."""
    if not job.observation.is_streamed:
        return await _answer_whole(llm, job)
    stream = EventStream(request, job.headers, job.reply.keep_alive)
    try:
        await _answer_stream(llm, job, stream)
    except ConnectionError:  # the client left
        return stream.response
    except Exception as error:
        if not stream.is_open:
            raise
        await _send_failure(job, stream, error_reply(error), request)
    with suppress(ConnectionError):
        await stream.close()
    return stream.response


async def _answer_whole(llm: AsyncLLM, job: Job) -> web.Response:
    """Waits for every generation to end. If the client leaves, this is cancelled, and the generations with it."""
    latest: dict[int, RequestOutput] = {}
    async with aclosing(job.observation.follow(llm.run_all(job.generations, wants_steps=False))) as outputs:
        async for index, output in outputs:
            _check(output)
            latest[index] = output
    whole = [latest[index] for index in range(len(job.generations))]
    size = job.size_of_repeats + sum(map(_size_of, whole))
    body = await job.make(size, lambda: _to_json(job.reply.whole(whole)))
    await job.settled()
    return web.Response(body=body, content_type="application/json", headers=job.headers)


async def _answer_stream(llm: AsyncLLM, job: Job, stream: EventStream) -> None:
    """Sends events as tokens arrive."""
    sizes: dict[int, int] = {}  # by generation, when it was last looked at
    async with stream, aclosing(job.observation.follow(llm.run_all(job.generations))) as outputs:
        prompts = [generation.prompt_token_ids for generation in job.generations]
        events = await job.make(job.size_of_repeats, job.reply.opening, prompts)
        async for index, output in outputs:
            _check(output)
            num_seen, sizes[index] = sizes.get(index, 0), _size_of(output)
            news = await job.make(sizes[index] - num_seen, job.reply.news, index, output)
            await stream.send(*events, *news)
            events = []
        closing = await job.make(job.size_of_repeats + sum(sizes.values()), job.reply.closing)
        await job.settled()
        await stream.send(*events, *closing)


async def _send_failure(job: Job, stream: EventStream, error: ErrorReply, request: web.Request) -> None:
    """Tells that a stream failed, briefly if that is not possible in its own form, which repeats much of the request.

    Never raises: after the status of a stream there cannot be another.
    """
    with suppress(ConnectionError):
        try:
            await stream.send(*job.reply.failure(error.status, error.detail))
        except ConnectionError:
            raise
        except Exception as another:
            if not isinstance(another, ChairliftError):  # such as that too many bytes are not read
                logger.error("a stream could not tell of its failure in its own form", exc_info=another)
            brief = error.body(request.path, request_id_of(request))
            await stream.send(f"event: error\ndata: {brief}\n\n")


def _to_json(body: BaseModel) -> bytes:
    text = body.model_dump_json().encode()
    choices: list[object] = getattr(body, "choices", [])
    while choices:  # one by one: freeing a large reply at once would block all other threads
        choices.pop()
    return text


def _size_of(output: RequestOutput) -> int:
    """The cost of making a reply of an output, in scored tokens."""
    size = _num_scores(output.prompt_logprobs)
    for choice in output.outputs:
        size += _num_scores(choice.logprobs) + len(choice.text) // _CHARACTERS_PER_SCORE
    return size


def _num_scores(positions: Sequence[TokenLogprobs | None] | None) -> int:
    """The number of scores, if each position has as many as the last one."""
    return len(positions) * len(positions[-1] or ()) if positions else 0


def _check(output: RequestOutput) -> None:
    """Raises if a sequence could not be computed, which ends its request."""
    for choice in output.outputs:
        if choice.error is not None:
            is_clients_fault = choice.stop_reason == GRAMMAR_LIMIT
            raise InvalidRequest(choice.error) if is_clients_fault else RequestFailed(choice.error)
