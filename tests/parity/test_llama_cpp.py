"""llama.cpp's server as a judge of vectors, scores, and models of many kinds, with the same GGUF files.

It runs where `llama-server` is on the path, or where LLAMA_SERVER names it. Beside it lies `llama-quantize`, which
writes files of Q4_K and MXFP4.
"""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models, pre_tokenizers, trainers

from chairlift import LLM
from chairlift.config import DType
from chairlift.engine.text.splitting import SEQUENCES
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import CheckpointError
from chairlift.models import TorchForward, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.cpu import CpuDecoder
from chairlift.models.smollm2 import find_smollm2
from chairlift.prompt_work import Pooling
from tests.engine.tokenizers_made import CORPUS
from tests.parity.support import native_bench
from tests.parity.test_gemmas import MODELS as GEMMAS
from tests.support.checkpoints import SMALL, make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.gguf_files import add_byte_level_tokenizer, write_model
from tests.support.gguf_rerankers import add_small_tokenizer, write_reranker
from tests.support.kernels import needs_kernels

ENGLISH_AND_OTHERS = [
    "Don't stop: it's 12345 of 6789.5 km/h,  we'VE  been   there\n\n  twice\r\n",
    "日本語のテキスト、mixed中文wordsかな交じり。中文句子，第12章！ 한국어 문장도 있다. ㄅㄆㄇ",  # noqa: RUF001
    'def f(x):\n    return {"a": [x_1, x**2]}  # see https://example.org/a?b=c\n',
    "Ünïcödé façade naïve Straße ΑΒΓ αβγ Привет мир  ǅ",
    '  a 1  b22 333   4444 \t$x^2$... "quoted" (see: [1]) 50% — done…  ',
]
TEXTS = ["Snails carry their house.", "The wind comes from the north.", "a", "How are random numbers drawn? " * 8]
SERVER = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SERVER is None, reason="there is no llama-server on the path, and LLAMA_SERVER names none"),
]


def environment() -> dict[str, str]:
    """Variables of llama.cpp's programs, whose shared libraries may lie beside them."""
    assert SERVER is not None, "tests are skipped otherwise"
    folder, libraries = str(Path(SERVER).resolve().parent), os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{libraries}" if libraries else folder}


@contextmanager
def llama_server(file: Path, *flags: str) -> Iterator[str]:
    """Serves a file; its URL."""
    assert SERVER is not None, "tests are skipped otherwise"
    command = [SERVER, "--model", str(file), *flags, "--host", "127.0.0.1", "--port", "0", "--parallel", "1"]
    command += ["--ctx-size", "1024", "--batch-size", "1024", "--ubatch-size", "1024", "--no-webui"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as run:
        assert run.stdout is not None, "it is a pipe"
        log = []
        try:
            for line in run.stdout:
                log.append(line)
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(log[-20:]))
            yield found[1]
        finally:
            run.kill()


def ask(url: str, body: dict[str, Any]) -> Any:
    """The reply of an endpoint."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of Qwen3's family, also as a reranker, and SmolLM2 if it is installed."""
    directory = tmp_path_factory.mktemp("files")
    shape: Any = {"head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    model = make_checkpoint(directory / "made", model_type="qwen3", **shape)
    found = {"qwen3": write_model(model, directory / "qwen3.gguf", tokenizer=add_small_tokenizer)}
    found["reranker"], _ = write_reranker(model, directory / "scores.gguf")
    with suppress(CheckpointError):
        found["smollm2"] = find_smollm2()
    return found


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_vectors_are_those_of_llama_cpp(name: str, pooling: Pooling, files: dict[str, Path]) -> None:
    if name not in files:
        pytest.skip(f"{name} is not installed")
    with LLM(str(files[name]), max_batch_size=4, max_seq_len=512, kv_cache_memory_bytes=2**26) as llm:
        llm.inputs.embedding = replace(llm.inputs.embedding, pooling=pooling)
        ours = np.array([each.embedding for each in llm.embed(TEXTS)])
    with llama_server(files[name], "--embeddings", "--pooling", pooling.value) as url:
        data = ask(f"{url}/v1/embeddings", {"input": TEXTS, "model": "any"})["data"]
    theirs = np.array([each["embedding"] for each in sorted(data, key=lambda each: each["index"])])
    cosines = (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosines.min() >= 0.999, cosines


def test_scores_are_those_of_llama_cpp(files: dict[str, Path]) -> None:
    with LLM(str(files["reranker"]), max_batch_size=4, max_seq_len=1024, kv_cache_memory_bytes=2**26) as llm:
        ours = [each.score for each in llm.score(TEXTS[0], TEXTS)]
    with llama_server(files["reranker"], "--reranking") as url:
        results = ask(f"{url}/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "model": "any"})["results"]
    theirs = {each["index"]: each["relevance_score"] for each in results}
    assert [theirs[index] for index in range(len(TEXTS))] == pytest.approx(ours, abs=1e-3)


SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
MAMBA: dict[str, Any] = {"mamba_d_state": 64, "mamba_chunk_size": 16, "mamba_d_head": 64}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 64,
    },
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 8,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
    "falcon_h1": {**MAMBA, "head_dim": 64, "mamba_d_ssm": 256, "mamba_n_heads": 4},
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "head_dim": 64}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 1, "topk_group": 1},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "lfm2_moe": {
        **EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 24},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0},
}
OF_EXPERTS = "MXFP4_MOE"  # that type in experts, and Q8_0 elsewhere
OF_SEVERAL = "Q4_K_M"  # Q6_K for values and others of some layers
NUM_TOKENS = 32
END_TOKEN = 258  # which llama.cpp never says if it is told to ignore it


