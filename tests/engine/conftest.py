"""Fixtures of the engine's tests."""

import pytest

from chairlift.engine.tokenizer import Tokenizer
from tests.engine.support import make_tiny_checkpoint
from tests.engine.tokenizers_made import make_byte_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny random checkpoint with a byte tokenizer."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and three special tokens."""
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte_tokenizer"))
