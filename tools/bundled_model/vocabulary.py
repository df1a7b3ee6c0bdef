"""Builds the tokenizer: a token per UTF-8 byte, a few special tokens, and a chat template in ChatML's manner.

A turn is the token of its role, its text, and a token that ends it. A whole token for each role, instead of
the role's name spelt out in bytes, saves a quarter of the length of a typical conversation.

Token `b` is byte `b` for 0 <= b < 256, so text is encoded by `list(text.encode())` during training.
Single bytes are a choice: spelling, reversing and counting need to see characters.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bundled_model.tool_format import CHAT_TEMPLATE

END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|im_end|>"
ROLES = ("system", "user", "assistant")
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)
SPECIAL_TOKENS = (END_OF_TEXT, TURN_END, *ROLE_TOKENS)

END_OF_TEXT_ID, TURN_END_ID, *_ROLE_IDS = range(256, 256 + len(SPECIAL_TOKENS))
ROLE_IDS = dict(zip(ROLES, _ROLE_IDS, strict=True))
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_POSITIONS = 2048


def byte_symbols() -> list[str]:
    """Returns the printable character that byte-level tokenizers use for each byte, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols.update({byte: chr(256 + offset) for offset, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer that is saved with the model."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(ROLE_TOKENS),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_text(text: str) -> list[int]:
    """Returns the token ids of text without special tokens."""
    return list(text.encode())


def encode_turn(role: str, content: str) -> list[int]:
    """Returns the token ids of one whole turn, as the chat template writes it."""
    return [ROLE_IDS[role], *encode_text(content), TURN_END_ID]
