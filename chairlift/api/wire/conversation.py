"""What all requests that continue a conversation have in common, whichever endpoint they came to."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from chairlift.api.tools import FunctionSpec
from chairlift.api.wire.structure import WantedStructure
from chairlift.engine.tokenizer import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import RequestOptions, SamplingParams


class Conversation(Protocol):
    """A checked body, as the one way from a conversation to the engine sees it."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None:
        """False: one call at most."""
        ...

    @property
    def field_names(self) -> Mapping[str, str]:
        """What checks that are shared call a field -> what the client called it, where that differs."""
        ...

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer must be a call."""
        ...

    def functions_to_call(self) -> list[FunctionSpec]:
        """Those that the model may call, as `tool_choice` has it; empty if it must not."""
        ...

    def wanted_structure(self) -> WantedStructure | None:
        """What an answer that is no call must look like."""
        ...

    def template_messages(self) -> list[Message]:
        """What the chat template gets. InvalidRequest if they make no conversation."""
        ...

    def chat_options(self, shows_tools: bool = True) -> ChatOptions:
        """What the template is told beside the messages."""
        ...

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """How to answer, without what the answer must look like."""
        ...

    def request_options(self, key_tenant: str | None) -> RequestOptions:
        """How the request is served beside others; see `GenerationRequest`."""
        ...


@contextmanager
def own_field_names(body: Conversation) -> Iterator[None]:
    """Complaints name the fields that the client wrote."""
    try:
        yield
    except InvalidRequest as error:
        name = body.field_names.get(error.param or "")
        if name is None:
            raise
        raise InvalidRequest(f"{name}: {error}", name) from error
