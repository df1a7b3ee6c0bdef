"""Models of random sizes with weights that are no numbers, too large or too small: sanitizers find nothing.

A file may hold any bits. What comes of them is what the kernels without sanitizers make of them, to the bit.
"""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from chairlift.models.blocks import Activation, Block, Norms, QKNorm
from chairlift.models.blocks.gated_delta_net import GatedDeltaNetBlock
from chairlift.models.blocks.gated_short_conv import GatedShortConvBlock
from chairlift.models.blocks.mamba2 import Mamba2Block
from chairlift.models.config import ModelConfig
from chairlift.models.cpu.packing import LANES
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedWeight
from tests.models.cpu import support, test_toolchains
from tests.models.cpu.standalone import compile_sanitized, kernels_of, need
from tests.support.forward_bench import NUM_SLOTS, Row, random_tokens
from tests.support.shapes import Positions

pytestmark = pytest.mark.slow

NUM_MODELS, NUM_RECURRENT = 12, 6
ISA = "avx2"
NO_NUMBERS = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38)  # and what becomes none in a product
MILD = (1e-45, -0.0, 1e-30, -1e3)
GROUP_SIZES = (32, 64, 96, 160)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    need("g++")
    path = tmp_path_factory.mktemp("sanitized") / "program"
    compile_sanitized("address,undefined,float-cast-overflow", ISA, path)
    return str(path)


def random_config(rng: Random) -> ModelConfig:
    kv_heads, head_dim = rng.randrange(1, 4), 32 * rng.randrange(1, 9)
    layers = [Positions(None, rng.choice((None, 1, 31, 2**31 - 1))) for _ in range(rng.randrange(1, 3))]
    fields: dict[str, Any] = {
        "vocab_size": rng.randrange(1, 300),
        "is_tied": rng.random() < 0.5,
        "norms": rng.choice(list(Norms)),
        "qk_norm": rng.choice(list(QKNorm)),
        "activation": rng.choice((Activation.SILU, Activation.GELU_TANH)),
        "softcap": rng.choice((None, 1e-30, 5.0)),
        "logits_softcap": rng.choice((None, 1e30)),
        "has_qkv_bias": rng.random() < 0.5,
        "has_bias": rng.random() < 0.5,
    }
    sizes = (rng.randrange(1, 200), rng.randrange(1, 300), kv_heads * rng.randrange(1, 5), kv_heads, head_dim)
    return support.shape(*sizes, layers=layers, **fields)


def with_recurrence(config: ModelConfig, rng: Random) -> ModelConfig:
    """The same model with a recurrent block of each kind in layers of their own, in any order."""
    heads, groups = rng.randrange(1, 4), rng.randrange(1, 3)
    sizes = [16 * rng.randrange(1, 6) for _ in range(4)]
    blocks: list[Block] = [
        GatedDeltaNetBlock(
            num_key_heads=heads,
            num_value_heads=heads * rng.randrange(1, 4),
            key_dim=sizes[0],
            value_dim=sizes[1],
            kernel_size=rng.randrange(2, 5),
            norm_eps=1e-5,
            has_tiled_heads=rng.random() < 0.5,
        ),
        Mamba2Block(
            num_heads=groups * heads,
            head_dim=sizes[2],
            num_groups=groups,
            state_size=sizes[3],
            kernel_size=rng.randrange(2, 5),
            norm_eps=1e-5,
            has_norm=rng.random() < 0.5,
            is_gated_last=rng.random() < 0.5,
            has_bias=rng.random() < 0.5,
        ),
        GatedShortConvBlock(num_features=16 * rng.randrange(1, 6), kernel_size=rng.randrange(2, 5)),
    ]
    layers = [*config.layers, *((block,) for block in blocks)]
    return replace(config, layers=tuple(rng.sample(layers, len(layers))))


def spoilt(config: ModelConfig, dtype: torch.dtype, rng: Random) -> Decoder:
    """A random model of which some weights are odd, and some products in groups with odd scales."""
    model, odd = support.make_model(config, dtype), rng.choice((MILD, NO_NUMBERS))
    for name, parameter in list(model.named_parameters()):
        flat = parameter.detach().view(-1)
        for _ in range(rng.randrange(3)):
            flat[rng.randrange(len(flat))] = rng.choice(odd)
        sizes = [size for size in GROUP_SIZES if parameter.dim() == 2 and parameter.shape[1] % size == 0]
        if sizes and model.is_product(name) and rng.random() < 0.5:
            groups = random_groups(parameter.shape[0], parameter.shape[1], rng.choice(sizes), odd, rng)
            model.load_weight(name, lambda groups=groups: groups)  # type: ignore[misc]
    return model


def random_groups(
    num_outputs: int, num_inputs: int, group_size: int, odd: tuple[float, ...], rng: Random
) -> GroupedWeight:
    num_bits = rng.choice((4, 8))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    values = torch.randint(0, 256, (num_outputs, num_inputs * num_bits // 8), generator=generator, dtype=torch.uint8)
    parts = [torch.randn(num_outputs, num_inputs // group_size, generator=generator) for _ in range(2)]
    for part in parts:
        part.view(-1)[rng.randrange(part.numel())] = rng.choice(odd)
    return GroupedWeight(num_bits, values if num_bits == 4 else values.view(torch.int8), *parts)


def computed(number: int, isa: str | None) -> list[torch.Tensor]:
    """Logits of a few steps of the model of that number, whose rows are random as well."""
    rng = Random(number)
    config, number_format = random_config(rng), rng.choice(support.FORMATS)
    if number >= NUM_MODELS:
        config = with_recurrence(config, rng)
    model = spoilt(config, number_format.dtype, rng)
    bench = support.cpu_bench(model, number_format, isa)
    logits = []
    with support.threads(rng.randrange(1, 4)):
        for _ in range(3):
            slots = rng.sample(range(NUM_SLOTS), rng.randrange(1, 4))
            counts = sorted(rng.choice((1, 2, LANES, 33, 100)) for _ in slots)
            vocabulary = config.vocab_size
            rows = [
                Row(slot, [token % vocabulary for token in random_tokens(rng, count)])
                for slot, count in zip(slots, counts, strict=True)
            ]
            logits += bench.run(rows)
    return logits


def test_most_models_have_logits_that_are_numbers() -> None:
    counts = [sum(bool(row.isfinite().any()) for row in computed(number, None)) for number in range(NUM_MODELS)]
    assert sum(count > 0 for count in counts) > NUM_MODELS // 3


def test_sanitizers_find_nothing_with_usual_weights(program: str) -> None:
    expected = test_toolchains.computed(ISA)
    with kernels_of(program):
        assert all(map(torch.equal, test_toolchains.computed(), expected))


@pytest.mark.parametrize("number", range(NUM_MODELS + NUM_RECURRENT))
def test_sanitizers_find_nothing_and_bits_are_the_same(program: str, number: int) -> None:
    expected = computed(number, ISA)
    with kernels_of(program):
        found = computed(number, None)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
