"""Fixtures of the engine's tests."""

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest

from chairlift import LLM, AsyncLLM
from chairlift.engine.text.grammar import GrammarCompiler
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.engine.text.vocabulary import Vocabulary
from tests.engine.async_support import Gate, hold_back, make_async_llm
from tests.engine.support import END_TOKEN, VOCAB_SIZE, assert_idle, make_llm, make_tiny_checkpoint
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.kernels import HAS_COMPILER


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny random checkpoint with a byte tokenizer."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with heads that the cpu backend takes, so that logits do not depend on the batch (batch_invariant)."""
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    return make_tiny_checkpoint(tmp_path_factory.mktemp("native"), head_dim=32)


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    """An engine that the tests of a module share: each leaves it idle."""
    with make_llm(tiny) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture
async def engine(tiny: str) -> AsyncIterator[AsyncLLM]:
    async with make_async_llm(tiny) as engine:
        yield engine


@pytest.fixture
def gate(engine: AsyncLLM) -> Iterator[Gate]:
    """The engine steps only when the gate allows it."""
    with hold_back(engine) as gate:
        yield gate


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and three special tokens."""
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte_tokenizer"))


@pytest.fixture
def compiler(byte_tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(Vocabulary(byte_tokenizer, VOCAB_SIZE, [END_TOKEN]))) as compiler:
        yield compiler
