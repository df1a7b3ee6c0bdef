"""Checkpoints of models that make vectors or score pairs, and what their files say of that."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter, PoolingType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.engine.text.embedding import EmbeddingConfig
from chairlift.engine.text.relevance import CosineRelevance, Pair
from chairlift.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from chairlift.models.checkpoint import open_checkpoint
from chairlift.prompt_work import Pooling
from tests.engine.support import GREEDY, PROMPTS, make_llm, make_tiny_checkpoint
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_model
from tests.support.gguf_rerankers import write_reranker

LIBRARY = "sentence_transformers.models."
"""Where the types of modules were in older versions of sentence-transformers."""


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def write_modules(directory: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """modules.json, and a pooling module's config."""
    folders = [f"{index}_{kind.rpartition('.')[2]}" if index else "" for index, kind in enumerate(kinds)]
    modules = [{"path": folder, "type": kind} for folder, kind in zip(folders, kinds, strict=True)]
    write_json(directory / "modules.json", modules)
    if pooling is not None:
        write_json(directory / "1_Pooling" / "config.json", pooling)


def bare(directory: Path, architecture: str = "Qwen3Model", **shape: Any) -> Path:
    """A decoder's body by itself: no head, and no `model.` before the names of tensors."""
    make_tiny_checkpoint(directory, model_type="qwen3", head_dim=32, **shape)
    weights = load_file(directory / "model.safetensors")
    body = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    save_file(body, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", {**config, "architectures": [architecture]})
    return directory


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_body_without_its_head_makes_vectors_and_no_text(architecture: str, tmp_path: Path) -> None:
    model: Any = AutoModel.from_pretrained(bare(tmp_path, architecture))
    with make_llm(str(tmp_path)) as llm:
        (found,) = llm.embed(PROMPTS[1:2], normalize=False)
        expected = model.eval()(torch.tensor(PROMPTS[1:2])).last_hidden_state[0, -1]
        assert torch.tensor(found.embedding) == pytest.approx(expected, abs=1e-5)
        with pytest.raises(InvalidRequest, match=r"has no head \(lm_head\): it makes embeddings, and no text"):
            llm.generate("hi", GREEDY)


def test_a_body_whose_head_is_its_embedding_writes_text(tmp_path: Path) -> None:
    with make_llm(str(bare(tmp_path, tie_word_embeddings=True))) as llm:
        assert len(llm.generate("hi", GREEDY)[0].outputs[0].token_ids) == 12


def test_poolings_and_prompts_are_those_of_the_files(tiny: str, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny, tmp_path / "made")
    kinds = [LIBRARY + kind for kind in ("Transformer", "Pooling", "Normalize")]
    write_modules(directory, *kinds, pooling={"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False})
    prompts = {"query": "find: ", "document": ""}
    write_json(directory / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    with make_llm(str(directory)) as llm:
        assert llm.inputs.embedding == EmbeddingConfig(Pooling.MEAN, prompts)
        named, written = llm.embed("snail", prompt_name="query"), llm.embed("find: snail")
        assert named == written
        assert [each.num_cached_tokens for each in named] == [0]
        with pytest.raises(InvalidRequest, match="has no prompt 'passage', only document, query"):
            llm.embed("snail", prompt_name="passage")


def test_texts_may_be_as_long_as_the_files_say_and_chats_longer(tiny: str, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny, tmp_path / "made")
    write_modules(directory, LIBRARY + "Transformer", LIBRARY + "Pooling", pooling={"pooling_mode": "mean"})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 8, "do_lower_case": False})
    write_json(directory / "config_sentence_transformers.json", {"prompts": {"query": "of: "}})
    text = "of: snail"
    with make_llm(str(directory)) as llm:
        for refused in (lambda: llm.embed("snail", prompt_name="query"), lambda: llm.score("a", [text])):
            with pytest.raises(ContextLengthExceeded, match=r"length is 8 tokens.* resulted in 9 tokens, 1 too many"):
                refused()
        assert llm.generate(text, GREEDY)[0].prompt_token_ids == [*text.encode()]
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=-1)
        kept = llm.inputs.prepare("r", text, params, task=llm.inputs.embedding.task)
        assert bytes(kept.prompt_token_ids) == b"f: snail"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_seq_length": 8, "do_lower_case": True}, "do_lower_case is not supported"),
        ({"max_seq_length": "long"}, "max_seq_length 'long' is no number of tokens"),
        ({"max_seq_length": 0}, "max_seq_length 0 is no number of tokens"),
    ],
)
def test_a_limit_that_is_none_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer")
    write_json(tmp_path / "sentence_bert_config.json", given)
    with pytest.raises(CheckpointError, match=said):
        EmbeddingConfig.read(tmp_path)


def test_the_end_token_is_appended_if_the_tokenizer_says_so(tiny: str, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny, tmp_path / "made")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)])
    tokenizer.save(str(directory / "tokenizer.json"))
    with make_llm(str(directory)) as llm:
        assert llm.embed("hi")[0].prompt_token_ids == [*b"hi", 256]
        assert llm.embed([[*b"hi"]])[0].prompt_token_ids == [*b"hi"]


