"""A real model answers, and computes what transformers computes of the same checkpoint.

The perplexity is that of tests/parity/prose.txt, about a thousand words that were written for this test; for 8 bits
also that of manual.txt, a part of this project's documents as they once were.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from chairlift import LLM, SamplingParams
from chairlift.models import open_checkpoint
from chairlift.models.checkpoint import find_model
from chairlift.models.gguf import open_gguf
from chairlift.models.gguf.families import describe_gguf
from tests.support.gguf_files import Kind, write_model
from tests.support.kernels import needs_kernels
from tests.support.server_process import SERVE, running

PROSE, MANUAL = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("prose.txt", "manual.txt"))

FRANCE = "What is the capital of France?"
ENGINE: dict[str, Any] = {"max_batch_size": 10, "max_seq_len": 1280, "max_num_batched_tokens": 512}
NUM_TOKENS = 600  # of the beginning of the prose: float32 needs no more
# What transformers has in float32 when it reads the GGUF file itself, and of that beginning with the same numbers.
PERPLEXITY_OF_THE_FILE, PERPLEXITY_OF_THE_BEGINNING = 22.8196, 24.92044
# What we have of both texts with the same weights in Q8_0, dequantized: `dtype="float32"`.
PERPLEXITIES_OF_Q8_0 = (22.8977, 38.2042)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the numbers that the file's integers stand for.

    Bit for bit what transformers reads of the file (tests/models/test_checkpoint.py), for which it wants accelerate.
    """
    directory = tmp_path_factory.mktemp("smollm2")
    weights = open_checkpoint("smollm2").open_weights()
    tensors = {name: weights.read(name) for name in weights.tensors}
    exact = {name: each if isinstance(each, torch.Tensor) else each.dequantize() for name, each in tensors.items()}
    save_file(exact, directory / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(**describe_gguf(open_gguf(find_model("smollm2")))).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["torch", pytest.param("cpu", marks=needs_kernels)])
def exact(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", attention_backend=request.param, **ENGINE) as llm:
        assert not llm.config.keeps_groups
        yield llm


@pytest.fixture(scope="module")
def served() -> Iterator[LLM]:
    """As everyone gets it."""
    with LLM("smollm2", **ENGINE) as llm:
        yield llm


@torch.inference_mode()
def perplexity_in_transformers(directory: Path, token_ids: list[int]) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor(token_ids)
    logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])
    return math.exp(-logprobs.mean().item())


@pytest.fixture(scope="module")
def reference(numbers: Path, served: LLM) -> float:
    """Returns what transformers makes of the beginning."""
    return perplexity_in_transformers(numbers, served.inputs.tokenize(PROSE)[:NUM_TOKENS])


