"""Small tokenizers of the kinds that real checkpoints bring, made with the tokenizers library."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from chairlift.engine.text.tokenizer import Tokenizer

END = "</s>"
CORPUS = [
    "The chairlift carries people up the hill, one after another, and the hill is high.",
    "  indented\n\tand tabbed  text, with   runs of spaces",
    "naïve café, façade, Ångström, e\u0301a\u0301 (combining)",
    "日本語のテキスト、中文文本 한국어 텍스트",
    "مرحبا بالعالم שלום עולם",
    "😀😃👍🏽👩‍👩‍👧‍👦🇩🇪 are pictures",
]
SENTENCE_PIECES = ["▁", "▁the", "▁hill", "▁a", "▁chair", "lift", "▁is", "▁high", ".", ",", "▁日", "本", "▁▁", "▁▁▁▁"]
SENTENCE_PIECES += ["\n", *"éabcdefghijklmnopqrstuvwxyzTHE"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LEVEL_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def make_byte_tokenizer(directory: Path) -> Tokenizer:
    """One token per byte, its id the byte; 256 <|endoftext|>, 257 <|im_start|>, 258 <|im_end|>, the end; ChatML."""
    visible = {token: byte for byte, token in enumerate(map(_visible, range(256)))}
    backend = BackendTokenizer(models.BPE(vocab=visible, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _load(backend, directory, BYTE_LEVEL_SPECIALS, CHATML)


def _visible(byte: int) -> str:
    """Returns how byte-level tokenizers write a byte (Radford et al. 2019): itself if it can be seen, else from U+0100
    on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return chr(byte) if byte in seen else chr(0x100 + unseen.index(byte))


def make_byte_level_bpe(directory: Path) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: merges over bytes, so a token may hold parts of characters."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    return _load(backend, directory)


def make_llama2_like(directory: Path) -> Tokenizer:
    """SentencePiece as converted for Llama 2: spaces as U+2581, the first one stripped, bytes as fallback."""
    pieces = ["<unk>", "<s>", END, *BYTES, *SENTENCE_PIECES]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=_merges(vocab), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = BackendTokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return _load(backend, directory)


def make_metaspace_unigram(directory: Path) -> Tokenizer:
    """As T5 and Gemma's relatives have it: a unigram model with a Metaspace decoder."""
    specials = [("<unk>", 0.0), ("<s>", 0.0), (END, 0.0)]
    pieces = specials + [(piece, -3.0 if len(piece) == 1 else -2.0) for piece in SENTENCE_PIECES]
    backend = BackendTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return _load(backend, directory)


def _merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of the vocabulary from two others."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocab, key=len)
        for cut in range(1, len(piece))
        if piece not in BYTES and piece[:cut] in vocab and piece[cut:] in vocab
    ]


def _load(
    backend: BackendTokenizer, directory: Path, specials: Sequence[str] = ("<unk>", "<s>", END), chat: str | None = None
) -> Tokenizer:
    """Through files, as a checkpoint's is loaded. The last special token is the end."""
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    settings = {"eos_token": specials[-1], "clean_up_tokenization_spaces": False, "chat_template": chat}
    PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return Tokenizer(directory)
