"""A checkpoint's chat template: conversations become texts, within limits of time and memory."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from chairlift.engine.text.call_ids import needs_short_ids, with_short_ids
from chairlift.engine.text.chat_rendering import RESERVED, ChatRenderer
from chairlift.engine.text.content_forms import NO_PARTS, ContentForms, find_content_forms
from chairlift.engine.text.gemma_turns import takes_responses, with_responses
from chairlift.engine.text.harmony_turns import described, in_harmony, is_harmony, with_known_effort
from chairlift.engine.text.template_limits import TemplateTooCostly, limited, release
from chairlift.engine.text.tokenizer_parts import TokenizerParts
from chairlift.errors import ConfigurationError, InvalidRequest

logger = logging.getLogger(__name__)

# What templates raise for unknown roles and shapes, or when they take too much memory or nest too deeply.
_TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(MemoryError, RuntimeError),
)
_MAX_REASON = 1000
_PROBED_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}

Message = dict[str, Any]
"""One chat message: at least `role` and `content`."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Says how a conversation is rendered."""

    tools: list[dict[Any, Any] | Callable[..., Any]] = field(default_factory=list)  # in OpenAI's shape
    add_generation_prompt: bool = True  # end with the beginning of the assistant's turn
    continue_final_message: bool = False  # leave the last message open instead
    template_arguments: dict[str, Any] = field(default_factory=dict)  # variables of the model's own template
    parse_special_tokens: bool = False  # text that spells a special token becomes that token, as in the template


class ChatTemplate:
    """The template, with the forms of content that it shows. Its methods may be called from any thread."""

    def __init__(self, tokenizer: TokenizerParts, file: str | None) -> None:
        """`file`: a template in place of the tokenizer's own. ConfigurationError if it cannot be used."""
        template = tokenizer.chat_template
        if file is not None:
            try:
                template = Path(file).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigurationError(f"chat_template {file} cannot be read: {error}") from error
        self._renderer = ChatRenderer(template or "", tokenizer.special_tokens)
        self._forms = self._forms_with_tools = NO_PARTS
        self.exists = template is not None
        self.text = template if isinstance(template, str) else "\n".join((template or {}).values())  # empty: none
        self._needs_short_ids = needs_short_ids(self.text)
        self._is_harmony = is_harmony(self.text)
        self._takes_responses = takes_responses(self.text)
        if self.exists:
            with limited():
                self._try(file)

    def _try(self, file: str | None) -> None:
        """Finds the forms of content that it shows. `file`: see `_check`."""
        try:
            self._forms = self._find_forms([])
            self._forms_with_tools = self._find_forms([_PROBED_TOOL], self._forms)
        except TemplateTooCostly as error:
            release(error)
            self._forms = ContentForms(refused=frozenset({"user"}))
        self._check(file)

    def _check(self, file: str | None) -> None:
        """Warns of a template with which conversations do not reach the model. ConfigurationError if the file is none.

        `file`: where it comes from, unless it is the checkpoint's own.
        """
        unseen = " or ".join(sorted(self._forms.unseen - {"tool"}))
        if unseen:
            logger.warning(
                "the chat template shows nothing of what messages with role %s say, neither as text nor in parts; set"
                " chat_template to another one",
                unseen,
            )
        if "user" in self._forms.refused:
            try:
                self.render([{"role": "user", "content": "Hello"}], ChatOptions())
            except InvalidRequest as error:
                if file is not None and isinstance(error.__cause__, TemplateSyntaxError):
                    place = f"{file}, line {error.__cause__.lineno}"
                    raise ConfigurationError(f"chat_template {place}: {error.__cause__.message}") from error
                logger.warning("%s; chat does not work unless you set chat_template to another one", error)

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Renders the messages with the chat template."""
        if not self.exists:
            raise InvalidRequest("this model has no chat template; use completions, or set chat_template", "messages")
        reserved = RESERVED.intersection(options.template_arguments)
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs must not set {min(reserved)}", "chat_template_kwargs")
        if self._needs_short_ids:
            messages = with_short_ids(messages)
        try:
            if self._is_harmony:
                messages = in_harmony(messages)
                arguments = with_known_effort(options.template_arguments)
                options = replace(options, tools=described(options.tools), template_arguments=arguments)
            if self._takes_responses:
                messages = with_responses(messages)
            forms = self._forms_with_tools if options.tools else self._forms
            return self._render(forms.apply(messages), options)
        except _TEMPLATE_ERRORS as error:
            release(error)
            reason = (str(error) or type(error).__name__)[:_MAX_REASON]
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", "messages") from error

    def _render(self, messages: list[Message], options: ChatOptions) -> str:
        with limited():
            return self._renderer.render(
                messages,
                [_describe(tool) for tool in options.tools] or None,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                arguments=options.template_arguments,
            )

    def _find_forms(self, tools: list[Any], default: ContentForms = NO_PARTS) -> ContentForms:
        """Tries the template."""

        def render(messages: list[Message]) -> str | None:
            try:
                return self._render(messages, ChatOptions(tools))
            except TemplateTooCostly:
                raise  # rather than try it many times
            except _TEMPLATE_ERRORS as error:
                release(error)
                return None

        return find_content_forms(render, default)


def _describe(tool: dict[Any, Any] | Callable[..., Any]) -> dict[Any, Any]:
    """Describes a function by its annotations and docstring, in OpenAI's shape; a description stays as it is."""
    if isinstance(tool, dict):
        return tool
    from transformers.utils.chat_template_utils import get_json_schema  # slow to import

    described: dict[Any, Any] = get_json_schema(tool)
    return described
