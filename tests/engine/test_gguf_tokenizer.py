"""A tokenizer that is written into a GGUF file comes back: the same tokens, the same text."""

import contextlib
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BackendTokenizer

from chairlift.engine.text.tokenizer import ChatOptions, Tokenizer
from chairlift.errors import CheckpointError
from tests.engine.tokenizers_made import CHATML, CORPUS
from tests.support.gguf_files import add_byte_level_tokenizer, add_sentence_piece_tokenizer, finish, new_writer

TEXTS = [
    *CORPUS,
    "What is the capital of France?",
    "a  12 b   345\n\n  6 7\t8",
    "don't I'll WE'VE",
    "  99 bottles",
    "x <|im_end|> y",
    " leading, trailing ",
    "\n\n\n",
    "",
]
SPECIALS = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/tokenizer.json and Qwen's: how a text is taken apart
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits_alone() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


RULES: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "llama-bpe": partial(split, LLAMA3),
    "qwen2": partial(split, QWEN2),
    "smollm": digits_alone,
    "refact": digits_alone,
    "gpt-2": gpt2,
}


def train(pre_tokenizer: pre_tokenizers.PreTokenizer, *, ignore_merges: bool = False) -> BackendTokenizer:
    """Bytes and merges, with special tokens last as most models have them."""
    backend = BackendTokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*CORPUS, "12 345 1999 2024 7 88"] * 3, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return backend


def ids_of(backend: BackendTokenizer) -> list[int]:
    """The ids of the special tokens."""
    return [token for each in SPECIALS if (token := backend.token_to_id(each)) is not None]


@cache
def small() -> BackendTokenizer:
    return train(gpt2())


def written(path: Path, write: Callable[[GGUFWriter], object]) -> Tokenizer:
    writer = new_writer(path, "llama")
    write(writer)
    finish(writer)
    return Tokenizer(path)


def assert_alike(ours: Tokenizer, original: BackendTokenizer) -> None:
    assert ours.backend.get_vocab_size(with_added_tokens=True) == original.get_vocab_size(with_added_tokens=True)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("rule", RULES)
def test_a_byte_level_tokenizer_is_the_one_that_was_written(tmp_path: Path, rule: str) -> None:
    original = train(RULES[rule](), ignore_merges=rule == "llama-bpe")
    write = partial(add_byte_level_tokenizer, backend=original, rule=rule, add_bos_token=False)
    assert_alike(written(tmp_path / "model.gguf", write), original)


def test_a_word_that_is_a_token_needs_no_merges_where_the_model_has_it_so(tmp_path: Path) -> None:
    def encoded(rule: str) -> list[int]:
        original = train(RULES["llama-bpe"]())
        state = original.get_vocab(with_added_tokens=False)
        original = BackendTokenizer(models.BPE({**state, "zyxwv": len(state)}, []))
        write = partial(add_byte_level_tokenizer, backend=original, rule=rule, add_bos_token=False)
        return written(tmp_path / f"{rule}.gguf", write).encode("zyxwv")

    assert len(encoded("llama-bpe")) == 1
    assert len(encoded("qwen2")) == 5


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentence_piece_tokenizer_is_the_one_that_was_written(tmp_path: Path, adds_space: bool) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        *"▁abcdefghijklmnopqrstuvwxyzTHECWI.,?'",
        "th",
        "the",
        "▁the",
        "▁a",
        "ll",
        "hill",
        "▁hill",
        "is",
        "▁is",
        "▁▁",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("l", "l"), ("▁", "▁"), ("i", "s"), ("▁", "is")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    original = BackendTokenizer(model)
    scheme = "first" if adds_space else "never"
    original.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    original.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if adds_space else [])])
    original.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    original.add_special_tokens(["<unk>", "<s>", "</s>"])
    order = {"".join(merge): -rank for rank, merge in enumerate(merges)}
    scores = [float(order.get(piece, -100)) for piece in pieces]

    def write(writer: GGUFWriter) -> None:
        add_sentence_piece_tokenizer(writer, original, scores, add_space_prefix=adds_space)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    assert_alike(written(tmp_path / "model.gguf", write), original)


def test_special_tokens_and_the_chat_template_are_the_files(tmp_path: Path) -> None:
    original = train(RULES["qwen2"]())
    begin, start, end = ids_of(original)

    def write(writer: GGUFWriter) -> None:
        add_byte_level_tokenizer(writer, original, "qwen2", add_bos_token=True)
        writer.add_bos_token_id(begin)
        writer.add_eos_token_id(end)
        writer.add_chat_template(CHATML)

    tokenizer = written(tmp_path / "model.gguf", write)
    assert tokenizer.encode("a")[0] == begin
    assert tokenizer.eos_token_id == end
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}], ChatOptions(), max_tokens=100)
    assert tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (chat.count(start), chat.count(end)) == (2, 1)


@pytest.mark.parametrize(
    ("rule", "is_added"), [("llama-bpe", True), ("qwen2", False)], ids=["Llama 3 begins", "Qwen does not"]
)
def test_whether_a_text_begins_with_its_token_is_the_kinds_habit_if_the_file_is_silent(
    tmp_path: Path, rule: str, is_added: bool
) -> None:
    original = train(RULES[rule]())

    def write(writer: GGUFWriter) -> None:
        add_byte_level_tokenizer(writer, original, rule)
        writer.add_bos_token_id(ids_of(original)[0])

    tokenizer = written(tmp_path / "model.gguf", write)
    assert (tokenizer.encode("a")[0] == ids_of(original)[0]) is is_added


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda writer: add_byte_level_tokenizer(writer, small(), "viking"),
            "splits text by an unknown rule (tokenizer.ggml.pre 'viking'); name a directory with",
        ),
        (
            lambda writer: writer.add_tokenizer_model("bert"),
            "its tokenizer is of the kind 'bert', and only gpt2 and llama can be read",
        ),
    ],
)
def test_a_rule_or_a_kind_that_is_not_known_is_refused(
    tmp_path: Path, write: Callable[[GGUFWriter], object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        written(tmp_path / "model.gguf", write)


@given(st.data())
def test_whatever_bytes_are_flipped_a_tokenizer_is_made_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "model.gguf"
    written(path, partial(add_byte_level_tokenizer, backend=small(), rule="qwen2", add_bos_token=True))
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    with contextlib.suppress(CheckpointError):
        Tokenizer(path)
