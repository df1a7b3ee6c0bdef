"""Layers that differ in every field of their blocks, in native code, and layers that are run some at a time."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import AttentionBackend, DType
from chairlift.models import find_obstacle
from chairlift.models.attention import BatchMetadata
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.blocks import (
    Activation,
    AttentionBlock,
    Block,
    ClampedSwiGLU,
    DenseMLPBlock,
    ExpertsBlock,
    Norms,
    ParallelExpertsBlock,
    ParallelMLPBlock,
    QKNorm,
    Residual,
    Router,
    Scoring,
    SharedMLPBlock,
)
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.cpu.decoder import NativeStage
from chairlift.models.cpu.structures import Batch
from chairlift.models.decoder import Decoder
from chairlift.models.forward import LayeredForward
from chairlift.models.rotary import RopeConfig
from tests.models.cpu import support
from tests.models.cpu.support import BASE, FLOAT32, SHAPES, Format, cpu_bench, cpu_forward, make_model
from tests.support.forward_bench import SLOT_LEN, Bench, Row, in_pieces, random_tokens
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
        head_dim=rng.choice((16, 32, 80, 96, 112)),
        scale=rng.choice((0.1, 0.15, 0.2)),
        rope=rng.choice(ROPES),
        window=rng.choice((None, 24, 130)),
        softcap=rng.choice((None, 3.0)),
        qk_norm=rng.choice(list(QKNorm)),
        has_qkv_bias=rng.choice((False, True)),
        has_output_bias=rng.choice((False, True)),
        has_sinks=rng.choice((False, True)),
        has_value_norm=rng.choice((False, True)),
        are_keys_values=rng.choice((False, True)),
    )


def random_mlp(rng: random.Random) -> DenseMLPBlock:
    return DenseMLPBlock(
        intermediate_size=rng.randrange(20, 260),
        activation=rng.choice((Activation.SILU, Activation.GELU_TANH)),
        has_bias=rng.choice((False, True)),
    )


def random_router(rng: random.Random) -> Router:
    num_groups, size = rng.choice((1, 1, 2, 5)), rng.randrange(2, 8)
    num_chosen_groups = rng.randrange(1, num_groups + 1)
    return Router(
        num_experts=num_groups * size,
        num_chosen=rng.randrange(1, min(num_chosen_groups * size, 6) + 1),
        scoring=rng.choice(list(Scoring)),
        is_normalised=rng.choice((False, True)),
        eps=rng.choice((0.0, 1e-6)),
        scale=rng.choice((1.0, 1.7)),
        has_bias=rng.choice((False, True)),
        has_choice_bias=rng.choice((False, True)),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )


def random_mixture(rng: random.Random) -> tuple[Block, ...]:
    """Experts, with a shared one beside them or not."""
    experts = ExpertsBlock(
        router=random_router(rng),
        intermediate_size=rng.randrange(20, 150),
        activation=rng.choice((Activation.SILU, Activation.GELU_TANH, ClampedSwiGLU(1.7, 0.9))),
        has_bias=rng.choice((False, True)),
    )
    shared = SharedMLPBlock(intermediate_size=rng.randrange(20, 150), has_output_gate=rng.choice((False, True)))
    parallel = (
        ParallelMLPBlock(intermediate_size=rng.randrange(20, 150)),
        ParallelExpertsBlock(
            router=replace(random_router(rng), has_bias=False, has_choice_bias=False, logit_scale=0.5),
            intermediate_size=40,
        ),
    )
    return rng.choice(((experts,), (experts, shared), (shared, experts), parallel, parallel[::-1]))


def random_model(seed: int) -> ModelConfig:
    """Four to seven layers: most attend first, some have one of the blocks only, or both in the other order."""
    rng = random.Random(seed)
    layers: list[tuple[Block, ...]] = []
    for _ in range(rng.randrange(4, 8)):
        attention, mlp = random_attention(rng), random_mlp(rng)
        layers.append(rng.choice([(attention, mlp), (attention, mlp), (attention,), (mlp,), (mlp, attention)]))
    layers.append((random_attention(rng), *random_mixture(rng)))
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
class MLPBesideAttention(DenseMLPBlock):
    """Reads what the attention of its layer reads."""

    role: ClassVar[str] = "attention"


@pytest.mark.parametrize("norms", list(Norms))
def test_blocks_side_by_side_compute_what_torch_does(norms: Norms, isa: str) -> None:
    rng, beside = random.Random(3), MLPBesideAttention(intermediate_size=70, has_bias=True)
    layers = (
        (random_attention(rng), beside),
        (beside, random_attention(rng)),
        (random_attention(rng), random_mlp(rng)),
    )
    model = make_model(replace(BASE, layers=layers, norms=norms, residual_scale=0.5))
    expected = logits_of(support.torch_bench(model))
    ours = logits_of(cpu_bench(model, FLOAT32, isa))
    assert float((ours - expected).abs().amax() / expected.abs().amax()) < 1e-4


LAYERED = SHAPES["layers that differ"]
DIVISIONS = [
    tuple(end - start for start, end in itertools.pairwise((0, *cuts, 4)))
    for count in range(4)
    for cuts in itertools.combinations((1, 2, 3), count)
] + [(0, 2, 0, 2, 0)]


@pytest.mark.parametrize(
    "config",
    [replace(LAYERED, norms=Norms.PRE), replace(LAYERED, norms=Norms.POST), SHAPES["like Gemma 4"]],
    ids=["norms before", "norms behind", "like Gemma 4"],
)
def test_every_way_to_divide_the_layers_gives_the_bits_of_all_at_once(
    config: ModelConfig, isa: str, number_format: Format
) -> None:
    forward = cpu_forward(config, number_format, isa)
    whole = Bench(config, number_format.dtype, forward)
    expected = logits_of(whole)
    for counts in DIVISIONS:
        bench = Bench(config, number_format.dtype, in_pieces(forward, counts))
        assert torch.equal(logits_of(bench), expected)
        for ours, theirs in zip(bench.cache.memories, whole.cache.memories, strict=True):
            assert torch.equal(ours.blocks, theirs.blocks)


class SideBySide:
    """Some layers in torch, the others in native code, over one cache."""

    def __init__(self, model: Decoder, native: LayeredForward[NativeStage], in_torch: set[int]) -> None:
        self._model, self._native, self._in_torch = model, native, in_torch
        self._attention = TorchBackend(model.config.attention)

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        now = self._model.look_up(batch.positions, self._attention.prepare(batch, cache))
        stage = self._native.enter(batch, input_ids, cache)
        for layer in range(self._native.num_layers):
            if layer in self._in_torch:
                entering = Residual(stage.stream.clone(), torch.zeros_like(stage.stream))
                leaving = self._model.run(entering, now, layer, 1)
                assert leaving.delta is not None
                stage.stream.copy_(leaving.x + leaving.delta)
            else:
                stage = self._native.run(stage, layer, 1)
        return self._native.leave(stage)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._native.logits(hidden)


@pytest.mark.parametrize("in_torch", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_layers_in_torch_stand_beside_native_ones(in_torch: set[int]) -> None:
    expected = logits_of(support.torch_bench(make_model(LAYERED)))
    mixed = SideBySide(make_model(LAYERED), cpu_forward(LAYERED), in_torch)
    ours = logits_of(Bench(LAYERED, torch.float32, mixed))
    assert float((ours - expected).abs().amax() / expected.abs().amax()) < 1e-4


@pytest.mark.parametrize(("first_layer", "count"), [(-1, 2), (0, 5), (4, 1), (3, -1)])
def test_layers_that_there_are_not_cannot_be_run(first_layer: int, count: int) -> None:
    forward = cpu_forward(LAYERED)
    stage = NativeStage(torch.zeros(1, LAYERED.hidden_size), Batch())
    with pytest.raises(IndexError, match=rf"{count} layers from {first_layer} on are not in \[0, 4\)"):
        forward.run(stage, first_layer, count)


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


def test_two_blocks_of_a_kind_side_by_side_are_refused() -> None:
    config = replace(BASE, layers=((DenseMLPBlock(intermediate_size=64), *BASE.layers[0][1:]), *BASE.layers))
    with pytest.raises(ValueError, match="it has no code for two blocks of a kind side by side"):
        CpuDecoder(make_model(config), SLOT_LEN)
