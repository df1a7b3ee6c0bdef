"""A tokenizer that is written into a GGUF file comes back: the same tokens, the same text."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BackendTokenizer

from chairlift.config import EngineConfig
from chairlift.engine.text.chat_template import ChatOptions
from chairlift.engine.text.merges import make_merges
from chairlift.engine.text.splitting import PATTERNS
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.engine.text.tokenizer_ahead import reading_ahead
from chairlift.errors import CheckpointError
from chairlift.models.gguf import GGUFFile, header, open_gguf
from chairlift.models.gguf.families import end_tokens
from tests.engine.tokenizers_made import CHATML, CORPUS
from tests.support.gguf_files import add_byte_level_tokenizer, add_sentence_piece_tokenizer, finish, new_writer

TEXTS = [
    *(*CORPUS, "What is the capital of France?", "a  12 b   345\n\n  6 7\t8", "don't I'll WE'VE", "  99 bottles"),
    *("x <|im_end|> y", " leading, trailing ", "\n\n\n", "", "abc中文第12章かなdef,Abc [x_1]  3"),
]
SPECIALS = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/tokenizer.json and Qwen's: how a text is taken apart
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/tokenizer.json, one after the other
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(*before: pre_tokenizers.PreTokenizer, use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last]) if before else last


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return byte_level(
        *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns), use_regex=False
    )


RULES = {
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "glm4": split(LLAMA3),
    "deepseek-v3": split(*DEEPSEEK_V3),
    "smollm": byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "refact": byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "gpt-2": byte_level(),
}


def train(rule: str, *, ignore_merges: bool = False) -> BackendTokenizer:
    """Bytes and merges, with special tokens last as most models have them."""
    backend = BackendTokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = RULES[rule], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*CORPUS, "12 345 1999 2024 7 88"] * 3, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return backend


def written(path: Path, write: Callable[[GGUFWriter], object], **special_ids: int | None) -> Tokenizer:
    """`special_ids`: bos, eos or unk."""
    return written_for("llama", path, write, special_ids)


def written_for(
    architecture: str, path: Path, write: Callable[[GGUFWriter], object], special_ids: dict[str, int | None]
) -> Tokenizer:
    writer = new_writer(path, architecture)
    write(writer)
    for name, token in special_ids.items():
        getattr(writer, f"add_{name}_token_id")(token)
    finish(writer)
    return Tokenizer(path)


def byte_level_file(
    directory: Path, backend: BackendTokenizer, rule: str, add_bos: bool | None = False, **special_ids: int | None
) -> Tokenizer:
    flags: Any = {} if add_bos is None else {"add_bos_token": add_bos}
    write = partial(add_byte_level_tokenizer, backend=backend, rule=rule, **flags)
    return written(directory / f"{rule}.gguf", write, **special_ids)


def assert_alike(ours: Tokenizer, original: BackendTokenizer) -> None:
    assert ours.backend.get_vocab_size(with_added_tokens=True) == original.get_vocab_size(with_added_tokens=True)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("rule", RULES)
def test_a_byte_level_tokenizer_is_the_one_that_was_written(tmp_path: Path, rule: str) -> None:
    original = train(rule, ignore_merges=rule in ("llama-bpe", "glm4"))
    ours = byte_level_file(tmp_path, original, rule)
    assert_alike(ours, original)
    for text in TEXTS:
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == original.pre_tokenizer.pre_tokenize_str(text)


# Tokens by llama.cpp's own tokenizer from the same file.
FOUND_WHOLE = {
    "<|开始|>a": ["<|开始|>", "a"],
    "a<|用户|> b<|用": ["a", "<|用户|>", "Ġ", "b", "<", "|", "ç", "Ķ", "¨"],
    "a  b": ["a", "  ", "b"],
    "a   b": ["a", "  ", "Ġ", "b"],
    "日": ["æ", "Ĺ", "¥"],
}


def test_tokens_outside_the_byte_alphabet_are_found_whole(tmp_path: Path) -> None:
    """As DeepSeek's special tokens and MPT's runs of spaces are. Their ids are those of the file."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "日"]
    original = BackendTokenizer(models.BPE({name: index for index, name in enumerate(names)}, [("Ġ", "Ġ")]))
    original.add_special_tokens([AddedToken("<|开始|>", normalized=False)])
    original.add_tokens([AddedToken(name, normalized=False) for name in ("<|用户|>", "  ")])
    tokenizer = byte_level_file(tmp_path, original, "mpt", add_bos=True, bos=len(names))
    found = {text: tokenizer.entries(tokenizer.encode(text, add_special_tokens=False)) for text in FOUND_WHOLE}
    assert found == FOUND_WHOLE
    assert tokenizer.encode("<|用户|>  ") == [len(names), len(names) + 1, len(names) + 2]
    assert tokenizer.decode(tokenizer.encode("日<|用户|>   b")) == "日<|用户|>   b"


