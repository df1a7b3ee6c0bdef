"""Text to token ids and back: transformers' tokenizers and chat templates, and each token's bytes.

A conversation's content is plain text, even where it spells a special token: such tokens end turns, so only the
template may write them, unless a request asks otherwise (`ChatOptions.parse_special_tokens`).
"""

import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift.engine.text.call_ids import needs_short_ids, with_short_ids
from chairlift.engine.text.content_forms import NO_PARTS, ContentForms, find_content_forms
from chairlift.engine.text.gguf_tokenizer import make_gguf_tokenizer
from chairlift.engine.text.special_tokens import SpecialTokens, strings_in
from chairlift.engine.text.template_limits import TemplateTooCostly, limited, release
from chairlift.errors import CheckpointError, ConfigurationError, ContextLengthExceeded, InvalidRequest, PromptExcess
from chairlift.models.gguf import is_gguf, open_gguf

logger = logging.getLogger(__name__)

_NO_LIMIT = 10**30
_RENDERING_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
# What templates raise for unknown roles and shapes, or when they take too much memory or nest too deeply.
_TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(MemoryError, RuntimeError),
)
_MAX_REASON = 1000
_PROBED_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
_PRIVATE_USE = range(0xE000, 0xF900)  # characters
# Precedes a piece that is encoded by itself but does not begin the text; see `Tokenizer._encode_pieces`.
_GLUE = "\n"