def perplexity(llm: LLM, token_ids: list[int]) -> float:
    """By `prompt_logprobs`; the first token has no probability."""
    (output,) = llm.generate([token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
    logprobs = [entry[token].logprob for token, entry in pairs if entry is not None]
    assert len(logprobs) == len(token_ids) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.slow  # as the next: test_families shows it of small models
def test_perplexity_in_float32_is_that_of_transformers_and_of_the_file(exact: LLM, reference: float) -> None:
    ours = perplexity(exact, exact.inputs.tokenize(PROSE)[:NUM_TOKENS])
    assert ours == pytest.approx(reference, rel=1e-5)
    assert ours == pytest.approx(PERPLEXITY_OF_THE_BEGINNING, rel=1e-5)


@pytest.mark.slow
def test_as_everyone_gets_it_it_has_nearly_the_perplexity_of_float32(served: LLM) -> None:
    """Kernels multiply the integers of the file; torch has their numbers."""
    assert served.config.dtype == "bfloat16"
    assert served.config.keeps_groups == (served.config.attention_backend == "cpu" or served.config.has_own_kernels)
    assert perplexity(served, served.inputs.tokenize(PROSE)) == pytest.approx(PERPLEXITY_OF_THE_FILE, rel=3e-3)


def test_an_answer_ends_with_its_turn_and_is_sampled_as_the_models_card_has_it(served: LLM) -> None:
    assert served.inputs.default_params == SamplingParams(temperature=0.2, top_p=0.9)
    (output,) = served.chat([{"role": "user", "content": FRANCE}], SamplingParams(temperature=0, max_tokens=20))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.slow  # the test before shows it without a server, and servers have tests of their own
def test_the_server_knows_the_capital_of_france() -> None:
    with (
        running(SERVE, "smollm2", "--max-batch-size", "2") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        assert [model.id for model in client.models.list()] == ["smollm2"]
        ask = partial(client.chat.completions.create, model="smollm2", messages=[{"role": "user", "content": FRANCE}])
        for temperature in (0.0, openai.omit):  # the latter is the model's own
            reply = ask(temperature=temperature, seed=1)
            assert reply.choices[0].message.content == "The capital of France is Paris."
            assert reply.choices[0].finish_reason == "stop"


# With 1,200 tokens a perplexity is uncertain by 0.3 %: so much lies between two ways to round that are equally good.
# Of Q8_0 against bfloat16, 10,000 tokens say 0.20 % (+- 0.06): 0.21 % is the format's own, which rounds once more what
# this model's file has rounded to 4 bits, and 0.04 % the products'. So what is asserted is what the products cost.


FACTS = {
    FRANCE: "The capital of France is Paris.",
    "Who was Marie Curie?": "Marie Curie was a Polish-French chemist and physicist who dedicated her life to",
    "What is 12 + 30?": "12 + 30 = 32",  # the model cannot add, in any format
    "Give me three tips for better sleep.": "1. **Avoiding Caffeine",
    "Explain to a child what a battery does.": "A battery is like a",
}

BRIEFLY = SamplingParams(temperature=0.0, max_tokens=20)


def load(checkpoint: Path, quantization: str | None) -> LLM:
    fields: dict[str, Any] = {"tokenizer": "smollm2", "dtype": "bfloat16", "attention_backend": "cpu", **ENGINE}
    return LLM(str(checkpoint), quantization=quantization, **fields)


def perplexities_of(llm: LLM) -> list[float]:
    return [perplexity(llm, llm.inputs.tokenize(text)) for text in (PROSE, MANUAL)]


def ratios(llm: LLM, theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(perplexities_of(llm), theirs, strict=True)]


def assert_answers_alike(llm: LLM, num_others: int = 0) -> None:
    """All but so many begin as expected."""
    messages = [[{"role": "user", "content": question}] for question in FACTS]
    answers = [output.outputs[0].text for output in llm.chat(messages, BRIEFLY)]
    pairs = zip(answers, FACTS.values(), strict=True)
    others = [answer for answer, expected in pairs if not answer.startswith(expected)]
    assert len(others) <= num_others, others


def slow_on_kernels(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = needs_kernels(pytest.mark.slow(test))
    return marked


@pytest.fixture(scope="module")
def plain(numbers: Path) -> list[float]:
    with load(numbers, None) as llm:
        assert_answers_alike(llm)
        return perplexities_of(llm)


@slow_on_kernels
def test_8_bits_cost_little_and_answers_begin_alike(numbers: Path, plain: list[float]) -> None:
    with load(numbers, "int8") as llm:
        assert all(0.99 < ratio < 1.003 for ratio in ratios(llm, plain))  # chance may also gain
        assert_answers_alike(llm)


@slow_on_kernels
def test_products_with_integers_of_q8_0_cost_little_more_than_with_their_numbers(numbers: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(numbers, dtype=torch.float32)
    with load(write_model(model, tmp_path / "model.gguf", Kind.Q8_0), None) as llm:
        assert llm.config.keeps_groups
        assert ratios(llm, PERPLEXITIES_OF_Q8_0) == pytest.approx([1, 1], abs=2e-3)


@slow_on_kernels
def test_4_bits_cost_less_than_q4_0_of_the_same_weights(numbers: Path, tmp_path: Path, plain: list[float]) -> None:
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    weights = load_file(numbers / "model.safetensors")
    for name, weight in weights.items():
        if "_proj." in name:
            values = gguf.dequantize(gguf.quants.quantize(weight.to(torch.bfloat16).float().numpy(), q4_0), q4_0)
            weights[name] = torch.from_numpy(values)
    (tmp_path / "config.json").write_bytes((numbers / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with load(tmp_path, None) as llm:
        of_q4_0 = perplexity(llm, llm.inputs.tokenize(PROSE))
    assert of_q4_0 > 1.05 * plain[0]
    with load(numbers, "int4") as llm:
        assert perplexity(llm, llm.inputs.tokenize(PROSE)) == pytest.approx(plain[0], rel=2e-2)
        # The numbers had 4 bits before, of which 6 without offsets keep less than 4: two answers go on in another way.
        assert_answers_alike(llm, num_others=2)
