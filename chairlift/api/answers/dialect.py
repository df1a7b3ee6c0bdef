"""Knows how the served model writes tool calls and thoughts, and so how its answers are parsed and constrained."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from chairlift.api import ServerConfig
from chairlift.api.answers import gemma_calls
from chairlift.api.answers.declared import Declared
from chairlift.api.answers.declared_dialect import DeclaredDialect
from chairlift.api.answers.families import FORMATS, ToolFamily
from chairlift.api.answers.format_choice import answer_format
from chairlift.api.answers.functions import Arguments, FunctionSpec, enforced_arguments
from chairlift.api.answers.grammars import forced_calls_grammar, free_grammar, schema_lines
from chairlift.api.answers.harmony import Harmony
from chairlift.api.answers.harmony_dialect import HarmonyDialect
from chairlift.api.answers.reader import AnswerReader, CallCounter, NewReader
from chairlift.api.answers.structure import AnswerOptions, GrammarSource, WantedStructure
from chairlift.api.answers.thoughts import THOUGHT_MARKS, ReasoningFamily, Thoughts, reasoning_of_template
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.text.inputs import InputProcessor, TextOptions
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import ConfigurationError, InvalidRequest
from chairlift.params import StructuredOutputs

logger = logging.getLogger(__name__)

_MAX_TAIL = 8  # most tokens between the thought mark that a template writes and the end of the prompt


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """Says how calls and thoughts in an answer are parsed, which of its tokens become text, and where it ends."""

    new_reader: NewReader
    text_options: TextOptions


class Dialect:
    """Knows how the model writes calls and thoughts, as its chat template, its declaration or the settings say."""

    def __init__(self, inputs: InputProcessor, config: ServerConfig) -> None:
        """ConfigurationError if the model lacks the configured marks."""
        self._inputs = inputs
        self._allows_more = config.allow_additional_properties
        form = answer_format(config, inputs.tokenizer)
        self._harmony = _harmony(inputs, config) if form is ToolFamily.HARMONY else None
        is_readable = form is not ToolFamily.HARMONY or self._harmony is not None
        self._tool_family = form if isinstance(form, ToolFamily) and is_readable else None
        self._declared: DeclaredDialect | None = None
        if isinstance(form, Declared):
            self._declared = DeclaredDialect(form, inputs.tokenizer, config.reasoning_parser is None)
        self._reads_thoughts = self._declared is not None and self._declared.reads_thoughts
        self._reads_thoughts = self._reads_thoughts or self._harmony is not None
        declared_marks = None if self._declared is None else self._declared.thought_marks
        if declared_marks is not None:
            self._marks = _marks_in(inputs.tokenizer, *declared_marks)
        else:
            wanted = ReasoningFamily.NONE if self._reads_thoughts else config.reasoning_parser
            self._marks = _thought_marks(inputs.tokenizer, wanted)
        self._has_thoughts = self._marks is not None or self._reads_thoughts
        self._can_refrain = "enable_thinking" in inputs.tokenizer.chat_template

    def constrain_calls(
        self, functions: list[FunctionSpec], body: AnswerOptions, wanted: WantedStructure | None
    ) -> WantedStructure | None:
        """The structure of an answer that may call functions. A forced call overrides a requested structure.

        InvalidRequest if the requested options conflict, or the model's format of calls is not known.
        """
        declared = self._declared
        if declared is not None and declared.form.has_calls and not declared.is_enforced:
            declared.check(body, wanted)
            return None
        if self._tool_family is None and (declared is None or not declared.is_enforced):
            raise InvalidRequest(
                "this server does not know how this model's chat template writes tool calls; leave tools out, or start"
                " it with --tool-call-parser",
                "tools",
            )
        closes_objects = not self._allows_more
        if body.call_mode == "required":
            arguments = enforced_arguments(functions, is_forced=True, closes_objects=closes_objects)
            return _structure_of(self._forced_grammar(arguments, body.is_parallel), arguments)
        if wanted is not None and wanted.schema is None:
            raise InvalidRequest(
                f'with tools, {wanted.field} can only ask for JSON; or set tool_choice to "none"', wanted.field
            )
        if wanted is None and not any(function.is_enforced for function in functions):
            return None
        arguments = enforced_arguments(functions, is_forced=False, closes_objects=closes_objects)
        schema = None if wanted is None else wanted.schema
        return _structure_of(self._free_grammar(arguments, body.is_parallel, schema), arguments, wanted)

    def _forced_grammar(self, functions: list[Arguments], is_parallel: bool) -> str:
        if self._harmony is not None:
            return self._harmony.forced_calls_grammar(functions)
        if self._tool_family is not None:
            return forced_calls_grammar(self._tool_family, functions, is_parallel, self._call_tokens())
        return gemma_calls.forced_calls_grammar(functions, is_parallel, self._call_tokens())

    def _free_grammar(self, functions: list[Arguments], is_parallel: bool, schema: dict[str, Any] | None) -> str:
        if self._harmony is not None:
            return self._harmony.free_grammar(functions, schema)
        if self._tool_family is not None:
            return free_grammar(self._tool_family, functions, is_parallel, schema, self._call_tokens())
        return gemma_calls.free_grammar(functions, is_parallel, schema, self._call_tokens())

    def warnings(self, functions: list[FunctionSpec]) -> list[str]:
        """Returns what a client should know of an answer that may call these functions."""
        return [] if self._declared is None else self._declared.warnings(functions)

    def check_effort(self, body: AnswerOptions) -> list[str]:
        """A warning if a request wants thoughts of a model without them: clients ask for them with every request.

        InvalidRequest if it wants none of a model that always thinks.
        """
        if not self._has_thoughts and body.effort not in (None, "none"):
            return [f"{body.effort_field} was left out: this model does not write its thoughts apart from its answer"]
        if self._has_thoughts and body.effort == "none" and not self._can_refrain:
            what = '"none" is not supported: this model\'s chat template cannot keep it from thinking'
            raise InvalidRequest(f"{body.effort_field}: {what}", body.effort_field)
        return []

    def reading(
        self,
        body: AnswerOptions,
        functions: list[FunctionSpec],
        prompt: list[int],
        is_continued: bool,
        is_free: bool = True,
    ) -> AnswerReading:
        """Returns how to parse the answer to this prompt. Generation stops after the last wanted call.

        `is_free`: no grammar says where calls may be, so that those without marks are found in the middle of it, too.
        """
        family: ToolFamily | Declared | Harmony | None
        if self._harmony is not None:
            begun = self._harmony.begun_by(prompt, has_calls=bool(functions))
            family, shown, thinking = begun.form, self._harmony.marks, begun.thinking
        else:
            family, shown = self._format_after(prompt, bool(functions), is_continued)
            thinking = self._thinking_after(prompt, is_continued)
        is_single = not body.is_parallel or self._harmony is not None  # in harmony an answer ends with a call
        max_calls = 1 if functions and is_single else None
        form = FORMATS[family] if isinstance(family, ToolFamily) else family
        thoughts = None
        if thinking is not None and self._marks is not None and not self._reads_thoughts:
            thoughts = Thoughts(self._marks.begin, self._marks.end, thinking.has_begun)
            shown = (*shown, self._marks.begin, self._marks.end)
        needs_schemas = form is not None and not form.has_types  # not kept otherwise, because they may be large
        needs_names = needs_schemas or (form is not None and form.is_bare and is_free)
        known = functions if needs_names else []
        schemas = {function.name: function.schema if needs_schemas else {} for function in known}
        custom = {function.name for function in functions if function.is_custom}
        new_reader = partial(AnswerReader, family, max_calls, schemas, thoughts, custom)
        new_watcher = None if max_calls is None else lambda: CallCounter(new_reader())
        return AnswerReading(new_reader, TextOptions(new_watcher, shown, thinking))

    def _format_after(
        self, prompt: list[int], has_functions: bool, is_continued: bool
    ) -> tuple[ToolFamily | Declared | None, tuple[str, ...]]:
        """The format in which the answer to this prompt is read, and its marks."""
        if self._declared is not None:
            return self._declared.format_after(prompt, has_functions, is_continued)
        if self._tool_family is None or not has_functions:
            return None, ()
        return self._tool_family, FORMATS[self._tool_family].marks

    def _thinking_after(self, prompt: list[int], is_continued: bool) -> Thinking | None:
        """Reads what the prompt says of thoughts in the answer; None: the template has closed them, so there are none.

        A template opens or closes them at the end of the prompt; earlier marks belong to earlier answers.
        """
        marks = self._marks
        if marks is None:
            return None
        undecided = Thinking(marks.begin_ids, marks.end_id, has_begun=False)
        begin_id, size = marks.begin_ids[0], len(marks.begin_ids)
        last = next((i for i in reversed(range(len(prompt))) if prompt[i] in (begin_id, marks.end_id)), None)
        if last is None:
            return undecided
        if prompt[last] == marks.end_id:
            return None if self._is_at_end(prompt[last + 1 :]) else undecided
        is_begin = tuple(prompt[last : last + size]) == marks.begin_ids
        return replace(undecided, has_begun=is_begin and (is_continued or self._is_at_end(prompt[last + size :])))

    def _is_at_end(self, tail: list[int]) -> bool:
        """True if a prompt ends with its last mark of thoughts, which these tokens follow."""
        return len(tail) <= _MAX_TAIL and not self._inputs.tokenizer.decode(tail, False).strip()

    def _call_tokens(self) -> dict[str, int]:
        marks = gemma_calls.MARKS if self._tool_family is None else FORMATS[self._tool_family].marks
        return self._inputs.vocabulary.special_ids(marks)


@dataclass(frozen=True, slots=True)
class _ThoughtMarks:
    """The marks around thoughts. The end is a token of the model, and the begin is one as well, or begins with one."""

    begin: str
    end: str
    begin_ids: tuple[int, ...]
    end_id: int


def _harmony(inputs: InputProcessor, config: ServerConfig) -> HarmonyDialect | None:
    """None if the model cannot write it, though its chat template does."""
    if config.reasoning_parser is not None:
        raise ConfigurationError(
            f"reasoning_parser {config.reasoning_parser} cannot be used with harmony, whose channels say what is"
            " reasoning; leave it out"
        )
    try:
        return HarmonyDialect(inputs)
    except ValueError as error:
        if config.tool_call_parser is not None:
            raise ConfigurationError(f"tool_call_parser {config.tool_call_parser} cannot be used: {error}") from error
        logger.warning("answers are not read as harmony: %s, though the chat template has it", error)
        return None


def _thought_marks(tokenizer: Tokenizer, wanted: ReasoningFamily | None) -> _ThoughtMarks | None:
    family = wanted or reasoning_of_template(tokenizer.chat_template)
    if family not in THOUGHT_MARKS:
        return None
    begin, end = THOUGHT_MARKS[family]
    marks = _marks_in(tokenizer, begin, end)
    if marks is not None:
        return marks
    problem = f"{begin} and {end} are not tokens of this model's tokenizer"
    if wanted is not None:
        raise ConfigurationError(f"reasoning_parser {wanted} cannot be used: {problem}; set none, or leave it out")
    logger.warning("thoughts stay in the answers: %s, though the chat template has them", problem)
    return None


def _marks_in(tokenizer: Tokenizer, begin: str, end: str) -> _ThoughtMarks | None:
    """The marks, if they are tokens; of the first one, the model may have a special token for its beginning only."""
    begin_id, end_id = map(tokenizer.backend.token_to_id, (begin, end))
    if end_id is None:
        return None
    if begin_id is not None:
        return _ThoughtMarks(begin, end, (begin_id,), end_id)
    added = tokenizer.describe()["added_tokens_decoder"].values()
    if not any(token["special"] and begin.startswith(token["content"]) for token in added):
        return None
    begin_ids = tokenizer.backend.encode(begin, add_special_tokens=False).ids
    return _ThoughtMarks(begin, end, tuple(begin_ids), end_id)


def _structure_of(grammar: str, functions: list[Arguments], wanted: WantedStructure | None = None) -> WantedStructure:
    """The structure of calls, or of calls and the answer that is `wanted`."""
    field = "tools" if wanted is None else wanted.field
    sources = {
        line: GrammarSource(field, "the schema")
        if index is None
        else GrammarSource("tools", _whole_name_of(functions[index]))
        for line, index in schema_lines(grammar).items()
    }
    left_out = [each for function in functions for each in function.left_out]
    left_out += [] if wanted is None else wanted.left_out
    try:
        return WantedStructure(field, StructuredOutputs(grammar=grammar), sources, left_out=tuple(left_out))
    except ValidationError as error:
        raise InvalidRequest(f"{field}: the schemas are too large together", field) from error


def _whole_name_of(function: Arguments) -> str:
    if function.input_pattern is not None:
        return f"the grammar of custom tool {function.name!r}"
    return f"the parameters of function {function.name!r}"
