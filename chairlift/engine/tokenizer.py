"""Text to token ids and back: transformers' tokenizers and chat templates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift.errors import CheckpointError, ConfigurationError, InvalidRequest

_NO_LIMIT = 10**30

Message = dict[str, Any]
"""One chat message: at least `role` and `content`."""


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

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text, by default with the special tokens (such as a beginning) that the model expects.

        InvalidRequest about the field `param` if the text is not valid Unicode.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the library makes of half a surrogate pair
            raise InvalidRequest(f"{param}: not valid Unicode text", param) from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt that the chat template makes of the messages, ready for the assistant's answer."""
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use completions, or set chat_template", "messages")
        try:
            rendered = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, KeyError) as error:  # templates refuse roles and shapes they do not know
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        return str(rendered)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered chat, whose special tokens the template writes itself."""
        return self.encode(self.render_chat(messages), add_special_tokens=False, param="messages")


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"chat_template {path} cannot be read: {error}") from error
