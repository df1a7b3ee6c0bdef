"""From a checked body to a job for the engine: prompts, parameters, and who dresses the outputs. All endpoints that
generate go this way.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

import chairlift
from chairlift.api.http.access import Client
from chairlift.api.replies import Reply
from chairlift.api.replies.answer import ToolCalling
from chairlift.api.replies.choices import ChatReply, CompletionReply
from chairlift.api.replies.responses import ResponsesReply
from chairlift.api.tools import (
    FunctionSpec,
    ToolFamily,
    family_of_template,
    forced_calls_grammar,
    free_grammar,
    schema_lines,
)
from chairlift.api.wire.base import own_field_names
from chairlift.api.wire.chat import ChatCompletionRequest
from chairlift.api.wire.completions import CompletionRequest
from chairlift.api.wire.generation import Part, WantedStructure
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.text.inputs import DEFAULT_TEXT, Generation, Prompt, TextOptions
from chairlift.errors import InvalidGrammar, InvalidRequest
from chairlift.params import RequestOptions, SamplingParams, StructuredOutputs


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

    def __init__(self, llm: AsyncLLM, model_name: str, tool_family: ToolFamily | None) -> None:
        """`tool_family`: None for what the chat template teaches."""
        self._llm = llm
        self._model_name = model_name
        self._tool_family = tool_family or family_of_template(llm.inputs.tokenizer.chat_template)
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

    def _draft_conversation(self, body: ChatCompletionRequest | ResponsesRequest, client: Client) -> Draft:
        inputs = self._llm.inputs
        params = body.params(inputs.default_chat_params)  # checks `n`, of which the reply makes so many
        functions = body.functions_to_call()
        calling = self._calling(functions, is_parallel=body.parallel_tool_calls is not False)
        structure = body.wanted_structure()
        if calling is not None:
            structure = _constrain_calls(calling, functions, body.is_call_forced, structure)
        reply: Reply
        if isinstance(body, ChatCompletionRequest):
            reply = ChatReply(body, self._model_name, inputs.vocabulary, calling, self._fingerprint)
        else:
            reply = ResponsesReply(body, params, self._model_name, inputs.vocabulary, calling)
        chat_options = body.chat_options(shows_tools=calling is not None)
        options = client.options_of(body)
        with own_field_names(body.field_names):
            token_ids = inputs.encode_chat(body.template_messages(), chat_options, params.truncates_prompt)
        return Draft(
            prompts=[token_ids],
            params=params,
            options=options,
            reply=reply,
            is_streamed=bool(body.stream),
            structure=structure,
            prompt_field="messages",
            text_options=DEFAULT_TEXT if calling is None else calling.text_options(),
            field_names=body.field_names,
        )

    def _calling(self, functions: list[FunctionSpec], is_parallel: bool) -> ToolCalling | None:
        """How calls of functions are read out of the answer; None if the model may call none: all is content."""
        if not functions:
            return None
        if self._tool_family is None:
            raise InvalidRequest(
                "this model's chat template writes no tool calls that are understood here; leave tools out, or start"
                " the server with --tool-call-parser",
                "tools",
            )
        return ToolCalling(self._tool_family, None if is_parallel else 1)


def _constrain_calls(
    calling: ToolCalling, functions: list[FunctionSpec], is_forced: bool, wanted: WantedStructure | None
) -> WantedStructure | None:
    """What an answer that may call functions must look like. A call that is forced wins over a wanted structure.

    InvalidRequest if the wishes exclude each other.
    """
    is_parallel = calling.max_calls is None
    if is_forced:
        return _structure_of(forced_calls_grammar(calling.family, functions, is_parallel), functions)
    if wanted is not None and wanted.schema is None:
        raise InvalidRequest(
            f'with tools, {wanted.field} can only ask for JSON; or say tool_choice "none"', wanted.field
        )
    grammar = free_grammar(calling.family, functions, is_parallel, None if wanted is None else wanted.schema)
    if grammar is None:
        return None
    return _structure_of(grammar, functions, "tools" if wanted is None else wanted.field)


def _structure_of(grammar: str, functions: list[FunctionSpec], field: str = "tools") -> WantedStructure:
    parts = {
        line: Part(field, "the schema")
        if index is None
        else Part("tools", f"the parameters of function {functions[index].name!r}")
        for line, index in schema_lines(grammar).items()
    }
    try:
        return WantedStructure(field, StructuredOutputs(grammar=grammar), parts)
    except ValidationError as error:
        raise InvalidRequest(f"{field}: the schemas are too large together", field) from error
