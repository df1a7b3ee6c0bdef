"""Layers that differ in every field of their blocks, in native code, and layers that are run some at a time."""

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from chairlift.config import AttentionBackend, DType
from chairlift.models import find_obstacle
from chairlift.models.blocks import Activation, AttentionBlock, Block, DenseMLPBlock, Norms, QKNorm
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.rotary import RopeConfig
from tests.models.cpu import support
from tests.models.cpu.support import BASE, FLOAT32, cpu_bench, make_model
from tests.support.forward_bench import SLOT_LEN, Bench, Row, random_tokens
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

ROPES = (
    None,
    RopeConfig(10_000.0),
    RopeConfig(500_000.0),
    RopeConfig(1e4, parameters=(("partial_rotary_factor", 0.5),)),
)
STEPS = (((4, 1), (2, 17), (0, 140)), ((4, 1), (0, 1), (2, 130)), ((2, 1), (0, 1), (4, 1), (7, 30)), ((7, 1),))


def random_attention(rng: random.Random) -> AttentionBlock:
    num_kv_heads = rng.choice((1, 2, 3, 9))
    return AttentionBlock(
        num_heads=num_kv_heads * rng.choice((1, 2, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((32, 64, 96, 128)),
        scale=rng.choice((0.1, 0.15, 0.2)),
        rope=rng.choice(ROPES),
        window=rng.choice((None, 24, 130)),
        softcap=rng.choice((None, 3.0)),
        qk_norm=rng.choice(list(QKNorm)),
        has_qkv_bias=rng.choice((False, True)),
        has_output_bias=rng.choice((False, True)),
    )


def random_mlp(rng: random.Random) -> DenseMLPBlock:
    return DenseMLPBlock(
        intermediate_size=rng.randrange(20, 260),
        activation=rng.choice(list(Activation)),
        has_bias=rng.choice((False, True)),
    )


def random_model(seed: int) -> ModelConfig:
    """Four to seven layers: most attend first, some have one of the blocks only, or both in the other order."""
    rng = random.Random(seed)
    layers: list[tuple[Block, ...]] = []
    for _ in range(rng.randrange(4, 8)):
        attention, mlp = random_attention(rng), random_mlp(rng)
        layers.append(rng.choice([(attention, mlp), (attention, mlp), (attention,), (mlp,), (mlp, attention)]))
    layers.append((random_attention(rng), random_mlp(rng)))
    return replace(
        BASE,
        hidden_size=rng.randrange(40, 140),
        layers=tuple(layers),
        norms=rng.choice(list(Norms)),
        residual_scale=rng.choice((1.0, 0.5)),
    )


def logits_of(bench: Bench) -> torch.Tensor:
    rng = random.Random(0)
    rows = [[Row(slot, random_tokens(rng, count)) for slot, count in step] for step in STEPS]
    return torch.cat([logits for each in rows for logits in bench.run(each)])


@pytest.mark.parametrize("seed", range(12))
def test_layers_that_differ_compute_what_torch_does(seed: int, isa: str) -> None:
    model = make_model(random_model(seed))
    expected = logits_of(support.torch_bench(model))
    ours = logits_of(cpu_bench(model, FLOAT32, isa))
    assert float((ours - expected).abs().amax() / expected.abs().amax()) < 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence(DenseMLPBlock):
    """A kind of block that native code lacks."""

    name: ClassVar[str] = "mamba"
    native: ClassVar[str | None] = None


def test_blocks_that_native_code_lacks_are_named() -> None:
    config = replace(BASE, layers=(*BASE.layers, (Recurrence(intermediate_size=64),)))
    reason = "it has no code for blocks like mamba"
    with pytest.raises(ValueError, match=reason):
        CpuDecoder(make_model(config), SLOT_LEN)
    assert find_obstacle(AttentionBackend.CPU, config, DType.FLOAT32, "cpu") == reason
