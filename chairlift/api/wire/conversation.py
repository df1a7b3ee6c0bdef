"""Conversations of all protocols: which tools an assistant may call, how much it thinks, and how both are rendered."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, StrictBool, model_validator

from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.mending import arguments_of
from chairlift.api.wire.body import Body
from chairlift.api.wire.custom_tools import check_definitions
from chairlift.api.wire.left_out import attachments_warning, tools_warning
from chairlift.api.wire.tools import LeftOutTool
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.errors import InvalidRequest

ARGUMENTS = (
    "an object, or its JSON, which is mended if it was cut or is not quite valid; other values are shown as they are"
)


def template_message(role: str, content: str, **more: Any) -> Message:
    """Makes a message for chat templates: `system` for its newer name `developer`, and nothing that is None."""
    given = {name: value for name, value in more.items() if value is not None}
    return {"role": "system" if role == "developer" else role, "content": content, **given}


def template_call(call_id: str, name: str, written: object) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates print."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(written)}}


def role_of(message: Any) -> Any:
    """Returns who said it; `message`: as it was parsed from JSON, or a model."""
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


def is_of_assistant(message: Any) -> bool:
    """True if the assistant said it; `message`: see `role_of`."""
    return bool(role_of(message) == "assistant")


ToolChoiceMode = Literal["none", "auto", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_arguments(effort: Effort | None) -> dict[str, Any]:
    """The variables of chat templates that say how much to think."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": "xhigh" if effort == "max" else effort}


class TemplateInput(Body):
    """Holds what chat templates get of a body. Endpoints have shapes of their own for it."""

    tools: Sequence[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")

    effort_field: ClassVar[str] = ""  # the field that holds `effort`

    @property
    def effort(self) -> Effort | None:
        """The amount of thinking, for endpoints that refuse what the model cannot do."""
        return None

    @property
    def field_names(self) -> dict[str, str]:
        """Names of fields in shared checks -> the client's names, where they differ."""
        return {}

    @property
    def callable_functions(self) -> list[FunctionSpec]:
        """The supported tools."""
        return [tool.spec() for tool in self.tools or [] if not isinstance(tool, LeftOutTool)]

    @property
    def left_out(self) -> list[str]:
        """The types of the unsupported tools."""
        return [tool.type for tool in self.tools or [] if isinstance(tool, LeftOutTool)]

    @property
    def shown_functions(self) -> list[FunctionSpec]:
        """The tools that the template shows, which is before the conversation."""
        return [] if self.call_mode == "none" else self.callable_functions

    @property
    def returned_parts(self) -> Iterable[object]:
        """The parts of what tools returned, and others that come with them."""
        return ()

    @property
    def warnings(self) -> list[str]:
        left_out = tools_warning(self.left_out, not self.callable_functions)
        unenforced = [each for function in self.callable_functions for each in function.left_out]
        return [*super().warnings, *left_out, *unenforced, *attachments_warning(self.returned_parts)]

    @property
    def call_mode(self) -> ToolChoiceMode:
        """Says if the answer may, must or must not call."""
        return "auto"

    def thinking_arguments(self) -> dict[str, Any]:
        """The template's variables that say how much to think."""
        return effort_arguments(self.effort)

    def template_messages(self) -> list[Message]:
        """The conversation. InvalidRequest if it is not a valid one."""
        raise NotImplementedError

    def chat_options(self) -> ChatOptions:
        """The template's variables beside the messages, without tools that must not be called."""
        return ChatOptions(
            tools=[function.as_template_input() for function in self.shown_functions],
            template_arguments=self.thinking_arguments() | (self.chat_template_kwargs or {}),
        )


class ToolUse(TemplateInput):
    """Says which tools must be called."""

    tool_choice: Any = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        check_definitions(self.tools or ())
        if self.call_mode == "required" and not self.callable_functions:
            why = "".join(f": {each}" for each in tools_warning(self.left_out, were_all=True))
            raise InvalidRequest(f"tool_choice is only allowed with tools{why}", "tool_choice")
        if self.chosen_function is not None and not self.functions_to_call():
            raise InvalidRequest(f"tool_choice: there is no tool {self.chosen_function!r}", "tool_choice")
        return self

    @property
    def call_mode(self) -> ToolChoiceMode:
        return "required" if self.chosen_function is not None else self.tool_choice or "auto"

    @property
    def chosen_function(self) -> str | None:
        """The name of the one function that must be called, if there is one."""
        name: str | None = getattr(self.tool_choice, "name", None)
        return name

    @property
    def is_parallel(self) -> bool:
        """True if an answer may hold several calls."""
        raise NotImplementedError

    def functions_to_call(self) -> list[FunctionSpec]:
        """The functions that the model may call, according to `tool_choice`; empty if it must not call any."""
        if self.call_mode == "none":
            return []
        chosen = self.chosen_function
        return [spec for spec in self.callable_functions if chosen in (None, spec.name)]


class ParallelToolUse(ToolUse):
    """The same as OpenAI's endpoints say it."""

    parallel_tool_calls: StrictBool | None = Field(None, description="false: at most one call")

    @property
    def is_parallel(self) -> bool:
        return self.parallel_tool_calls is not False


PARSE_SPECIAL_TOKENS = Field(None, description="special tokens that messages contain are special tokens, not text")