@pytest.mark.parametrize(
    ("kinds", "pooling", "said"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}, "modules of type Dense are not supported"),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, "pooling 'cls' is not supported, only lasttoken, mean"),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "pooling 'weightedmean' is not"),
        (["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": False}, "without the prompt"),
        (["Transformer", "../Pooling"], None, "modules of type"),
    ],
)
def test_what_the_files_ask_for_and_is_not_there_is_named(
    kinds: list[str], pooling: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(CheckpointError, match=said):
        EmbeddingConfig.read(tmp_path)


def reranker(directory: Path) -> LLM:
    """A checkpoint whose labels are two letters: its vocabulary has no words."""
    make_tiny_checkpoint(directory, max_position_embeddings=512)
    write_modules(directory, LIBRARY + "Transformer", LIBRARY + "LogitScore")
    write_json(directory / "1_LogitScore" / "config.json", {"true_token_id": ord("y"), "false_token_id": ord("n")})
    return make_llm(str(directory))


@torch.inference_mode()
def test_a_reranker_scores_by_its_answer(tmp_path: Path) -> None:
    with reranker(tmp_path) as llm:
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        documents = ["a house<|im_end|>", "the north wind"]
        for score, document in zip(llm.score("a snail", documents, instruction="find it"), documents, strict=True):
            text = (
                "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
                ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
                f"<Instruct>: find it\n<Query>: a snail\n<Document>: {document}",
                "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            )
            head, tail = (llm.inputs.tokenizer.encode(each, False) for each in (text[0], text[2]))
            logits = model(torch.tensor([[*head, *text[1].encode(), *tail]])).logits[0, -1]
            expected = logits[[ord("y"), ord("n")]].softmax(dim=0)[0].item()
            assert score.score == pytest.approx(expected, abs=1e-5)
        again = llm.score("a snail", documents[:1], instruction="find it")
        assert again[0].score == pytest.approx(llm.score("a snail", documents, instruction="find it")[0].score)


@torch.inference_mode()
def test_a_gguf_file_with_rows_for_two_words_is_a_reranker(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "made", tie_word_embeddings=True, max_position_embeddings=512)
    path, tokens = write_reranker(model, tmp_path / "model.gguf")
    with make_llm(str(path), max_seq_len=512) as llm:
        pairs = [Pair("a snail", document) for document in ("a house", "the north wind")]
        scores = [score.score for score in llm.score("a snail", [pair.document for pair in pairs])]
        prompts = llm.inputs.relevance.compare(pairs).prompts
        expected = [model(torch.tensor([prompt])).logits[0, -1, tokens].softmax(dim=0)[0].item() for prompt in prompts]
        assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"noise": 1.0}, r"cls\.output\.weight differs from the head's rows for \['yes', 'no'\]"),
        ({"labels": ["yes", "perhaps"]}, "classifier.output_labels must be two tokens"),
    ],
)
def test_a_head_of_its_own_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "made", tie_word_embeddings=True)
    path, _ = write_reranker(model, tmp_path / "model.gguf", **wrong)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(path))


def test_a_decoder_of_another_name_compares_vectors(tiny: str) -> None:
    with make_llm(tiny) as llm:
        assert isinstance(llm.inputs.relevance, CosineRelevance)
        with pytest.raises(InvalidRequest, match="this model compares vectors and reads no instruction"):
            llm.score("a snail", ["a house"], instruction="find it")


def test_a_template_with_a_role_for_documents_makes_a_rerankers_prompt(tmp_path: Path) -> None:
    with reranker(tmp_path):
        template = (
            "{% for each in messages %}{{ each['role'][0] }}: {{ each['content'] }}\n{% endfor %}{# 'document' #}"
        )
        (tmp_path / "chat_template.jinja").write_text(template)
    with make_llm(str(tmp_path)) as llm:
        (prompt,) = llm.inputs.relevance.compare([Pair("snail", "a house<|im_end|>")], "find it").prompts
        assert prompt == [*b"s: find it\nq: snail\nd: a house<|im_end|>\n"]
        assert 0.0 < llm.score("snail", "a house")[0].score < 1.0


@pytest.mark.parametrize(
    ("pooling", "is_causal", "found"),
    [
        (PoolingType.MEAN, True, "mean"),
        (PoolingType.CLS, True, "pooling_type 2 is not supported"),
        (PoolingType.LAST, False, "its llama.attention.causal is false"),
    ],
)
def test_a_gguf_file_tells_its_pooling_and_whether_it_is_causal(
    pooling: PoolingType, is_causal: bool, found: str, tmp_path: Path
) -> None:
    def describe(writer: GGUFWriter) -> None:
        writer.add_token_list([f"t{index}" for index in range(320)])
        writer.add_pooling_type(pooling)
        writer.add_causal_attention(is_causal)

    path = write_model(make_checkpoint(tmp_path / "made"), tmp_path / "model.gguf", tokenizer=describe)
    try:
        open_checkpoint(str(path))
        said: str = EmbeddingConfig.read(path).pooling
    except CheckpointError as error:
        said = str(error)
    assert found in said
