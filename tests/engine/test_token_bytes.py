"""The bytes of tokens as llguidance reads them itself, without its own copy of the tokenizer."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from chairlift.engine.text.token_bytes import TokenBytes
from chairlift.engine.text.tokenizer import Tokenizer as ModelTokenizer
from chairlift.engine.text.trial_process import open_tokenizer
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.models.checkpoint import find_model
from tests.engine.tokenizers_made import make_llama2_like

TEXTS = ["ab a  <think> </s> ab", "日本", '{"a": "ñ"}', "▁ a", ""]
EOS = [2, 1]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: index for index, name in enumerate([*alphabet, "ab", "Ġa", "no byte: \N{SNOWMAN}"])}
    made = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def fallback(*more: str) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "ab", "▁▁", "日", *more]
    vocab = {name: index for index, name in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made


@pytest.mark.parametrize("make", [byte_level, fallback])
def test_tokens_are_those_that_llguidance_reads_itself(make: Callable[[], Tokenizer]) -> None:
    made = make()
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("[END]")])
    made.add_tokens([AddedToken(each, special=False) for each in ("<think>", "日本", "a b", "▁▁")])
    size = made.get_vocab_size(with_added_tokens=True) + 3
    theirs = LLTokenizer(made.to_str(), n_vocab=size, eos_token=EOS)
    told = TokenBytes.of(made, size)
    assert told is not None
    tokens = [each.decode("latin-1") for each in told.tokens]
    described = {"tokens": tokens, "special_ids": told.special_ids, "eos_token": EOS}
    ours = open_tokenizer(described, lambda text: made.encode(text, add_special_tokens=False).ids)
    assert (ours.vocab_size, ours.eos_tokens, ours.is_canonical) == (size, EOS, True)
    for token in range(size):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token])
        assert ours.is_special_token(token) == theirs.is_special_token(token)
    for text in TEXTS:
        assert ours.tokenize_str(text) == theirs.tokenize_str(text)
    assert ours.tokenize_bytes(b"ab\xe6\x97") == theirs.tokenize_bytes(b"ab\xe6\x97")
    assert open_tokenizer(described).decode_bytes(open_tokenizer(described).tokenize_str("ab a")) == b"ab a"


def test_rules_that_llguidance_changes_in_its_copy_are_left_to_it(tmp_path: Path) -> None:
    make_llama2_like(tmp_path)  # a space precedes each text
    tokenizer = ModelTokenizer(tmp_path)
    assert TokenBytes.of(tokenizer.backend, 300) is None
    assert TokenBytes.of(fallback("<0xZZ>"), 300) is None
    assert TokenBytes.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), 1) is None
    loaded = Vocabulary(tokenizer, tokenizer.backend.get_vocab_size(with_added_tokens=True), [2]).load()
    assert loaded is not None


def test_a_vocabulary_without_end_tokens_is_read_whole() -> None:
    vocabulary = Vocabulary(ModelTokenizer(find_model("bundled")), 264, [])
    assert vocabulary.load() is not None
    assert b'"tokenizer"' in vocabulary.description
    assert b'"tokens"' not in vocabulary.description


def test_a_loaded_vocabulary_is_freed_with_its_last_user() -> None:
    vocabulary = Vocabulary(ModelTokenizer(find_model("bundled")), 264, [0])
    loaded, seen = vocabulary.load(), weakref.ref(vocabulary)
    assert loaded is not None
    assert b'"tokens"' in vocabulary.description
    assert loaded.decode_bytes(loaded.tokenize_str("ab a")) == b"ab a"
    del vocabulary, loaded
    gc.collect()
    assert seen() is None
