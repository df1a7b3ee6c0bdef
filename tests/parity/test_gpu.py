"""On a GPU: the bundled model's greedy tokens are those of float32 on the CPU, and logits are those of transformers.

Bfloat16 may decide otherwise where two tokens are nearly equally likely, so tokens are compared up to the first such
place. The comparison of logits also runs on a CPU, which shows that its tolerance is the number format's.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.config import AttentionBackend, DType
from chairlift.models import load_backend, load_model, open_checkpoint
from chairlift.models.attention import BatchMetadata
from chairlift.models.decoder import Decoder
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.gguf_files import Kind, write_model
from tests.support.gpu import GPU_MARKS, needs_gpu, needs_package

NUM_TOKENS = 24
NEAR_TIE = 0.3  # between the logarithms of two probabilities
SLOT_LEN = 256
QUESTIONS = [
    "What is 12 + 30?",
    "What is 81 - 17?",
    "Spell the word garden.",
    "Reverse the word stone.",
    "How many letters are in the word window?",
    "What day comes after Tuesday?",
    "What is the opposite of hot?",
    "Hello!",
]
NEEDS_FLASH_ATTN = [*GPU_MARKS, needs_package("flash_attn")]
BACKENDS = [
    pytest.param("cpu", AttentionBackend.TORCH, id="cpu"),
    pytest.param("cuda", AttentionBackend.TORCH, id="torch", marks=GPU_MARKS),
    pytest.param("cuda", AttentionBackend.FLASH_ATTN, id="flash_attn", marks=NEEDS_FLASH_ATTN),
]


def answers(num_logprobs: int | None = None, **config: Any) -> list[Any]:
    """The bundled model's, a completion for each question."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=num_logprobs)
    with LLM(max_batch_size=4, max_seq_len=SLOT_LEN, **config) as llm:
        outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    return [output.outputs[0] for output in outputs]


def num_decided(completion: Any) -> int:
    """Tokens before the first that another was nearly as likely as."""
    for index, position in enumerate(completion.logprobs):
        best, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
        if best - second < NEAR_TIE:
            return index
    return len(completion.token_ids)


@needs_gpu
def test_in_float32_the_bundled_model_answers_as_on_the_cpu() -> None:
    expected = answers(device="cpu", dtype="float32")
    actual = answers(device="cuda:0", dtype="float32")
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]


