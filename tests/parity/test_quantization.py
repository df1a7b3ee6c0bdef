"""What 8 and 4 bits cost a real model, in the perplexity of tests/parity/prose.txt and in its answers.

With 1,300 tokens it is uncertain by 0.2 %: so much lies between two ways to round that are equally
good. On 10,000 tokens of other English text int8 was 0.24 % above bfloat16.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from tests.parity.test_smollm2 import ENGINE, PROSE, perplexity
from tests.support.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.slow]

FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Who was Marie Curie?": "Marie Curie was a Polish-French chemist and physicist who dedicated her life to",
    "What is 12 + 30?": "12 + 30 = 32",  # the model cannot add, in any format
    "Give me three tips for better sleep.": "1. **Avoiding Caffeine",
    "Explain to a child what a battery does.": "A battery is like a",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def load(checkpoint: Path, quantization: str | None) -> LLM:
    fields: dict[str, Any] = {"tokenizer": "smollm2", "dtype": "bfloat16", "attention_backend": "cpu", **ENGINE}
    return LLM(str(checkpoint), quantization=quantization, **fields)


def perplexity_of(llm: LLM) -> float:
    return perplexity(llm, llm.inputs.tokenize(PROSE))


def assert_answers_alike(llm: LLM) -> None:
    messages = [[{"role": "user", "content": question}] for question in FACTS]
    answers = [output.outputs[0].text for output in llm.chat(messages, GREEDY)]
    for answer, expected in zip(answers, FACTS.values(), strict=True):
        assert answer.startswith(expected)


@pytest.fixture(scope="module")
def plain(numbers: Path) -> float:
    with load(numbers, None) as llm:
        assert_answers_alike(llm)
        return perplexity_of(llm)


def test_8_bits_cost_little_and_answers_begin_alike(numbers: Path, plain: float) -> None:
    with load(numbers, "int8") as llm:
        assert perplexity_of(llm) == pytest.approx(plain, rel=5e-3)
        assert_answers_alike(llm)


def test_the_integers_of_the_file_cost_little_more_than_their_numbers(plain: float) -> None:
    with LLM("smollm2", attention_backend="cpu", **ENGINE) as llm:
        assert llm.config.keeps_groups
        assert perplexity_of(llm) == pytest.approx(plain, rel=3e-3)


def test_4_bits_cost_less_than_q4_0_of_the_same_weights(numbers: Path, tmp_path: Path, plain: float) -> None:
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    weights = load_file(numbers / "model.safetensors")
    for name, weight in weights.items():
        if "_proj." in name:
            values = gguf.dequantize(gguf.quants.quantize(weight.to(torch.bfloat16).float().numpy(), q4_0), q4_0)
            weights[name] = torch.from_numpy(values)
    (tmp_path / "config.json").write_bytes((numbers / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with load(tmp_path, None) as llm:
        of_q4_0 = perplexity_of(llm)
    assert of_q4_0 > 1.05 * plain
    with load(numbers, "int4") as llm:
        assert perplexity_of(llm) == pytest.approx(plain, rel=2e-2)
        assert_answers_alike(llm)
