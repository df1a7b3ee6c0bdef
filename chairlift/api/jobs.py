"""Makes jobs for the engine of checked bodies, for all endpoints that generate."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import chairlift
from chairlift.api import ServerConfig
from chairlift.api.answers import NewReader
from chairlift.api.answers.dialect import Dialect
from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.structure import AnswerOptions, WantedStructure
from chairlift.api.http.access import Client, Scheduled
from chairlift.api.replies.reply import Reply
from chairlift.api.store import Store
from chairlift.api.turns import TURNS_WARNING, speakers_in_turn, without_billing_line
from chairlift.api.wire.complaints import own_field_names
from chairlift.config import ResolvedConfig
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.engine.text.inputs import DEFAULT_TEXT, PROMPT_ONLY, Generation, InputProcessor, Prompt, TextOptions
from chairlift.errors import ContextLengthExceeded, InvalidRequest
from chairlift.params import RequestOptions, SamplingParams
from chairlift.prompt_work import PromptTask


@dataclass(slots=True)
class Job:
    """Holds what a body asks for and, as its prompts are checked, the generations that compute it."""

    prompts: deque[Prompt]  # not checked yet
    params: SamplingParams
    options: RequestOptions
    reply: Reply
    is_streamed: bool
    structure: WantedStructure | None
    prompt_field: str
    text_options: TextOptions = DEFAULT_TEXT
    keeps_text: bool = False  # of the prompts, because the reply needs it
    field_names: Mapping[str, str] = field(default_factory=dict)  # see `TemplateInput`
    warnings: Sequence[str] = ()  # see `Body.warnings`
    generations: list[Generation] = field(default_factory=list)
    task: PromptTask | None = None  # wanted of the prompts, if nothing is generated

    def __post_init__(self) -> None:
        if self.structure is not None:
            self.params = self.params.model_copy(update={"structured_outputs": self.structure.outputs})

    def check_next(self, inputs: InputProcessor, compiled: Any = None) -> None:
        """Tokenizes and checks the next prompt, which belongs off the event loop. `compiled`: the grammar.

        Errors name the fields that the client wrote.
        """
        request_id = f"{self.reply.id}-{len(self.generations)}"
        with own_field_names(self.field_names):
            generation = inputs.prepare(
                request_id,
                self.prompts.popleft(),
                self.params,
                self.prompt_field,
                self.options,
                self.text_options,
                compiled,
                self.task,
            )
        self.generations.append(generation if self.keeps_text else replace(generation, prompt=None))


class Renderable(Protocol):
    """A body that becomes a prompt by the chat template."""

    @property
    def field_names(self) -> dict[str, str]:
        """Names of fields in shared checks -> the client's names, where they differ."""
        ...

    def template_messages(self) -> list[Message]: ...

    def chat_options(self) -> ChatOptions: ...


class Warned(Scheduled, Protocol):
    """A body that the engine works for, and what its client is warned of."""

    @property
    def warnings(self) -> list[str]: ...


class Generating(Warned, Protocol):
    """A body that asks for an answer."""

    @property
    def stream(self) -> bool | None: ...

    def wanted_structure(self) -> WantedStructure | None: ...


