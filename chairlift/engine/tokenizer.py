"""Text to token ids and back: transformers' tokenizers and chat templates."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift.errors import CheckpointError, ConfigurationError, InvalidRequest

_NO_LIMIT = 10**30
_RENDERING_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)

Message = dict[str, Any]
"""One chat message: at least `role` and `content`."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered."""

    tools: list[dict[Any, Any] | Callable[..., Any]] = field(default_factory=list)  # in OpenAI's shape
    add_generation_prompt: bool = True  # end with the beginning of the assistant's turn
    continue_final_message: bool = False  # leave the last message open instead
    template_arguments: dict[str, Any] = field(default_factory=dict)  # variables of the model's own template


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Its methods may be called from any thread."""

    def __init__(self, directory: Path, chat_template_file: str | None = None) -> None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # whatever transformers makes of the files, it is about the files
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{directory} has no tokenizer that can be loaded: {reason}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise CheckpointError(f"{directory} has no fast tokenizer (tokenizer.json)")
        if chat_template_file is not None:
            tokenizer.chat_template = _read_template(Path(chat_template_file))
        tokenizer.model_max_length = _NO_LIMIT  # lengths are checked against the slot, with a clearer message
        self._tokenizer = tokenizer
        self.eos_token_id: int | None = tokenizer.eos_token_id

    @property
    def backend(self) -> BackendTokenizer:
        """The tokenizers library's object, which incremental decoding needs."""
        backend: BackendTokenizer = self._tokenizer.backend_tokenizer
        return backend

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The template's text; empty if there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else "\n".join((template or {}).values())

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def encode(
        self, text: str, add_special_tokens: bool = True, param: str = "prompt", max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text, by default with the special tokens (such as a beginning) that the model expects.

        InvalidRequest about the field `param` if the text is not valid Unicode, or so long that it must have more than
        `max_tokens`, whatever they are: that is found without looking at all of it.
        """
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise InvalidRequest(
                f"{param}: a text of {len(text)} characters is certainly more than the {max_tokens} tokens that a"
                " sequence holds",
                param,
            )
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the library makes of half a surrogate pair
            raise InvalidRequest(f"{param}: not valid Unicode text", param) from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The prompt that the chat template makes of the messages."""
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use completions, or set chat_template", "messages")
        reserved = _RENDERING_ARGUMENTS.intersection(options.template_arguments)
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs must not set {min(reserved)}", "chat_template_kwargs")
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=options.tools or None,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.template_arguments,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:  # of roles and shapes it does not know
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        return str(rendered)

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions, max_tokens: int) -> list[int]:
        """Token ids of the rendered chat, whose special tokens the template writes itself."""
        rendered = self.render_chat(messages, options)
        return self.encode(rendered, add_special_tokens=False, param="messages", max_tokens=max_tokens)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"chat_template {path} cannot be read: {error}") from error
