"""Scores how relevant texts are to a query: by a reranker's answer, or by the angle between two vectors.

A reranker is a model that was trained to answer with one of two words whether a document fits a query. Its score is the
probability of the first word, if only these two can follow. A checkpoint of sentence-transformers' says that it is one
(LogitScore), and so does a GGUF file; Qwen3-Reranker's own is like any decoder's, so that its name tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Protocol

import numpy as np

from chairlift.engine.text.chat_template import ChatOptions
from chairlift.engine.text.defaults import read_json
from chairlift.engine.text.embedding import EmbeddingConfig, read_modules, vector_of
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import CheckpointError, InvalidRequest, shown
from chairlift.models.gguf import is_gguf, label_tokens, open_gguf
from chairlift.prompt_work import LabelLogits, LabelTask, PromptResult, PromptTask

_RERANKER = "reranker"
_YES, _NO = "yes", "no"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Pair:
    """A query, and a document that may fit it."""

    query: str
    document: str


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The score of a text: the higher, the better it fits the query. `LLM.score` says what it means."""

    score: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prompts that are computed for some pairs, and what makes a score for each pair of their results, in order."""

    prompts: list[str | list[int]]
    task: PromptTask
    scores: Callable[[Sequence[PromptResult | None]], list[float]]


class Relevance(Protocol):
    """A way to score pairs."""

    def compare(self, pairs: Sequence[Pair], instruction: str | None = None) -> Comparison:
        """Says what to compute for pairs. `instruction`: tells the model what fits; None: the usual one.

        InvalidRequest if the model reads none.
        """
        ...


@dataclass(frozen=True, slots=True)
class CosineRelevance:
    """Scores by the cosine of two vectors, those of a query and of a document, from -1 to 1."""

    embedding: EmbeddingConfig

    def compare(self, pairs: Sequence[Pair], instruction: str | None = None) -> Comparison:
        """See `Relevance`. Each text is computed once, whatever number of pairs it is in."""
        if instruction is not None:
            raise InvalidRequest("instruction: this model compares vectors and reads no instruction", "instruction")
        embedding = self.embedding
        queries = [embedding.with_first_of(pair.query, "query") for pair in pairs]
        documents = [embedding.with_first_of(pair.document, "document", "passage", "corpus") for pair in pairs]
        places = {text: place for place, text in enumerate(dict.fromkeys([*queries, *documents]))}

        def scores(results: Sequence[PromptResult | None]) -> list[float]:
            vectors = [vector_of(result).astype(np.float64) for result in results]
            return [
                float(np.clip(vectors[places[query]] @ vectors[places[document]], -1.0, 1.0))  # of rounded vectors
                for query, document in zip(queries, documents, strict=True)
            ]

        return Comparison(list(places), embedding.task, scores)


@dataclass(frozen=True, slots=True)
class LabelRelevance:
    """Scores by the probability of one word against another after a prompt, from 0 to 1."""

    tokenizer: Tokenizer
    yes: int
    no: int
    is_templated: bool  # the chat template has roles for queries and documents
    max_tokens: int

    def compare(self, pairs: Sequence[Pair], instruction: str | None = None) -> Comparison:
        """See `Relevance`."""
        prompts: list[str | list[int]] = [self._prompt(pair, instruction) for pair in pairs]
        return Comparison(prompts, LabelTask((self.yes, self.no)), _probabilities)

    def _prompt(self, pair: Pair, instruction: str | None) -> list[int]:
        if self.is_templated:
            messages = [{"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            return self.tokenizer.encode_chat(messages, ChatOptions(), self.max_tokens)
        wanted = _INSTRUCTION if instruction is None else instruction
        content = f"<Instruct>: {wanted}\n<Query>: {pair.query}\n<Document>: {pair.document}"
        before, after = (self.tokenizer.encode(each, add_special_tokens=False) for each in (_PREFIX, _SUFFIX))
        return [*before, *self.tokenizer.encode_literally(content, "documents", self.max_tokens), *after]


def _probabilities(results: Sequence[PromptResult | None]) -> list[float]:
    scores = []
    for result in results:
        assert isinstance(result, LabelLogits), "that is what a LabelTask ends with"
        yes, no = result.values
        scores.append(1 / (1 + exp(min(no - yes, 700.0))))
    return scores


def read_relevance(
    model: str, path: Path, tokenizer: Tokenizer, embedding: EmbeddingConfig, max_seq_len: int
) -> Relevance:
    """Finds out how the checkpoint at `path`, which the caller knows as `model`, scores pairs.

    CheckpointError if its files ask for what is not supported.
    """
    stated = _stated_labels(path)
    yes, no = stated or (tokenizer.backend.token_to_id(word) for word in (_YES, _NO))
    if (stated is None and _RERANKER not in f"{model}/{path.name}".lower()) or yes is None or no is None:
        return CosineRelevance(embedding)
    is_templated = stated is not None and '"document"' in tokenizer.chat_template.replace("'", '"')
    return LabelRelevance(tokenizer, yes, no, is_templated, max_seq_len)


def _stated_labels(path: Path) -> tuple[int, int] | None:
    """Returns the tokens of yes and of no that a checkpoint's files state; None: they state none."""
    if is_gguf(path):
        return label_tokens(open_gguf(path))
    folder = next((folder for kind, folder in read_modules(path) if kind == "LogitScore"), None)
    if folder is None:
        return None
    given = read_json(folder / "config.json")
    yes, no = given.get("true_token_id"), given.get("false_token_id")
    if type(yes) is not int or type(no) is not int:
        raise CheckpointError(f"{folder}: true_token_id {shown(yes)} and false_token_id {shown(no)} must be tokens")
    return yes, no
