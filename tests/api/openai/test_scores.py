"""The four lists of a completion's scores: as many alternatives as were asked for, each with a name of its own."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from chairlift.api.openai.scores import four_lists
from chairlift.api.replies.scores import scored
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import Logprob
from tests.engine.tokenizers_made import make_llama2_like, make_metaspace_unigram


@dataclass(frozen=True)
class Llama2Like:
    """A vocabulary that has each letter twice: as a piece, and as a byte."""

    ids: dict[str, int]
    vocabulary: Vocabulary

    def likeliest(self, *names: str, own: str) -> tuple[str, dict[str, float] | None]:
        """The name of the token `own`, and what stands beside it, if the likeliest tokens are these."""
        ranked = {self.ids[name]: Logprob(-float(rank), rank) for rank, name in enumerate(names, 1)}
        scores = {self.ids[own]: ranked.pop(self.ids[own], Logprob(-9.0, 9)), **ranked}
        lists = four_lists([scored(scores, len(names), 0, self.vocabulary)])
        return lists.tokens[0], lists.top_logprobs[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama2Like:
    tokenizer = make_llama2_like(tmp_path_factory.mktemp("llama2_like"))
    ids = tokenizer.backend.get_vocab()
    return Llama2Like(ids, Vocabulary(tokenizer, len(ids), [2]))


def test_tokens_that_are_parts_of_characters_are_named_by_their_bytes(model: Llama2Like) -> None:
    name, top = model.likeliest("<0xE6>", "<0x97>", "▁the", own="<0x97>")
    assert name == "bytes:\\x97"
    assert top == {"bytes:\\xe6": -1.0, "bytes:\\x97": -2.0, " the": -3.0}


def test_of_tokens_with_one_text_the_scored_one_is_named_by_it_and_else_the_likeliest(model: Llama2Like) -> None:
    assert model.likeliest("a", "<0x61>", own="b") == ("b", {"a": -1.0, "bytes:\\x61": -2.0, "b": -9.0})
    assert model.likeliest("a", "<0x61>", own="<0x61>") == ("a", {"bytes:\\x61": -1.0, "a": -2.0})
    assert model.likeliest("a", "b", own="<0x61>") == ("a", {"bytes:\\x61": -1.0, "b": -2.0, "a": -9.0})


def test_tokens_with_one_text_and_one_value_are_both_kept(model: Llama2Like) -> None:
    position = scored({model.ids[name]: Logprob(-1.0, 1) for name in ("a", "<0x61>", "b")}, 3, 0, model.vocabulary)
    assert four_lists([position]).top_logprobs == [{"a": -1.0, "bytes:\\x61": -1.0, "b": -1.0}]


def test_what_has_neither_text_nor_bytes_of_its_own_is_named_by_its_id(tmp_path: Path) -> None:
    """A model may have more tokens than its tokenizer."""
    vocabulary = Vocabulary(make_metaspace_unigram(tmp_path), 64, [2])
    position = scored({token: Logprob(-1.0, 1) for token in (60, 61, 62)}, 3, 0, vocabulary)
    assert four_lists([position]).top_logprobs == [{"": -1.0, "token_id:61": -1.0, "token_id:62": -1.0}]