@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=GPU_MARKS), pytest.param("flash_attn", marks=NEEDS_FLASH_ATTN)]
)
@pytest.mark.parametrize("num_steps", [1, 8])
def test_in_bfloat16_the_bundled_model_answers_as_in_float32_on_the_cpu(backend: str, num_steps: int) -> None:
    expected = answers(num_logprobs=2, device="cpu", dtype="float32")
    actual = answers(device="cuda:0", dtype="bfloat16", attention_backend=backend, max_steps_per_launch=num_steps)
    lengths = [num_decided(each) for each in expected]
    assert sum(lengths) > len(QUESTIONS)  # or else there would be nothing to compare
    for ours, theirs, length in zip(actual, expected, lengths, strict=True):
        assert ours.token_ids[:length] == theirs.token_ids[:length]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in groups of integers of 4 bits and of 8."""
    path = tmp_path_factory.mktemp("quantized")
    shape: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    kinds = {"down_proj": Kind.Q8_0, "": Kind.Q4_0}
    return write_model(make_checkpoint(path, **shape), path / "model.gguf", kinds)


def prompt_logprobs(path: Path, **config: Any) -> torch.Tensor:
    """Scores random tokens: float32 `[T]`."""
    (prompt,) = random_prompts(0, [120])
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    limits: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": SLOT_LEN}
    with LLM(str(path), tokenizer="bundled", device="cuda:0", **limits, **config) as llm:
        assert llm.config.keeps_groups == (llm.config.dtype is DType.BFLOAT16)
        (output,) = llm.generate([prompt], params)
    assert output.prompt_logprobs is not None
    scored = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token].logprob for token, entry in scored if entry is not None])


@needs_gpu
@pytest.mark.parametrize("num_tokens", [4, 16, 48, 256])  # of a step: in kernels, but for the last
def test_quantized_weights_are_multiplied_as_they_are_stored(quantized: Path, num_tokens: int) -> None:
    exact = prompt_logprobs(quantized, dtype="float32")
    actual = prompt_logprobs(quantized, dtype="bfloat16", max_num_batched_tokens=num_tokens)
    assert len(actual) > 64
    assert exact.std() > 0.5  # or else the tolerance would mean nothing
    assert float((actual - exact).abs().mean()) < 0.05


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_logits_of_random_configurations_are_those_of_transformers(
    tmp_path: Path, seed: int, device: str, backend: AttentionBackend
) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3])
    saved = make_checkpoint(
        tmp_path,
        seed,
        torch.bfloat16,
        num_key_value_heads=num_kv_heads,
        num_attention_heads=num_kv_heads * rng.choice([1, 2, 4]),
        head_dim=rng.choice([64, 128]),
        hidden_size=rng.choice([64, 128]),
        num_hidden_layers=rng.choice([1, 2, 3]),
        tie_word_embeddings=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
    )
    prompts = random_prompts(seed, [rng.randint(2, 60) for _ in range(3)])
    model = load_model(open_checkpoint(str(tmp_path)), DType.BFLOAT16, device, SLOT_LEN)
    ours = last_logits(model, prompts, backend, torch.device(device))
    theirs = reference_logits(saved, prompts)
    assert theirs.std() > 0.1  # or else the tolerance would mean nothing
    torch.testing.assert_close(ours.cpu(), theirs, rtol=3e-2, atol=5e-2)


EXPERTS: dict[str, dict[str, Any]] = {  # all of which are chosen, since a choice may tip with rounding
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4},
}


@pytest.mark.parametrize(("device", "backend"), BACKENDS[:2])
@pytest.mark.parametrize("family", EXPERTS)
def test_logits_of_experts_and_sinks_are_those_of_transformers(
    tmp_path: Path, family: str, device: str, backend: AttentionBackend
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    shape = {"head_dim": 64, "rope_parameters": rope, **EXPERTS[family]}
    saved = make_checkpoint(tmp_path, 0, torch.bfloat16, model_type=family, **shape)
    prompts = random_prompts(0, [50, 3, 17])
    model = load_model(open_checkpoint(str(tmp_path)), DType.BFLOAT16, device, SLOT_LEN)
    ours = last_logits(model, prompts, backend, torch.device(device))
    theirs = reference_logits(saved, prompts)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours.cpu(), theirs, rtol=3e-2, atol=5e-2)


@torch.inference_mode()
def last_logits(
    model: Decoder, prompts: list[list[int]], backend: AttentionBackend, device: torch.device
) -> torch.Tensor:
    """float32 `[B, vocab]` of each prompt's last token; all that come before it were prefilled in one batch."""
    config = model.config
    kept = config.kept(DType.BFLOAT16)
    cache = ContinuousBatchingKVCacheManager(kept, len(prompts), SLOT_LEN, config.num_layers, [device])
    attention = load_backend(backend, config, torch.bfloat16, device)
    slots = cache.claim(len(prompts))[::-1]
    for part in ([prompt[:-1] for prompt in prompts], [prompt[-1:] for prompt in prompts]):
        cached, new = [cache.cache_length_of(slot) for slot in slots], [len(tokens) for tokens in part]
        inputs = cache.fetch(slots, new)
        offsets = torch.tensor([0, *new]).cumsum(0).int()
        positions = [torch.arange(start, start + count) for start, count in zip(cached, new, strict=True)]
        batch = BatchMetadata(
            row_offsets=offsets.to(device),
            positions=torch.cat(positions).to(device),
            slots=tuple(slots),
            num_new_tokens=tuple(new),
            num_cached_tokens=tuple(cached),
            num_decode_rows=len(slots) if any(cached) else 0,
        )
        ids = torch.tensor([token for tokens in part for token in tokens], device=device)
        hidden = model(ids, batch.positions, attention.prepare(batch, inputs[0]))
        cache.step(new, inputs)
    return model.logits(hidden).float()


@torch.inference_mode()
def reference_logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """As `last_logits`, in float32 with the same weights."""
    exact: Any = model
    exact = exact.float()
    return torch.stack([exact(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])


@needs_gpu
def test_slots_are_counted_from_what_is_free_and_weights_need_no_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=64, num_attention_heads=4)
    (tmp_path / "model.safetensors").unlink()
    free_bytes, _ = torch.cuda.mem_get_info(0)
    with LLM(str(tmp_path), device="cuda:0", load_format="dummy", kv_cache_memory_bytes=free_bytes // 2) as llm:
        assert llm.config.max_batch_size == 256
        num_cache_bytes = llm.config.max_batch_size * llm.config.slot_len * 2 * 3 * 2 * 64 * 2
        assert num_cache_bytes < free_bytes / 2
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 5
