"""GGUF files of rerankers, as llama.cpp's converter writes them: with the head's rows for two words as a tensor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, PoolingType
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer

from tests.support.gguf_files import Array, add_byte_level_tokenizer, write_model

_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""llama.cpp's words for Qwen3-Reranker."""


def add_small_tokenizer(writer: GGUFWriter) -> BackendTokenizer:
    """Bytes, the words "yes" and "no", and marks of turns."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=259, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["yes"] * 3 + ["no"] * 2, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    add_byte_level_tokenizer(writer, backend, "qwen2", 320, add_bos_token=False)
    writer.add_eos_token_id(backend.get_vocab()["<|im_end|>"])
    return backend


def write_reranker(
    model: Any, path: Path, labels: Sequence[str] = ("yes", "no"), noise: float = 0.0
) -> tuple[Path, list[int]]:
    """A model with a tied head as the file of a reranker, and its labels' tokens. `noise`: what is wrong with rows."""
    tokens: list[int] = []

    def describe(writer: GGUFWriter) -> None:
        backend = add_small_tokenizer(writer)
        tokens.extend(backend.get_vocab()[word] for word in ("yes", "no"))
        rows: Array = model.get_input_embeddings().weight.detach()[tokens].float().numpy()
        writer.add_tensor("cls.output.weight", rows + np.float32(noise))
        writer.add_pooling_type(PoolingType.RANK)
        writer.add_classifier_output_labels(labels)
        writer.add_chat_template([{"name": "rerank", "template": _TEMPLATE}])

    return write_model(model, path, tokenizer=describe), tokens
