"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's Messages API specifies them.

Unsupported fields that would change the answer are refused by name; hints that clients send with every request are
accepted. The model's name, sampling parameters beyond the specification and scheduling options are those of the other
endpoints.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.structure import WantedStructure, make_structure, the_only_one
from chairlift.api.anthropic.turns import (
    CacheControl,
    ModelTurn,
    ResultTurn,
    TextBlock,
    ToolReference,
    Turn,
    joined,
    merged,
)
from chairlift.api.wire.body import Body, Label, ModelBody
from chairlift.api.wire.checks import only, only_types
from chairlift.api.wire.conversation import ToolChoiceMode, ToolUse, effort_arguments
from chairlift.api.wire.generation import SENDER, GenerationRequest
from chairlift.api.wire.marks import Ignored, Refused
from chairlift.api.wire.tools import LeftOutTool, known_or_left_out
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import SamplingParams, String


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object")
    strict: StrictBool | None = Field(None, description="true: calls are made to fit the schema, token by token")
    cache_control: CacheControl = None
    input_examples: Annotated[list[Any] | None, Ignored("put examples into the description")] = None
    eager_input_streaming: Annotated[StrictBool | None, Ignored("arguments are always streamed")] = None
    defer_loading: StrictBool | None = Field(
        None,
        description="true: the model reads the tool where the first tool_reference names it, so that the beginning of"
        " the prompt stays as it was; if none does, at the beginning",
    )
    allowed_callers: Annotated[list[str] | None, only(["direct"], "only the model itself calls tools")] = None

    def spec(self) -> FunctionSpec:
        return FunctionSpec(self.name, self.input_schema, self.strict, self.description)


AnyTool = Annotated[CustomTool | LeftOutTool, known_or_left_out(CustomTool, None, "custom")]


_ONE_MODEL = "there is one model here"
_CALL_MODES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class ToolChoice(Body):
    """Chooses whether to call a tool, or which; any and tool are enforced token by token."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="the tool's name; only with type tool")
    disable_parallel_tool_use: StrictBool | None = Field(None, description="true: at most one call")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise InvalidRequest("tool_choice: name goes with type tool", "tool_choice")
        return self


class Thinking(Body):
    """Chooses whether to think before the answer, as far as the chat template knows such a thing."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[StrictInt | None, Ignored("max_tokens bounds thoughts and answer together")] = None
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None, description="omitted: thinking blocks are sent without their text; all others: with it, in full"
    )


class OutputFormat(Body):
    """Prescribes what the answer must look like, enforced token by token."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="JSON Schema")


class OutputConfig(Body):
    """Says how to answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="how much to think, if the chat template supports it"
    )
    format: OutputFormat | None = None
    task_budget: Annotated[dict[str, Any] | None, Ignored("max_tokens bounds an answer")] = None


class RequestMetadata(Body):
    """Tells what is known of the request's sender."""

    user_id: Label | None = Field(None, description=SENDER)


