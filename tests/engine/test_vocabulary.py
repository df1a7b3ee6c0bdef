"""The bytes behind tokens, for tokenizers of every kind that checkpoints bring."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import SamplingParams
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.text.tokenizer import Tokenizer, Vocabulary
from chairlift.models.checkpoint import find_model
from tests.engine.support import VOCAB_SIZE, make_tiny_checkpoint, resolved_config
from tests.engine.tokenizers_made import (
    make_byte_level_bpe,
    make_byte_tokenizer,
    make_llama2_like,
    make_metaspace_unigram,
)

TEXTS = ["the hill is high.", "naïve café", "日本語 \U0001f600", "a\n\t b  c", "\x00\x7f"]
READABLE = [make_byte_tokenizer, make_byte_level_bpe, make_llama2_like]
ALL = [*READABLE, make_metaspace_unigram]


def vocabulary_of(tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
    assert tokenizer.eos_token_id is not None
    return Vocabulary(tokenizer, size or len(tokenizer.backend.get_vocab()), [tokenizer.eos_token_id])


@pytest.mark.parametrize("make", READABLE)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_text(tmp_path: Path, make: Callable[[Path], Tokenizer], text: str) -> None:
    tokenizer = make(tmp_path)
    vocabulary = vocabulary_of(tokenizer)
    spelled = b"".join(vocabulary.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False))
    assert spelled.removeprefix(b" ") == text.encode()  # Llama 2 writes a space before the first word


def test_the_bundled_models_tokens_are_bytes_and_names() -> None:
    vocabulary = vocabulary_of(Tokenizer(find_model("bundled")), 261)
    assert [vocabulary.token_bytes(token) for token in range(255)] == [bytes([byte]) for byte in range(255)]
    assert [vocabulary.token_bytes(token) for token in range(256, 261)] == (
        [b"<|endoftext|>", b"<|im_end|>", b"<|system|>", b"<|user|>", b"<|assistant|>"]
    )


def test_the_byte_that_no_text_has_is_spelled_too() -> None:
    """No UTF-8 holds 0xFF, but a prompt of token ids may, and the likeliest tokens may."""
    assert vocabulary_of(Tokenizer(find_model("bundled")), 261).token_bytes(255) == b"\xff"


def test_tokens_that_the_model_has_beyond_its_tokenizers_are_spelled_somehow(byte_tokenizer: Tokenizer) -> None:
    """Checkpoints round the number of rows up."""
    vocabulary = vocabulary_of(byte_tokenizer, 320)
    assert vocabulary.token_bytes(258) == b"<|im_end|>"
    assert len(vocabulary.token_bytes(319)) > 0


def test_a_tokenizer_may_have_tokens_that_the_model_has_no_rows_for(byte_tokenizer: Tokenizer) -> None:
    """Such as a padding token that somebody added."""
    vocabulary = Vocabulary(byte_tokenizer, VOCAB_SIZE - 1, [0])
    assert vocabulary.token_bytes(ord("a")) == b"a"


def test_it_may_be_asked_from_several_threads_at_once(byte_tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(byte_tokenizer)
    loaded: list[int] = []
    threads = [threading.Thread(target=lambda: loaded.append(id(vocabulary.load()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 4
    assert len(set(loaded)) == 1


@pytest.mark.parametrize("make", ALL)
def test_logprobs_can_be_asked_of_a_model_with_any_tokenizer(tmp_path: Path, make: Callable[[Path], Tokenizer]) -> None:
    make_tiny_checkpoint(tmp_path)
    num_tokens = len(make(tmp_path).backend.get_vocab())
    inputs = InputProcessor(resolved_config(tmp_path), num_tokens)
    generation = inputs.prepare("r", [5, 6], SamplingParams(logprobs=1))
    assert generation.params.logprobs == 1
