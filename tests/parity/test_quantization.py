"""What 8 and 4 bits cost a real model, in the perplexity of tests/parity/prose.txt and in its answers.

With 1,300 tokens it is uncertain by 0.2 %: so much lies between two ways to round that are equally
good. On 10,000 tokens of other English text int8 was 0.24 % above bfloat16.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.models.checkpoint import find_directory
from tests.parity.test_smollm2 import ENGINE, PROSE, perplexity
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Who was Marie Curie?": "Marie Curie was a Polish-French chemist and physicist who dedicated her life to",
    "What is 12 + 30?": "12 + 30 = 32",  # the model cannot add, in any format
    "Give me three tips for better sleep.": "1. **Avoiding Caffeine",
    "Explain to a child what a battery does.": "A battery is like a",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def perplexity_of(model: str, quantization: str | None) -> float:
    with LLM(model, quantization=quantization, attention_backend="cpu", **ENGINE) as llm:
        return perplexity(llm, llm.inputs.tokenize(PROSE))


@pytest.fixture(scope="module")
def plain() -> float:
    return perplexity_of("smollm2", None)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 1.005), ("int4", 1.02)])
def test_perplexity_stays_near_that_of_bfloat16(quantization: str, most: float, plain: float) -> None:
    assert 0.995 * plain < perplexity_of("smollm2", quantization) < most * plain


@pytest.mark.slow
def test_int4_is_better_than_q4_0_of_the_same_weights(tmp_path: Path, plain: float) -> None:
    gguf = pytest.importorskip("gguf")
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    source = find_directory("smollm2")
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if "_proj." in name:
            values = gguf.dequantize(gguf.quants.quantize(weight.float().numpy(), q4_0), q4_0)
            weights[name] = torch.from_numpy(values).to(torch.bfloat16)
    for file in source.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    of_q4_0 = perplexity_of(str(tmp_path), None)
    assert perplexity_of("smollm2", "int4") < of_q4_0
    assert of_q4_0 > 1.05 * plain


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_questions_are_answered_alike(quantization: str | None) -> None:
    messages = [[{"role": "user", "content": question}] for question in FACTS]
    with LLM("smollm2", quantization=quantization, attention_backend="cpu", **ENGINE) as llm:
        answers = [output.outputs[0].text for output in llm.chat(messages, GREEDY)]
    for answer, expected in zip(answers, FACTS.values(), strict=True):
        assert answer.startswith(expected)