def test_a_word_that_is_a_token_needs_no_merges_where_the_model_has_it_so(tmp_path: Path) -> None:
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "zyxwv"]
    original = BackendTokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    for rule in ("llama-bpe", "midm-2.0", "tekken"):
        assert len(byte_level_file(tmp_path, original, rule).encode("zyxwv")) == 1
    assert len(byte_level_file(tmp_path, original, "qwen2").encode("zyxwv")) == 5


MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("l", "l"), ("▁", "▁"), ("i", "s"), ("▁", "is")]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", "<|user|>", *BYTES, *"▁abcdefghijklmnopqrstuvwxyzTHECWI.,?'"]
PIECES += ["".join(merge) for merge in MERGES]


def sentence_piece(adds_space: bool) -> BackendTokenizer:
    """As Llama 2's and Mistral's first tokenizers were converted for transformers."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    backend = BackendTokenizer(models.BPE(vocab, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if adds_space else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if adds_space else [])])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in PIECES[:4]])
    return backend


def sentence_piece_file(directory: Path, architecture: str = "llama", **flags: Any) -> Tokenizer:
    order = {"".join(merge): -rank for rank, merge in enumerate(MERGES)}
    scores = [float(order.get(piece, -100)) for piece in PIECES]
    write = partial(add_sentence_piece_tokenizer, backend=sentence_piece(True), scores=scores, **flags)
    return written_for(architecture, directory / "model.gguf", write, {"bos": 1, "eos": 2, "unk": 0})


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentence_piece_tokenizer_is_the_one_that_was_written(tmp_path: Path, adds_space: bool) -> None:
    assert_alike(sentence_piece_file(tmp_path, add_space_prefix=adds_space), sentence_piece(adds_space))


def test_a_token_so_long_that_its_merges_would_take_for_ever_is_refused(tmp_path: Path) -> None:
    pieces = [*PIECES, "th" * 600]
    backend = BackendTokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    write = partial(add_sentence_piece_tokenizer, backend=backend, scores=[0.0] * len(pieces))
    with pytest.raises(CheckpointError, match=r"its token 'thth.*\.\.\. has 1200 characters, and 1024 are the most"):
        written_for("llama", tmp_path / "model.gguf", write, {"bos": 1, "eos": 2, "unk": 0})


# Tokens by llama.cpp's own tokenizer from the same file.
WITH_SPACE = {
    "the": "▁the",
    " the": "▁ ▁the",
    "  the": "▁▁ ▁the",
    "   the hill ": "▁▁ ▁ ▁the ▁ h i ll ▁",
    " ": "▁▁",
    "\n": "▁ <0x0A>",
    " \n the": "▁▁ <0x0A> ▁the",
    "a</s>the": "▁a </s> ▁the",
    "a</s> the": "▁a </s> ▁ ▁the",
    "</s>  </s>": "</s> ▁▁ ▁ </s>",
    "<s>the": "<s> ▁the",
    "é日": "▁ <0xC3> <0xA9> <0xE6> <0x97> <0xA5>",
    " é": "▁▁ <0xC3> <0xA9>",
    "▁the": "▁ ▁the",
    "": "",
}
WITHOUT_SPACE = {
    "the": "the",
    " the": "▁the",
    "  the": "▁ ▁the",
    "   the hill ": "▁▁ ▁the ▁ h i ll ▁",
    " ": "▁",
    "\n": "<0x0A>",
    "a</s>the": "a </s> the",
    "a</s> the": "a </s> ▁the",
    "</s>  </s>": "</s> ▁▁ </s>",
    "é日": "<0xC3> <0xA9> <0xE6> <0x97> <0xA5>",
    "": "",
}


def pieces_of(tokenizer: Tokenizer, text: str) -> str:
    return " ".join(tokenizer.entries(tokenizer.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize(("adds_space", "expected"), [(None, WITH_SPACE), (True, WITH_SPACE), (False, WITHOUT_SPACE)])
def test_a_sentence_piece_tokenizer_is_llama_cpps(
    tmp_path: Path, adds_space: bool | None, expected: dict[str, str]
) -> None:
    """It puts a space before each text, also one that begins with spaces, unless the file says otherwise."""
    flags: dict[str, Any] = {} if adds_space is None else {"add_space_prefix": adds_space}
    tokenizer = sentence_piece_file(tmp_path, **flags)
    assert {text: pieces_of(tokenizer, text) for text in expected} == expected


def scored(tokens: dict[str, tuple[TokenType, float]]) -> Callable[[GGUFWriter], None]:
    """Writes SentencePiece's tokens with their types and scores."""

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(tokens))
        writer.add_token_types([kind for kind, _ in tokens.values()])
        writer.add_token_scores([score for _, score in tokens.values()])

    return write


