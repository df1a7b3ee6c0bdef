"""Text and conversations to token ids and back, with the tokenizers library.

A conversation's content is plain text, even where it spells a special token: such tokens end turns, so only the
template may write them, unless a request asks otherwise (`ChatOptions.parse_special_tokens`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from chairlift.engine.text.chat_template import ChatOptions, ChatTemplate, Message
from chairlift.engine.text.special_tokens import SpecialTokens, strings_in
from chairlift.engine.text.template_limits import limited
from chairlift.engine.text.tokenizer_files import read_tokenizer
from chairlift.errors import ContextLengthExceeded, InvalidRequest, PromptExcess

_PRIVATE_USE = range(0xE000, 0xF900)  # characters
# Precedes a piece that is encoded by itself but does not begin the text; see `Tokenizer._encode_pieces`.
_GLUE = "\n"


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Its methods may be called from any thread."""

    def __init__(self, path: Path, chat_template_file: str | None = None) -> None:
        """`path`: a directory, or a GGUF file."""
        parts = read_tokenizer(path)
        self._parts = parts
        self.backend: BackendTokenizer = parts.backend  # needed for incremental decoding
        self.eos_token_id: int | None = parts.eos_token_id
        added = self.backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._unwritten_ids = frozenset(self._special_ids.values())
        self._specials = SpecialTokens(self._special_ids)
        self._token_texts: dict[int, str] = {}
        self._chat = ChatTemplate(parts, chat_template_file)

    @property
    def has_chat_template(self) -> bool:
        return self._chat.exists

    @property
    def chat_template(self) -> str:
        """The template's text; empty if there is none."""
        return self._chat.text

    def render_chat(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Renders the messages with the chat template."""
        return self._chat.render(messages, options)

    @property
    def declarations(self) -> dict[str, Any]:
        """The checkpoint's own account of how answers are written: `response_template`; `response_schema` is older."""
        return dict(self._parts.declarations)

    def describe(self) -> dict[str, Any]:
        """Its class, special tokens and added tokens, by transformers' names; missing ones are None."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        added = self.backend.get_added_tokens_decoder()
        return {
            "tokenizer_class": self._parts.class_name,
            **{name: self._parts.special_tokens.get(name) for name in names},
            "added_tokens_decoder": {
                token_id: {"content": token.content, "special": token.special} for token_id, token in added.items()
            },
        }

    def entries(self, token_ids: Sequence[int]) -> list[str]:
        """Spells each token as the vocabulary does, which is not always its text: for instance "Ġthe" for " the"."""
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
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
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
        """Returns true if the token can appear in decoded text; special and unknown ones do not affect it."""
        return token_id not in self._unwritten_ids and self.backend.id_to_token(token_id) is not None

    def split(self, text: str) -> list[str | int]:
        """A text's parts: between special tokens as they are, and the ids of special tokens that it spells."""
        parts = self._specials.split(text)
        return [part if (token_id := self._special_ids.get(part)) is None else token_id for part in parts]

    def is_text(self, token_id: int) -> bool:
        """True if the token stands for ordinary text; tokens that were added to the vocabulary often end or mark it."""
        return self.is_written(token_id) and token_id not in self._added_ids

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

    def first_tokens(self, text: str, num_tokens: int, param: str) -> str:
        """The text of so many tokens at the beginning of a text. InvalidRequest if it is not valid Unicode."""
        part = text[: num_tokens * self.longest_token]
        ids = self.encode(part, add_special_tokens=False, param=param)
        return part if len(ids) <= num_tokens else self.decode(ids[:num_tokens], skip_special_tokens=False)

    def encode_literally(self, text: str, param: str, max_tokens: int) -> list[int]:
        """Token ids of a text in which nothing is a special token, whatever it spells. Errors as in `encode`."""
        if len(text) > max_tokens * self.longest_token:
            raise _certainly_too_long(len(text), self._fewest_tokens(len(text)), max_tokens, param)
        if not self._specials.are_in(text):
            return self.encode(text, add_special_tokens=False, param=param)
        cut = _unused_character([text])
        return self._encode_pieces([piece for piece in self._specials.cut(text, cut).split(cut) if piece])

    def _render_pieces(self, messages: Sequence[Message], options: ChatOptions) -> list[str]:
        """The rendered chat, cut within each special token that the conversation spells, so that no piece has one."""
        rendered = self._chat.render(messages, options)
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
            return self._chat.render(marked, replace(options, tools=tools, template_arguments=arguments))

        marked = render(self._specials, self._specials)
        if marked.replace(cut, "") != rendered:
            # The template searches for some of these texts, for instance to leave thoughts out of earlier answers. The
            # texts that it searches for in answers are not cut there.
            none, texts = SpecialTokens(()), self._specials.texts
            looked_for = {
                text
                for text in texts
                if text in self._chat.text and render(SpecialTokens((text,)), none).replace(cut, "") != rendered
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