class CountTokensRequest(ModelBody, ToolUse):
    """A conversation whose tokens are to be counted."""

    messages: list[Turn] = Field(
        description="turns of the user and the assistant; an assistant's turn at the end is continued"
    )
    system: str | list[Annotated[TextBlock, only_types("system", "text")]] | None = Field(
        None, description="the system message"
    )
    tools: list[AnyTool] | None = Field(
        None, max_length=512, description="tools that the model may call; other types are left out, with a warning"
    )
    tool_choice: ToolChoice | None = Field(None, description="whether to call a tool, or which")
    thinking: Thinking | None = Field(None, description="for models that think before they answer")
    output_config: OutputConfig | None = Field(
        None, description="what the answer must look like, and how much to think"
    )
    cache_control: CacheControl = None
    context_management: Annotated[
        dict[str, Any] | None, Ignored("nothing is cleared; a conversation that is too long is an error")
    ] = None
    speed: Annotated[Literal["standard", "fast"] | None, Ignored("there is one speed")] = None
    user_profile_id: Annotated[Label | None, Ignored("metadata.user_id says who sent the request")] = None
    workspace_id: Annotated[Label | None, Ignored("there are no workspaces")] = None
    billing_policy: Annotated[dict[str, Any] | None, Ignored("nothing is billed")] = None
    mcp_servers: Annotated[None, Refused("the client connects to such servers, and sends their tools")] = None
    compaction: Annotated[None, Refused("leave out of messages what the model may forget")] = None

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.is_continued and "tool_calls" in self.messages[-1].as_template_input()[-1]:
            raise InvalidRequest("messages: the last turn calls tools, and their results are missing", "messages")
        return self

    @property
    def call_mode(self) -> ToolChoiceMode:
        return "auto" if self.tool_choice is None else _CALL_MODES[self.tool_choice.type]

    @property
    def is_parallel(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def is_continued(self) -> bool:
        """True if the answer continues the assistant's last turn."""
        return bool(self.messages) and isinstance(self.messages[-1], ModelTurn)

    @property
    def returned_parts(self) -> Iterable[object]:
        return (part for turn in self.messages if isinstance(turn, ResultTurn) for part in turn.parts)

    @property
    def shown_functions(self) -> list[FunctionSpec]:
        late = self._late_functions()
        return [spec for spec in super().shown_functions if spec.name not in late]

    def _late_functions(self) -> dict[str, FunctionSpec]:
        """The functions that are described where a tool's result refers to them, by name.

        None where no other function is shown: templates explain how to call only beside functions.
        """
        if self.call_mode == "none":
            return {}
        named = {part.tool_name for part in self.returned_parts if isinstance(part, ToolReference)}
        tools = [tool for tool in self.tools or [] if isinstance(tool, CustomTool)]
        late = {tool.name: tool.spec() for tool in tools if tool.defer_loading and tool.name in named}
        return late if len(late) < len({tool.name for tool in tools}) else {}

    def template_messages(self) -> list[Message]:
        late = self._late_functions()

        def tool_text(name: str) -> str:
            """Describes a function once, however often it is named."""
            function = late.pop(name, None)
            if function is None:
                return name
            return f"{name}: {json.dumps(function.as_template_input(), ensure_ascii=False)}"

        messages: list[Message] = [] if not self.system else [{"role": "system", "content": joined(self.system)}]
        for turn in self.messages:
            messages += turn.as_template_input(tool_text) if isinstance(turn, ResultTurn) else turn.as_template_input()
        return merged(messages)

    def chat_options(self) -> ChatOptions:
        is_continued = self.is_continued
        return replace(
            super().chat_options(), add_generation_prompt=not is_continued, continue_final_message=is_continued
        )

    def thinking_arguments(self) -> dict[str, Any]:
        """Refuses nothing: clients say how much to think with every request, whatever the model."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return effort_arguments("none")
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None:
            return effort_arguments(effort)
        return {} if self.thinking is None else {"enable_thinking": True}


class MessagesRequest(CountTokensRequest, GenerationRequest):
    """Answer a conversation."""

    max_tokens: StrictInt = Field(
        ge=0,
        description="most new tokens, which the context length limits as well; 0: only compute the prompt",
    )
    stop_sequences: list[String] | None = Field(None, description="strings that end the text and are not part of it")
    metadata: RequestMetadata | None = Field(None, description="who sent the request")
    service_tier: Annotated[Label | None, Ignored("there is one tier")] = None
    inference_geo: Annotated[Label | None, Ignored("there is one place")] = None
    diagnostics: Annotated[dict[str, Any] | None, Ignored("usage reports what was reused")] = None
    container: Annotated[None, Refused("there are no containers here")] = None
    fallbacks: Annotated[None, Refused(_ONE_MODEL)] = None
    fallback_credit_token: Annotated[None, Refused(_ONE_MODEL)] = None
    thread: Annotated[None, Refused("conversations are not stored; send all of their messages")] = None

    @property
    def sender(self) -> str:
        return (self.metadata.user_id if self.metadata is not None else None) or ""

    def wanted_structure(self) -> WantedStructure | None:
        form = None if self.output_config is None else self.output_config.format
        wanted = None if form is None else make_structure("output_config", json=form.schema_)
        return the_only_one(output_config=wanted, structured_outputs=self.structured_outputs)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return self.sampling_params(defaults, stop=self.stop_sequences)