def test_gemmas_runs_of_spaces_come_before_all_other_tokens(tmp_path: Path) -> None:
    """Whatever their scores, and the longest first. The file has them as spaces. Expected tokens are llama.cpp's."""
    runs = {" " * size: (TokenType.USER_DEFINED, -1000.0) for size in range(2, 6)}
    pieces = {piece: (TokenType.NORMAL, float(-index)) for index, piece in enumerate(PIECES) if piece != "▁▁"}
    tokenizer = written_for("gemma2", tmp_path / "model.gguf", scored({**pieces, **runs}), {"bos": 1, "eos": 2})
    lengths = {size: [*map(len, tokenizer.entries(tokenizer.encode(" " * size, False)))] for size in (1, 4, 8, 12)}
    assert lengths == {1: [1], 4: [4], 8: [5, 3], 12: [5, 5, 2]}
    assert pieces_of(tokenizer, "  the\n   the") == "▁▁ the <0x0A> ▁▁▁ the"


def test_gemma_4_has_sentence_pieces_with_merges(tmp_path: Path) -> None:
    """Spaces are marks, a text begins with its token whatever the file says, and calls end an answer."""
    pieces = [*PIECES, "<|tool_response>", "th", "ea", "▁th"]

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(pieces)
        whole = ("<s>", "</s>", "<|tool_response>")
        writer.add_token_types([TokenType.USER_DEFINED if piece in whole else TokenType.NORMAL for piece in pieces])
        writer.add_token_merges(["t h", "e a", "▁ th"])
        writer.add_add_bos_token(False)

    ids = {"bos": PIECES.index("<s>"), "eos": PIECES.index("</s>"), "unk": PIECES.index("<unk>")}
    path = tmp_path / "model.gguf"
    tokenizer = written_for("gemma4", path, write, {**ids})
    assert pieces_of(tokenizer, " the\nth<|tool_response>ea") == "▁th e <0x0A> th <|tool_response> ea"
    assert tokenizer.encode("a")[0] == ids["bos"]
    assert end_tokens(open_gguf(path)) == sorted([ids["eos"], pieces.index("<|tool_response>")])


def test_tokens_with_one_score_are_made_in_the_files_order(tmp_path: Path) -> None:
    """Some converters write one score for all tokens, and a vocabulary has them in the order of its merges."""
    pieces = [*PIECES[: PIECES.index("▁")], *"▁thea", "th", "ea", "the", "▁th"]
    tokens = {piece: (TokenType.NORMAL, -1000.0) for piece in pieces}
    tokenizer = written(tmp_path / "model.gguf", scored(tokens))
    assert pieces_of(tokenizer, "thea the") == "▁th ea ▁ the"


def test_merges_and_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.tokenization_utils_base import generate_merges

    make_theirs: Any = generate_merges
    vocab = {"".join(letters): index for index, letters in enumerate(product("abc", repeat=4))}
    vocab |= {token[:size]: len(vocab) + index for index, token in enumerate(vocab) for size in (1, 2, 3)}
    for num_ranks in (1, 5, 1000):
        ranks = {token: index * 37 % num_ranks for token, index in vocab.items()}
        merges = make_merges(list(ranks), np.array(list(ranks.values())))
        assert merges == make_theirs(vocab, {token: (-float(rank), 0) for token, rank in ranks.items()})
    assert {rule: GGUF_PRE_TOKENIZER_SPLITS[str(rule)] for rule in PATTERNS} == PATTERNS


