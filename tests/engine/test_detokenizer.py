"""From tokens to text: the bytes behind tokens of every kind of tokenizer, and texts that grow token by token."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift import SamplingParams
from chairlift.engine.text.detokenizer import Detokenizer
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.text.tokenizer import Tokenizer, Vocabulary
from chairlift.models.checkpoint import find_model
from tests.engine.async_support import DEADLINE_S
from tests.engine.support import END_TOKEN, VOCAB_SIZE, make_tiny_checkpoint, resolved_config
from tests.engine.tokenizers_made import (
    make_byte_level_bpe,
    make_byte_tokenizer,
    make_llama2_like,
    make_metaspace_unigram,
)

HALF = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def llama2_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_llama2_like(tmp_path_factory.mktemp("llama2_like"))


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    vocabulary = tokenizer.backend.get_vocab()
    return [vocabulary[name] for name in names]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    """The piece of each output token, and what `finish` gives at the end, once."""
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [*(detokenizer.push(token) for token in output), detokenizer.finish()]
    assert detokenizer.finish() == ""
    return pieces


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """What decoding all at once adds to the prompt's text."""
    return tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


@given(output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
@example(output=[0xE2, 0x82])
@example(output=[0xF0, 0x9F, 0x98, ord("x"), 0xF0, 0x9F])
@example(output=[0x80] * 30 + [0xF0, 0x9F, 0x98, 0x80, ord("x")])
@example(output=[0x80] * 100 + [0xE2, 0x82])
@example(output=list(f"a genuine {HALF} stays{HALF}".encode()))
@example(output=list((10 * HALF + "€ after many of them").encode()))
def test_bytes_that_are_no_text_are_decoded_as_all_at_once(byte_tokenizer: Tokenizer, output: list[int]) -> None:
    assert "".join(stream(byte_tokenizer, [], output)) == byte_tokenizer.decode(output)


@pytest.mark.parametrize(
    ("prompt", "output", "pieces"),
    [
        (b"", [*"a€😀".encode()], ["a", "", "", "€", "", "", "", "😀", ""]),  # a character at its last byte
        (b"", [ord("a"), 0xE2, 0x82], ["a", "", "", HALF]),  # an unfinished one at the end
        ([END_TOKEN], [END_TOKEN, ord("a"), 257, ord("b"), 256], ["", "a", "", "b", "", ""]),  # no special token
        (b"", [ord("a"), 300, ord("b"), 319], ["a", "", "b", "", ""]),  # nothing of unknown ids
        (b"a\xe2\x82", [*b"bc"], ["b", "c", ""]),  # what follows half a character
    ],
)
def test_a_token_brings(byte_tokenizer: Tokenizer, prompt: Sequence[int], output: list[int], pieces: list[str]) -> None:
    assert stream(byte_tokenizer, [*prompt], output) == pieces


@pytest.mark.parametrize("silent", [END_TOKEN, 10_000])  # a special token, and one that the tokenizer does not know
def test_a_long_run_of_tokens_that_are_not_written_costs_no_more_and_more(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    sizes: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        sizes.append(len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    assert "".join(stream(byte_tokenizer, [], [*b"a ", *[silent] * 1000, *b"b"])) == "a b"
    assert max(sizes) <= 40


def test_a_llama2_like_word_keeps_the_space_before_it_only_if_something_stands_there(llama2_like: Tokenizer) -> None:
    hill, end, the, begin = ids_of(llama2_like, "▁hill", "</s>", "▁the", "<s>")
    assert stream(llama2_like, [the], [hill, end, hill]) == [" hill", "", " hill", ""]
    for nothing in ([], [begin]):
        assert stream(llama2_like, nothing, [hill, hill]) == ["hill", " hill", ""]
    many_bytes = llama2_like.encode("語語語")  # nine; the last eight begin within a character
    assert stream(llama2_like, many_bytes, [hill]) == [" hill", ""]


def test_a_byte_that_makes_earlier_ones_invalid_does_not_stop_the_text(llama2_like: Tokenizer) -> None:
    output = ids_of(llama2_like, "<0x41>", "<0xE2>", "b", "▁the", "▁hill")
    text = "".join(stream(llama2_like, [], output))
    assert text.startswith("A")
    assert text.endswith("b the hill")


LLAMA2_PIECES = ["▁", "▁the", "▁▁", "▁▁▁▁", "s", "é", "\n", "本", "</s>"]
HIGH_BYTES = ["<0x80>", "<0x82>", "<0xAC>", "<0xC3>", "<0xE2>", "<0xF0>", "<0x9F>"]
LLAMA2_NAMES = st.lists(st.sampled_from(LLAMA2_PIECES + HIGH_BYTES), max_size=20)


@given(prompt=LLAMA2_NAMES, output=LLAMA2_NAMES)
@example(prompt=["▁the"], output=["<0xE2>", "<0x82>", "<0xAC>", "▁the"])
@example(prompt=[], output=["<0xC3>", "<0x80>", "<0x80>", "▁"])
@example(prompt=["<0xE2>", "<0x82>"], output=["<0xAC>", "s", "s", "s"])
def test_any_llama2_like_tokens_lose_no_letter_and_are_exact_if_they_make_characters(
    llama2_like: Tokenizer, prompt: list[str], output: list[str]
) -> None:
    ids = ids_of(llama2_like, *prompt), ids_of(llama2_like, *output)
    text = "".join(stream(llama2_like, *ids))
    if HALF not in llama2_like.decode(ids[0]) + llama2_like.decode(ids[0] + ids[1]):
        assert text == continuation(llama2_like, *ids)
    letters = "".join({"▁the": "the", "s": "s"}.get(name, "") for name in output)
    assert "".join(character for character in text if character in "thes") == letters


# --- vocabularies


SPELLED = ["the hill is high.", "naïve café", "日本語 \U0001f600", "a\n\t b  c", "\x00\x7f"]
READABLE = [make_byte_tokenizer, make_byte_level_bpe, make_llama2_like]
ALL = [*READABLE, make_metaspace_unigram]


def vocabulary_of(tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
    assert tokenizer.eos_token_id is not None
    return Vocabulary(tokenizer, size or len(tokenizer.backend.get_vocab()), [tokenizer.eos_token_id])


@pytest.mark.parametrize("make", READABLE)
@pytest.mark.parametrize("text", SPELLED)
def test_the_bytes_of_a_texts_tokens_are_the_text(tmp_path: Path, make: Callable[[Path], Tokenizer], text: str) -> None:
    tokenizer = make(tmp_path)
    vocabulary = vocabulary_of(tokenizer)
    spelled = b"".join(vocabulary.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False))
    assert spelled.removeprefix(b" ") == text.encode()  # Llama 2 writes a space before the first word


def test_the_bundled_models_tokens_are_bytes_and_names() -> None:
    """Also the byte 0xFF, which no UTF-8 holds: a prompt of token ids may, and the likeliest tokens may."""
    vocabulary = vocabulary_of(Tokenizer(find_model("bundled")), 261)
    names = [b"<|endoftext|>", b"<|im_end|>", b"<|system|>", b"<|user|>", b"<|assistant|>"]
    tokens = [vocabulary.token_bytes(token) for token in range(261)]
    assert tokens == [*(bytes([byte]) for byte in range(256)), *names]


def test_a_model_may_have_more_tokens_than_its_tokenizer_or_fewer(byte_tokenizer: Tokenizer) -> None:
    """Checkpoints round the number of rows up, and somebody may have added a padding token."""
    more, fewer = vocabulary_of(byte_tokenizer, 320), Vocabulary(byte_tokenizer, VOCAB_SIZE - 1, [0])
    assert more.token_bytes(258) == b"<|im_end|>"
    assert len(more.token_bytes(319)) > 0
    assert fewer.token_bytes(ord("a")) == b"a"


def test_a_vocabulary_that_several_threads_ask_for_at_once_is_loaded_once(byte_tokenizer: Tokenizer) -> None:
    vocabulary, gate = vocabulary_of(byte_tokenizer), Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(lambda _: (gate.wait(DEADLINE_S), vocabulary.load())[1], range(4))
    assert first is not None
    assert all(each is first for each in others)


@pytest.mark.parametrize("make", ALL)
def test_logprobs_can_be_asked_of_a_model_with_any_tokenizer(tmp_path: Path, make: Callable[[Path], Tokenizer]) -> None:
    make_tiny_checkpoint(tmp_path)
    inputs = InputProcessor(resolved_config(tmp_path), len(make(tmp_path).backend.get_vocab()))
    assert inputs.prepare("r", [5, 6], SamplingParams(logprobs=1)).params.logprobs == 1
