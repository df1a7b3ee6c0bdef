"""From a checked body to a job for the engine: prompts, parameters, and who dresses the outputs. All endpoints that
generate go this way.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from pydantic import ValidationError

import chairlift
from chairlift.api.http.access import Client
from chairlift.api.replies import Reply
from chairlift.api.replies.answer import CallCounter, NewReader
from chairlift.api.replies.choices import ChatReply, CompletionReply
from chairlift.api.replies.responses import ResponsesReply
from chairlift.api.tools import (
    FORMATS,
    THOUGHT_MARKS,
    AnswerReader,
    FunctionSpec,
    ReasoningFamily,
    Thoughts,
    ToolFamily,
    family_of_template,
    forced_calls_grammar,
    free_grammar,
    reasoning_of_template,
    schema_lines,
)
from chairlift.api.wire.base import own_field_names
from chairlift.api.wire.chat import ChatCompletionRequest
from chairlift.api.wire.completions import CompletionRequest
from chairlift.api.wire.generation import Part, WantedStructure
from chairlift.api.wire.responses import Conversation, ResponsesRequest
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.text.inputs import DEFAULT_TEXT, Generation, Prompt, TextOptions
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import ConfigurationError, InvalidGrammar, InvalidRequest
from chairlift.params import RequestOptions, SamplingParams, StructuredOutputs

logger = logging.getLogger(__name__)

_MAX_TAIL = 8  # tokens between the mark of thoughts that a template writes and the end of the prompt


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
        self._tool_family = tool_family or family_of_template(llm.inputs.tokenizer.chat_template)
        self._marks = _thought_marks(llm.inputs.tokenizer, reasoning_family)
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
            structure = self._constrain_calls(functions, body, structure)
        self._check_effort(body)
        chat_options = body.chat_options(shows_tools=bool(functions))
        options = client.options_of(body)
        with own_field_names(body.field_names):
            token_ids = inputs.encode_chat(body.template_messages(), chat_options, params.truncates_prompt)
        thinking = self._thinking_after(token_ids, chat_options.continue_final_message)
        new_reader, text_options = self._reading(body, functions, thinking)
        reply: Reply
        if isinstance(body, ChatCompletionRequest):
            reply = ChatReply(body, self._model_name, inputs.vocabulary, new_reader, self._fingerprint)
        else:
            reply = ResponsesReply(body, params, self._model_name, inputs.vocabulary, new_reader)
        return Draft(
            prompts=[token_ids],
            params=params,
            options=options,
            reply=reply,
            is_streamed=bool(body.stream),
            structure=structure,
            prompt_field="messages",
            text_options=text_options,
            field_names=body.field_names,
        )

    def _reading(
        self, body: Conversation, functions: list[FunctionSpec], thinking: Thinking | None
    ) -> tuple[NewReader, TextOptions]:
        """How calls and thoughts are read out of the answer, whose marks are text, and where it ends: after the last
        call that counts nothing more is generated.
        """
        family = self._tool_family if functions else None
        max_calls = 1 if functions and body.parallel_tool_calls is False else None
        shown = () if family is None else FORMATS[family].marks
        thoughts = None
        if thinking is not None and self._marks is not None:
            thoughts = Thoughts(self._marks.begin, self._marks.end, thinking.has_begun)
            shown = (*shown, self._marks.begin, self._marks.end)
        schemas = {function.name: function.parameters for function in functions}
        new_reader = partial(AnswerReader, family, max_calls, schemas, thoughts)
        new_watcher = None if max_calls is None else lambda: CallCounter(new_reader())
        return new_reader, TextOptions(new_watcher, shown, thinking)

    def _thinking_after(self, prompt: list[int], is_continued: bool) -> Thinking | None:
        """What the prompt says of thoughts in the answer. None if there are none, since the template has closed them.

        A template that begins or closes them does so at the end of the prompt; marks before are of earlier answers.
        """
        marks = self._marks
        if marks is None:
            return None
        undecided = Thinking(marks.begin_id, marks.end_id, has_begun=False)
        last = next((i for i in reversed(range(len(prompt))) if prompt[i] in (marks.begin_id, marks.end_id)), None)
        if last is None:
            return undecided
        tail = prompt[last + 1 :]
        is_at_end = len(tail) <= _MAX_TAIL and not self._llm.inputs.tokenizer.decode(tail, False).strip()
        if prompt[last] == marks.begin_id:
            return replace(undecided, has_begun=is_at_end or is_continued)
        return None if is_at_end else undecided

    def _check_effort(self, body: Conversation) -> None:
        if self._marks is None and body.effort not in (None, "none"):
            raise InvalidRequest(
                f'{body.effort_field}: only "none" is supported: this model does not think apart from its answer',
                body.effort_field,
            )

    def _constrain_calls(
        self, functions: list[FunctionSpec], body: Conversation, wanted: WantedStructure | None
    ) -> WantedStructure | None:
        """What an answer that may call functions must look like. A call that is forced wins over a wanted structure.

        InvalidRequest if the wishes exclude each other, or the model knows no calls.
        """
        family, is_parallel = self._tool_family, body.parallel_tool_calls is not False
        if family is None:
            raise InvalidRequest(
                "this model's chat template writes no tool calls that are understood here; leave tools out, or start"
                " the server with --tool-call-parser",
                "tools",
            )
        if body.is_call_forced:
            return _structure_of(forced_calls_grammar(family, functions, is_parallel, self._call_tokens()), functions)
        if wanted is not None and wanted.schema is None:
            raise InvalidRequest(
                f'with tools, {wanted.field} can only ask for JSON; or say tool_choice "none"', wanted.field
            )
        if wanted is None and not any(function.strict for function in functions):
            return None
        schema = None if wanted is None else wanted.schema
        grammar = free_grammar(family, functions, is_parallel, schema, self._call_tokens())
        return _structure_of(grammar, functions, "tools" if wanted is None else wanted.field)

    def _call_tokens(self) -> dict[str, int]:
        marks = () if self._tool_family is None else FORMATS[self._tool_family].marks
        return self._llm.inputs.vocabulary.special_ids(marks)


@dataclass(frozen=True, slots=True)
class _ThoughtMarks:
    """The marks around thoughts, each a token of the model."""

    begin: str
    end: str
    begin_id: int
    end_id: int


def _thought_marks(tokenizer: Tokenizer, wanted: ReasoningFamily | None) -> _ThoughtMarks | None:
    family = wanted or reasoning_of_template(tokenizer.chat_template)
    if family not in THOUGHT_MARKS:
        return None
    begin, end = THOUGHT_MARKS[family]
    begin_id, end_id = map(tokenizer.backend.token_to_id, (begin, end))
    if begin_id is not None and end_id is not None:
        return _ThoughtMarks(begin, end, begin_id, end_id)
    problem = f"{begin} and {end} are no tokens of this model's tokenizer"
    if wanted is not None:
        raise ConfigurationError(f"reasoning_parser {wanted} cannot be used: {problem}; set none, or leave it out")
    logger.warning("thoughts are not told apart from answers: %s, though the chat template has them", problem)
    return None


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