Message = dict[str, Any]
"""One chat message: at least `role` and `content`."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered."""

    tools: list[dict[Any, Any] | Callable[..., Any]] = field(default_factory=list)  # in OpenAI's shape
    add_generation_prompt: bool = True  # end with the beginning of the assistant's turn
    continue_final_message: bool = False  # leave the last message open instead
    template_arguments: dict[str, Any] = field(default_factory=dict)  # variables of the model's own template
    parse_special_tokens: bool = False  # text that spells a special token becomes that token, as in the template


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Its methods may be called from any thread."""

    def __init__(self, path: Path, chat_template_file: str | None = None) -> None:
        """`path`: a directory, or a GGUF file."""
        try:
            tokenizer: object
            if is_gguf(path):
                tokenizer = make_gguf_tokenizer(open_gguf(path))
            else:
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # any exception of transformers is due to the files
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if "custom code" in reason:
                reason += " Chairlift runs no code that a checkpoint brings."
            raise CheckpointError(f"{path} has no tokenizer that can be loaded: {reason}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise CheckpointError(f"{path} has no fast tokenizer (tokenizer.json)")
        if chat_template_file is not None:
            try:
                tokenizer.chat_template = Path(chat_template_file).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigurationError(f"chat_template {chat_template_file} cannot be read: {error}") from error
        tokenizer.model_max_length = _NO_LIMIT  # lengths are checked against the slot, with a clearer message
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.backend: BackendTokenizer = tokenizer.backend_tokenizer  # needed for incremental decoding
        self.eos_token_id: int | None = tokenizer.eos_token_id
        added = self.backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._unwritten_ids = frozenset(self._special_ids.values())
        self._specials = SpecialTokens(self._special_ids)
        self._token_texts: dict[int, str] = {}
        self._forms = self._forms_with_tools = NO_PARTS
        if self.has_chat_template:
            with limited():
                self._try_template(chat_template_file)

    def _try_template(self, file: str | None) -> None:
        """Finds the forms of content that it shows. `file`: see `_check_template`."""
        try:
            self._forms = self._find_forms([])
            self._forms_with_tools = self._find_forms([_PROBED_TOOL], self._forms)
        except TemplateTooCostly as error:
            release(error)
            self._forms = ContentForms(refused=frozenset({"user"}))
        self._check_template(file)

    def _check_template(self, file: str | None) -> None:
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
                self.render_chat([{"role": "user", "content": "Hello"}], ChatOptions())
            except InvalidRequest as error:
                if file is not None and isinstance(error.__cause__, TemplateSyntaxError):
                    place = f"{file}, line {error.__cause__.lineno}"
                    raise ConfigurationError(f"chat_template {place}: {error.__cause__.message}") from error
                logger.warning("%s; chat does not work unless you set chat_template to another one", error)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The template's text; empty if there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else "\n".join((template or {}).values())

    def describe(self) -> dict[str, Any]:
        """Its class, special tokens and added tokens, by transformers' names; missing ones are None."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        added = self.backend.get_added_tokens_decoder()
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            **{name: getattr(self._tokenizer, name) for name in names},
            "added_tokens_decoder": {
                token_id: {"content": token.content, "special": token.special} for token_id, token in added.items()
            },
        }

    def entries(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary spells each token, which is not always its text: for instance "Ġthe" for " the"."""
        return [self.backend.id_to_token(token) or "" for token in token_ids]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: a text has at least its length divided by this many tokens."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def _fewest_tokens(self, num_characters: int) -> int:
        """A text of so many characters has at least this many tokens."""
        return -(-num_characters // self.longest_token)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
        keeps_end: bool = False,
    ) -> list[int]:
        """Token ids of a text, by default with the special tokens (such as a beginning) that the model expects.

        InvalidRequest about the field `param` if the text is not valid Unicode. ContextLengthExceeded if it is so long
        that it must have more than `max_tokens` tokens, which is known without encoding it.
        `keeps_end`: in that case, encodes only its end instead, at least `max_tokens` tokens.
        """
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            if not keeps_end:
                raise _certainly_too_long(len(text), self._fewest_tokens(len(text)), max_tokens, param)
            text = text[-max_tokens * self.longest_token :]
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # the library's error for a lone surrogate
            raise InvalidRequest(f"{param}: not valid Unicode text", param) from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text that a token adds to a text before it, or a special token's name: " the" also for SentencePiece's.

        Decoded alone, it would lose a space at its beginning. Cached: there are no more than the vocabulary has.
        """
        if token_id not in self._token_texts:
            before, start = self._before
            text = self.decode([*before, token_id], skip_special_tokens=False)
            if not text.startswith(start):
                start, text = "", self.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text[len(start) :]
        return self._token_texts[token_id]

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """Some text that a token can follow, and its decoding."""
        ids = self.backend.encode("a", add_special_tokens=False).ids[-1:]
        return ids, self.decode(ids, skip_special_tokens=False)

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token of a byte-fallback vocabulary stands for ("<0xE6>"); None for all other tokens."""
        return self._fallback_bytes.get(token_id)

    @cached_property
    def _fallback_bytes(self) -> dict[int, int]:
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        ids = {name: self.backend.token_to_id(name) for name in names}
        # A special token, or one that the decoder does not read as a byte, comes out as its name.
        return {
            token_id: names[name]
            for name, token_id in ids.items()
            if token_id is not None and self.decode([token_id], skip_special_tokens=False) != name
        }

    def is_written(self, token_id: int) -> bool:
        """Whether the token can appear in decoded text; special and unknown ones cannot, and do not affect it."""
        return token_id not in self._unwritten_ids and self.backend.id_to_token(token_id) is not None

    def split(self, text: str) -> list[str | int]:
        """A text's parts: between special tokens as they are, and the ids of special tokens that it spells."""
        parts = self._specials.split(text)
        return [part if (token_id := self._special_ids.get(part)) is None else token_id for part in parts]

    def is_text(self, token_id: int) -> bool:
        """Whether the token stands for ordinary text; tokens that were added to the vocabulary often end or mark it."""
        return self.is_written(token_id) and token_id not in self._added_ids

    def render_chat(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Renders the messages with the chat template."""
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use completions, or set chat_template", "messages")
        reserved = _RENDERING_ARGUMENTS.intersection(options.template_arguments)
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs must not set {min(reserved)}", "chat_template_kwargs")
        if needs_short_ids(self.chat_template):
            messages = with_short_ids(messages)
        try:
            forms = self._forms_with_tools if options.tools else self._forms
            return self._render(forms.apply(messages), options)
        except _TEMPLATE_ERRORS as error:
            release(error)
            reason = (str(error) or type(error).__name__)[:_MAX_REASON]
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", "messages") from error

    def _render(self, messages: list[Message], options: ChatOptions) -> str:
        with limited():
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=options.tools or None,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.template_arguments,
            )
        return str(rendered)

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

    def encode_chat(
        self, messages: Sequence[Message], options: ChatOptions, max_tokens: int, keeps_end: bool = False
    ) -> list[int]:
        """Token ids of the rendered chat, to which the template itself adds special tokens. Limits as in `encode`."""
        with limited():
            pieces = self._render_pieces(messages, options)
        if len(pieces) == 1:
            return self.encode(pieces[0], False, "messages", max_tokens, keeps_end)
        length = sum(map(len, pieces))
        if len(pieces) > max_tokens or length > max_tokens * self.longest_token:  # a piece has at least a token
            if not keeps_end:
                num_tokens = max(len(pieces), self._fewest_tokens(length))
                raise _certainly_too_long(length, num_tokens, max_tokens, "messages")
            pieces = pieces[-max_tokens:]
        return self._encode_pieces(pieces)

    def _render_pieces(self, messages: Sequence[Message], options: ChatOptions) -> list[str]:
        """The rendered chat, cut within each special token that the conversation spells, so that no piece has one."""
        rendered = self.render_chat(messages, options)
        given = [*messages, options.tools, options.template_arguments]
        if options.parse_special_tokens or not any(map(self._specials.are_in, strings_in(given))):
            return [rendered]
        cut = _unused_character([rendered, *strings_in(given)])

        def render(in_answers: SpecialTokens, elsewhere: SpecialTokens) -> str:
            marked = [
                (in_answers if message.get("role") == "assistant" else elsewhere).cut(message, cut)
                for message in messages
            ]
            tools, arguments = elsewhere.cut(options.tools, cut), elsewhere.cut(options.template_arguments, cut)
            return self.render_chat(marked, replace(options, tools=tools, template_arguments=arguments))

        marked = render(self._specials, self._specials)
        if marked.replace(cut, "") != rendered:
            # The template searches for some of these texts, for instance to leave thoughts out of earlier answers. The
            # texts that it searches for in answers are not cut there.
            none, texts = SpecialTokens(()), self._specials.texts
            looked_for = {
                text
                for text in texts
                if text in self.chat_template and render(SpecialTokens((text,)), none).replace(cut, "") != rendered
            }
            marked = render(SpecialTokens(texts - looked_for), self._specials)
        return [piece for piece in marked.split(cut) if piece]

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of one text, piece by piece: no token extends from one piece into the next.

        Some tokenizers put a space before the first word of everything they encode. So that only the first piece gets
        it, the others are encoded after a character whose tokens are then removed.
        """
        first, *others = pieces
        try:
            glue = self.backend.encode(_GLUE, add_special_tokens=False).ids
            texts = [first, *(_GLUE + piece for piece in others)]
            ids, *glued = (each.ids for each in self.backend.encode_batch(texts, add_special_tokens=False))
            for piece, piece_ids in zip(others, glued, strict=True):
                is_apart = piece_ids[: len(glue)] == glue
                ids += piece_ids[len(glue) :] if is_apart else self.backend.encode(piece, add_special_tokens=False).ids
        except TypeError as error:
            raise InvalidRequest("messages: not valid Unicode text", "messages") from error
        return list(ids)


def _unused_character(texts: Collection[str]) -> str:
    """A private-use character that is in none of the texts."""
    unused = set(map(chr, _PRIVATE_USE)).difference(*texts)
    if not unused:
        raise InvalidRequest("messages: they use every private-use character of Unicode; leave one out", "messages")
    return min(unused)


def too_long(max_seq_len: int, what: str, param: str, excess: PromptExcess | None = None) -> ContextLengthExceeded:
    """The error for the field `param`, whose message says `what` is too long."""
    start = f"This model's maximum context length is {max_seq_len} tokens."
    return ContextLengthExceeded(f"{start} However, {what}", param, excess)


def _certainly_too_long(num_characters: int, num_tokens: int, max_tokens: int, param: str) -> ContextLengthExceeded:
    """The error for a text that was not encoded; it has `num_tokens` or more."""
    what = f"your {param} of {num_characters} characters resulted in {num_tokens} tokens or more."
    advice = f"Please reduce the length of the {param}."
    return too_long(max_tokens, f"{what} {advice}", param, PromptExcess(num_tokens, max_tokens))
