"""From a checked body to a job for the engine: prompts, parameters, and who dresses the outputs. All endpoints that
generate go this way.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import chairlift
from chairlift.api.dialect import Dialect
from chairlift.api.http.access import Client
from chairlift.api.replies import Reply
from chairlift.api.replies.choices import ChatReply, CompletionReply
from chairlift.api.replies.responses import ResponsesReply
from chairlift.api.tools import ReasoningFamily, ToolFamily
from chairlift.api.wire.base import own_field_names
from chairlift.api.wire.chat import ChatCompletionRequest
from chairlift.api.wire.completions import CompletionRequest
from chairlift.api.wire.generation import WantedStructure
from chairlift.api.wire.responses import Conversation, ResponsesRequest
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.text.inputs import DEFAULT_TEXT, Generation, Prompt, TextOptions
from chairlift.errors import InvalidGrammar, InvalidRequest
from chairlift.params import RequestOptions, SamplingParams


@dataclass(frozen=True, slots=True)
class Draft:
    """What a body asks for, while its prompts are not checked yet."""

    prompts: list[Prompt]
    params: SamplingParams
    options: RequestOptions
    reply: Reply
    is_streamed: bool
    structure: WantedStructure | None
    prompt_field: str
    text_options: TextOptions = DEFAULT_TEXT
    keeps_text: bool = False  # of the prompts, for the reply
    field_names: Mapping[str, str] = field(default_factory=dict)  # see `ChatCompletionRequest`


class Drafter:
    """Makes drafts of bodies, in a worker's thread, and generations of drafts, on the event loop."""

    def __init__(
        self,
        llm: AsyncLLM,
        model_name: str,
        tool_family: ToolFamily | None = None,
        reasoning_family: ReasoningFamily | None = None,
    ) -> None:
        """Families: None for what the chat template teaches. ConfigurationError if the model has no such marks."""
        self._llm = llm
        self._model_name = model_name
        self._dialect = Dialect(llm.inputs, tool_family, reasoning_family)
        served = f"{chairlift.__version__} {model_name} {llm.config}"
        self._fingerprint = f"fp_{hashlib.sha256(served.encode()).hexdigest()[:10]}"

    def draft(self, body: object, client: Client) -> Draft:
        """`InvalidRequest` or `pydantic.ValidationError` if the body asks for what there is not."""
        if isinstance(body, CompletionRequest):
            return self._draft_completion(body, client)
        assert isinstance(body, ChatCompletionRequest | ResponsesRequest), "what the table of endpoints has"
        return self._draft_conversation(body, client)

    async def prepare(self, draft: Draft, off_loop: OffLoop) -> list[Generation]:
        """One generation per prompt, checked and tokenized. Complaints name the fields that the client wrote."""
        params, structure = draft.params, draft.structure
        self._check_number(len(draft.prompts), params.n, draft.prompt_field)
        if structure is not None:
            params = params.model_copy(update={"structured_outputs": structure.outputs})
        generations: list[Generation] = []
        for index, prompt in enumerate(draft.prompts):
            request_id = f"{draft.reply.id}-{index}"
            try:
                with own_field_names(draft.field_names):
                    generation = await self._llm.prepare(
                        prompt, params, request_id, draft.prompt_field, draft.options, draft.text_options, off_loop
                    )
            except InvalidGrammar as error:
                assert structure is not None, "nothing else asks for a grammar"
                raise structure.refusal(error) from error
            generations.append(generation if draft.keeps_text else replace(generation, prompt=None))
        return generations

    def _check_number(self, num_prompts: int, num_choices: int, field: str) -> None:
        capacity = self._llm.config.max_batch_size + self._llm.config.max_queue_size
        if num_prompts > 1 and num_prompts * num_choices > capacity:
            raise InvalidRequest(
                f"{num_prompts} prompts with n {num_choices} are more than the {capacity} requests that can run and"
                " wait here; send fewer at once",
                field,
            )

    def _draft_completion(self, body: CompletionRequest, client: Client) -> Draft:
        return Draft(
            prompts=list(body.prompts()),
            params=body.params(self._llm.inputs.default_params),
            options=client.options_of(body),
            reply=CompletionReply(body, self._model_name, self._llm.inputs, self._fingerprint),
            is_streamed=bool(body.stream),
            structure=body.wanted_structure(),
            prompt_field="prompt",
            keeps_text=bool(body.echo),
        )

    def _draft_conversation(self, body: Conversation, client: Client) -> Draft:
        inputs = self._llm.inputs
        params = body.params(inputs.default_chat_params)  # checks `n`, of which the reply makes so many
        functions = body.functions_to_call()
        structure = body.wanted_structure()
        if functions:
            structure = self._dialect.constrain_calls(functions, body, structure)
        self._dialect.check_effort(body)
        chat_options = body.chat_options(shows_tools=bool(functions))
        options = client.options_of(body)
        with own_field_names(body.field_names):
            token_ids = inputs.encode_chat(body.template_messages(), chat_options, params.truncates_prompt)
        reading = self._dialect.reading(body, functions, token_ids, chat_options.continue_final_message)
        reply: Reply
        if isinstance(body, ChatCompletionRequest):
            reply = ChatReply(body, self._model_name, inputs.vocabulary, reading.new_reader, self._fingerprint)
        else:
            reply = ResponsesReply(body, params, self._model_name, inputs.vocabulary, reading.new_reader)
        return Draft(
            prompts=[token_ids],
            params=params,
            options=options,
            reply=reply,
            is_streamed=bool(body.stream),
            structure=structure,
            prompt_field="messages",
            text_options=reading.text_options,
            field_names=body.field_names,
        )