def test_a_file_that_names_no_special_tokens_has_llamas(tmp_path: Path) -> None:
    tokenizer = written(tmp_path / "model.gguf", scored({piece: (TokenType.NORMAL, 0.0) for piece in PIECES}))
    assert (tokenizer.encode("a")[0], tokenizer.eos_token_id) == (PIECES.index("<s>"), PIECES.index("</s>"))


def test_phi3s_special_tokens_take_the_white_space_after_them(tmp_path: Path) -> None:
    """As in the model's own tokenizer, and in llama.cpp's for it. The file does not say so."""
    tokenizer = sentence_piece_file(tmp_path, "phi3")
    assert pieces_of(tokenizer, "<|user|>\nthe</s>\n") == "<|user|> ▁the </s>"
    assert pieces_of(tokenizer, "<s> the") == "<s> ▁ ▁the"  # but not its beginning
    other = sentence_piece_file(tmp_path, "llama")
    assert pieces_of(other, "<|user|>\nthe</s>\n") == "<|user|> ▁ <0x0A> the </s> ▁ <0x0A>"


def test_special_tokens_and_the_chat_template_are_the_files(tmp_path: Path) -> None:
    original = train("qwen2")
    begin, start, end = (original.get_vocab()[token] for token in SPECIALS)

    def write(writer: GGUFWriter) -> None:
        add_byte_level_tokenizer(writer, original, "qwen2", add_bos_token=True)
        writer.add_chat_template(CHATML)

    tokenizer = written(tmp_path / "model.gguf", write, bos=begin, eos=end)
    assert (tokenizer.encode("a")[0], tokenizer.eos_token_id) == (begin, end)
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}], ChatOptions(), max_tokens=100)
    assert tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (chat.count(start), chat.count(end)) == (2, 1)


def test_whether_a_text_begins_with_its_token_is_the_kinds_habit_if_the_file_is_silent(tmp_path: Path) -> None:
    """Llama 3's do, Qwen's do not."""
    for rule, is_added in (("llama-bpe", True), ("qwen2", False)):
        original = train(rule)
        begin = original.token_to_id(SPECIALS[0])
        tokenizer = byte_level_file(tmp_path, original, rule, add_bos=None, bos=begin)
        assert (tokenizer.encode("a")[0] == begin) is is_added


def test_a_rule_or_a_kind_that_is_not_known_is_refused(tmp_path: Path) -> None:
    said = "splits text by an unknown rule (tokenizer.ggml.pre 'viking'); name a directory with"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        byte_level_file(tmp_path, train("gpt-2"), "viking")
    with pytest.raises(
        CheckpointError, match="its tokenizer is of the kind 'bert', and only gpt2, llama and gemma4 can"
    ):
        written(tmp_path / "model.gguf", lambda writer: writer.add_tokenizer_model("bert"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("sound")
    byte_level_file(directory, train("gpt-2"), "qwen2", add_bos=True)
    return (directory / "qwen2.gguf").read_bytes()


@given(st.data())
def test_whatever_bytes_are_flipped_it_is_made_or_refused(sound: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.gguf").write_bytes(damaged)
    with contextlib.suppress(CheckpointError):
        Tokenizer(tmp_path / "model.gguf")


def test_a_files_tokenizer_is_read_ahead_by_one_reading_of_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = byte_level_file(tmp_path, train("qwen2"), "qwen2")
    path, readings = tmp_path / "qwen2.gguf", []
    read_headers = header._read_headers

    def read_and_count(first: Path, parts: list[Path]) -> GGUFFile:
        readings.append(first)
        return read_headers(first, parts)

    monkeypatch.setattr(header, "_read_headers", read_and_count)
    with reading_ahead(EngineConfig(model=str(path))) as ahead:
        assert ahead is not None
        assert ahead.result().encode(TEXTS[0]) == expected.encode(TEXTS[0])
        open_gguf(path)
    assert readings == [path]
    with reading_ahead(EngineConfig(model="bundled")) as ahead:
        assert ahead is None


def test_a_tokenizer_that_cannot_be_read_ahead_says_so_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with reading_ahead(EngineConfig(model=str(tmp_path / "model.gguf"))) as ahead:
        assert ahead is not None
        with pytest.raises(CheckpointError, match=r"model\.gguf has no tokenizer that can be loaded"):
            ahead.result()