def add_words(writer: GGUFWriter) -> None:
    """Tokens that are words each: of bytes that make no character llama.cpp tells no log-probabilities."""
    words = [f"w{index}" for index in range(SMALL["vocab_size"])]
    words[-1] = words[-3] + words[-2]  # since a merge there must be
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.NORMAL] * len(words))
    writer.add_token_merges([f"{words[-3]} {words[-2]}"])
    writer.add_eos_token_id(END_TOKEN)
    writer.add_add_bos_token(False)


@torch.inference_mode()
def make_choices_clear(model: Any) -> None:
    """Has tokens mark the experts that they go to: where rounding tips a choice, everything behind it differs.

    Biases decide where a model has them: its head is tied, and would know tokens by their marks.
    """
    biases = [each for name, each in model.state_dict().items() if name.endswith("expert_bias")]
    if biases:
        for each in biases:
            each.copy_(torch.randperm(len(each)))
        return
    routers = [
        each for name, each in model.named_parameters() if re.search(r"\.(gate|router)(\.layer)?\.weight$", name)
    ]
    num_experts, hidden_size = routers[0].shape
    directions = torch.randn(num_experts, hidden_size)
    for router in routers:
        router.copy_(0.03 * directions)
    embedding = model.get_input_embeddings().weight
    marked = torch.rand(len(embedding), num_experts).topk(model.config.num_experts_per_tok).indices
    embedding += directions[marked].sum(dim=1) / getattr(model.config, "embedding_multiplier", 1)