class Conversation(Renderable, Generating, AnswerOptions, Protocol):
    """A body that asks for the answer to a conversation."""

    def functions_to_call(self) -> list[FunctionSpec]: ...


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The prompt that a conversation became, and what its client is warned of."""

    token_ids: list[int]
    warnings: Sequence[str] = ()


Encode = Callable[[Sequence[Message]], EncodedChat]
"""Makes a prompt of messages."""


class JobMaker:
    """Makes jobs of bodies, for all protocols. Used in workers' threads."""

    def __init__(
        self, inputs: InputProcessor, engine: ResolvedConfig, model_name: str, store: Store, config: ServerConfig
    ) -> None:
        """ConfigurationError if the model lacks the configured marks."""
        self.inputs = inputs
        self.model_name = model_name
        self.store = store
        self.clamps_max_tokens = config.clamp_max_tokens
        self._capacity = engine.max_batch_size + engine.max_queue_size
        self._keeps_billing_line = config.keep_billing_line
        self._allows_more = config.allow_additional_properties
        self._dialect = Dialect(inputs, config)
        served = f"{chairlift.__version__} {model_name} {engine}"
        self.fingerprint = f"fp_{hashlib.sha256(served.encode()).hexdigest()[:10]}"

    def of_texts(
        self,
        body: Generating,
        client: Client,
        prompts: Iterable[Prompt],
        params: SamplingParams,
        new_reply: Callable[[], Reply],
        *,
        keeps_text: bool,
    ) -> Job:
        """The job for a body that asks how texts go on. InvalidRequest if it asks for something unsupported."""
        structure = self._structure_of(body)
        job = Job(
            deque(prompts),
            params,
            client.options_of(body),
            new_reply(),
            bool(body.stream),
            structure,
            prompt_field="prompt",
            text_options=replace(DEFAULT_TEXT, clamps_max_tokens=self.clamps_max_tokens),
            keeps_text=keeps_text,
            warnings=[*body.warnings, *_left_out(structure)],
        )
        self._check_number(len(job.prompts), params.n, job.prompt_field)
        return job

    def of_conversation(
        self,
        body: Conversation,
        client: Client,
        params: SamplingParams,
        new_reply: Callable[[NewReader], Reply],
        *,
        encode: Encode | None = None,
        clamps_max_tokens: bool = False,
    ) -> Job:
        """The job for a body that asks for an answer. InvalidRequest if it asks for something unsupported.

        `encode` None: the whole conversation is the prompt.
        """
        functions = body.functions_to_call()
        structure = self._structure_of(body)
        if functions:
            structure = self._dialect.constrain_calls(functions, body, structure)
        warnings = [*body.warnings, *_left_out(structure), *self._dialect.check_effort(body)]
        options = client.options_of(body)
        encoded = self.encode(body, params.truncates_prompt, encode)
        is_continued = body.chat_options().continue_final_message
        reading = self._dialect.reading(body, functions, encoded.token_ids, is_continued, is_free=structure is None)
        clamps = self.clamps_max_tokens or clamps_max_tokens
        return Job(
            deque([encoded.token_ids]),
            params,
            options,
            new_reply(reading.new_reader),
            bool(body.stream),
            structure,
            prompt_field="messages",
            text_options=replace(reading.text_options, clamps_max_tokens=clamps),
            field_names=body.field_names,
            warnings=[*warnings, *self._dialect.warnings(functions), *encoded.warnings],
        )

    def of_prompts(
        self,
        body: Warned,
        client: Client,
        prompts: Iterable[Prompt],
        task: PromptTask,
        new_reply: Callable[[], Reply],
        *,
        prompt_field: str,
        truncate_to: int | None = None,
    ) -> Job:
        """The job for a body that wants something computed of prompts, and no text.

        `truncate_to`: see `SamplingParams.truncate_prompt_tokens`. InvalidRequest if there are too many.
        """
        is_cut = truncate_to is not None
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate_to) if is_cut else PROMPT_ONLY
        job = Job(
            deque(prompts),
            params,
            client.options_of(body),
            new_reply(),
            is_streamed=False,
            structure=None,
            prompt_field=prompt_field,
            warnings=body.warnings,
            task=task,
        )
        self._check_number(len(job.prompts), 1, prompt_field)
        return job

    def encode(self, body: Renderable, truncates: bool = False, encode: Encode | None = None) -> EncodedChat:
        """The prompt of a conversation; if the template refuses the messages, that of `speakers_in_turn`.

        `truncates`: see `InputProcessor.encode_chat`; `encode` None: the whole conversation is the prompt.
        """
        options = body.chat_options()
        encode = encode or (lambda messages: EncodedChat(self.inputs.encode_chat(messages, options, truncates)))
        with own_field_names(body.field_names):
            messages: Sequence[Message] = body.template_messages()
            if not self._keeps_billing_line:
                messages = without_billing_line(messages)
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

    def _structure_of(self, body: Generating) -> WantedStructure | None:
        """Returns the structure that the answer must have, ready to be enforced."""
        wanted = body.wanted_structure()
        return None if wanted is None else wanted.enforceable(self._allows_more)

    def _check_number(self, num_prompts: int, num_choices: int, field: str) -> None:
        if num_prompts > 1 and num_prompts * num_choices > self._capacity:
            raise InvalidRequest(
                f"{num_prompts} prompts with n {num_choices} are more than the {self._capacity} requests that can run"
                " and wait here; send fewer at once",
                field,
            )


def _left_out(structure: WantedStructure | None) -> Sequence[str]:
    return () if structure is None else structure.left_out