@pytest.fixture(scope="module")
def quantized_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Writes a family's random weights as a file whose matrices are of a type, with llama.cpp's quantizer."""
    directory = tmp_path_factory.mktemp("quantized")
    quantizer = Path(SERVER or "").resolve().with_name("llama-quantize")

    def write(family: str, kind: str) -> Path:
        whole, file = directory / f"{family}.gguf", directory / f"{family}-{kind}.gguf"
        if not whole.exists():
            fields = (RECURRENT | MIXTURES)[family]
            model = make_checkpoint(directory / family, seed=3, model_type=family, **SIZES, **fields)
            if family in MIXTURES:
                make_choices_clear(model)
            write_model(model, whole, tokenizer=add_words)
        flags = [] if kind in (OF_EXPERTS, OF_SEVERAL) else ["--pure"]
        command: list[Path | str] = [quantizer, *flags, whole, file, kind, "1"]
        subprocess.run(command, check=True, capture_output=True, env=environment())
        return file

    if not quantizer.exists():
        pytest.skip("there is no llama-quantize beside llama-server")
    return write


def greedy_answer(url: str, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The likeliest tokens in llama.cpp, and the log-probabilities of all tokens in each place."""
    body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "samplers": ["top_k"], "top_k": 1}
    answer = ask(
        f"{url}/completion", {**body, "ignore_eos": True, "return_tokens": True, "n_probs": SMALL["vocab_size"]}
    )
    logprobs = torch.full((NUM_TOKENS, SMALL["vocab_size"]), torch.nan)
    for place, told in zip(logprobs, answer["completion_probabilities"], strict=True):
        for token in told["top_logprobs"]:
            place[token["id"]] = token["logprob"]
    return answer["tokens"], logprobs


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, kind) for family in RECURRENT for kind in ("Q8_0", "Q4_0", "Q4_K")),
        *((family, kind) for family in MIXTURES for kind in ("Q8_0", "Q4_K", OF_EXPERTS)),
        *(("qwen3_moe", kind) for kind in ("Q3_K", "Q5_K", "Q6_K", OF_SEVERAL)),
    ],
)
def test_models_are_as_near_as_llama_cpp_to_the_numbers_in_the_file(
    family: str, kind: str, quantized_file: Callable[[str, str], Path]
) -> None:
    """Both multiply by rounded activations, so the judge is the file's numbers in float32 and in torch."""
    file, (prompt,) = quantized_file(family, kind), random_prompts(7, [40], 256)
    with llama_server(file, "--threads", "1") as url:
        tokens, theirs = greedy_answer(url, prompt)
    opened, rows = open_checkpoint(str(file)), [Row(1, [*prompt, *tokens[:-1]])]
    plain = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    native = load_model(opened, DType.BFLOAT16, "cpu", SLOT_LEN, keeps_groups=True)
    benches = (
        Bench(plain.config, torch.float32, TorchForward(plain, TorchBackend(plain.config.attention))),
        Bench(native.config, torch.bfloat16, CpuDecoder(native, SLOT_LEN)),
    )
    exact, ours = (each.run(rows)[0][-NUM_TOKENS:].float().log_softmax(-1) for each in benches)
    their_error, our_error = (theirs - exact).abs(), (ours - exact).abs()
    assert their_error.mean() < 0.06 < 0.1 * exact.std()
    assert our_error.mean() < 1.1 * their_error.mean()
    exact[:, END_TOKEN] = ours[:, END_TOKEN] = -torch.inf
    first, second = exact.topk(2).values.T
    is_clear = first - second > 8 * their_error.mean()
    assert is_clear.sum() >= 5
    assert ours.argmax(-1)[is_clear].tolist() == torch.tensor(tokens)[is_clear].tolist()


@needs_kernels
@pytest.mark.parametrize("name", ["gemma 4 E4B", "gemma 4 12B", "gemma 4 26B-A4B"])
def test_gemmas_whose_layers_differ_are_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    """But for its GELU, which it looks up in a table of float16."""
    model = make_checkpoint(tmp_path, seed=3, max_position_embeddings=512, **GEMMAS[name])
    file, (prompt,) = write_model(model, tmp_path / "model.gguf", tokenizer=add_words), random_prompts(4, [40])
    exact = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
    with llama_server(file, "--threads", "1", *exact) as url:
        tokens, theirs = greedy_answer(url, prompt)
    ours = native_bench(file).run([Row(1, [*prompt, *tokens[:-1]])])[0][-NUM_TOKENS:].log_softmax(-1)
    ours[:, END_TOKEN] = theirs[:, END_TOKEN] = -torch.inf
    differences = (ours - theirs)[:, [token for token in range(SMALL["vocab_size"]) if token != END_TOKEN]].abs()
    assert differences.mean() < 1e-3
    first, second = ours.topk(2).values.T
    is_clear = first - second > 0.02
    assert is_clear.sum() >= NUM_TOKENS // 2
    assert ours.argmax(-1)[is_clear].tolist() == torch.tensor(tokens)[is_clear].tolist()


@pytest.mark.parametrize("rule", [*SEQUENCES, "llama-bpe", "qwen2"])
def test_texts_become_the_tokens_of_llama_cpp(rule: str, tmp_path: Path) -> None:
    """Merges are learned from the texts, so that where these are cut decides what is found."""
    texts = [*ENGLISH_AND_OTHERS, *CORPUS]
    backend = BackendTokenizer(models.BPE(ignore_merges=rule in ("glm4", "youtu", "llama-bpe")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # merges across all cuts
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts * 3, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    size = backend.get_vocab_size()
    model = make_checkpoint(tmp_path, model_type="qwen3", head_dim=32, vocab_size=size, eos_token_id=None)
    write = partial(add_byte_level_tokenizer, backend=backend, rule=rule, add_bos_token=False)
    file = write_model(model, tmp_path / "model.gguf", tokenizer=write)
    ours = Tokenizer(file)
    with llama_server(file) as url:
        for text in texts:
            assert ours.encode(text) == ask(f"{url}/tokenize", {"content": text})["tokens"], text
