"""Experts and sinks in native code: every format, matrices that differ, and bits that company does not change."""

import random
from dataclasses import replace

import pytest
import torch

from chairlift.models.blocks import (
    AttentionBlock,
    ClampedSwiGLU,
    DenseMLPBlock,
    ExpertsBlock,
    Norms,
    ParallelExpertsBlock,
    ParallelMLPBlock,
    Router,
    Scoring,
    SharedMLPBlock,
)
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import quantize
from tests.models.cpu import support
from tests.models.cpu.support import BASE, FLOAT32, Format, cpu_bench, make_model, threads
from tests.models.cpu.test_bits import LENGTH, SLOT, WAYS, Computed, assert_same_bits
from tests.support.forward_bench import NUM_SLOTS, Row, Step, random_tokens, steps_around
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

ATTENTION = AttentionBlock(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, window=130, has_sinks=True)
FEW = ExpertsBlock(router=Router(num_experts=19, num_chosen=3, has_bias=True), intermediate_size=75, has_bias=True)
GROUPS = Router(num_experts=12, num_chosen=4, scoring=Scoring.SIGMOID, scale=1.5, num_groups=4, num_chosen_groups=2)
CLAMPED = ExpertsBlock(router=GROUPS, intermediate_size=96, activation=ClampedSwiGLU(1.7, 0.8))
ALL = replace(FEW, router=Router(num_experts=5, num_chosen=5))
SHARED = SharedMLPBlock(intermediate_size=70, has_output_gate=True)


def mixture(*layers: tuple[ExpertsBlock | DenseMLPBlock, ...], norms: Norms = Norms.PRE) -> ModelConfig:
    """Layers that attend, and then have these blocks."""
    return replace(BASE, layers=tuple((ATTENTION, *blocks) for blocks in layers), norms=norms, is_tied=False)


PARALLEL_MLP = ParallelMLPBlock(intermediate_size=90)
PARALLEL = ParallelExpertsBlock(router=Router(num_experts=9, num_chosen=2, logit_scale=0.3), intermediate_size=40)
SPARSE = mixture((FEW, SHARED), (CLAMPED,), (PARALLEL_MLP, PARALLEL), norms=Norms.PRE_AND_POST)


def at_once(model: Decoder | ModelConfig, number_format: Format, isa: str, sequence: list[int]) -> Computed:
    return Computed(cpu_bench(model, number_format, isa), SLOT, [Step([Row(SLOT, sequence)])])


def test_chunks_company_slot_and_threads_make_no_difference(isa: str, number_format: Format) -> None:
    rng = random.Random(2)
    sequence = random_tokens(rng, LENGTH)
    expected = at_once(SPARSE, number_format, isa, sequence)
    for slot, (num_threads, cuts) in enumerate(WAYS):
        bench = cpu_bench(SPARSE, number_format, isa)
        with threads(num_threads):
            assert_same_bits(Computed(bench, slot, steps_around(rng, slot, sequence, cuts)), expected)


@pytest.mark.parametrize("number_format", support.FLOAT32_INTEGERS, ids=str)
def test_integers_give_exact_sums_of_rounded_factors(number_format: Format, isa: str) -> None:
    """Every token goes to all experts, since a choice may tip with any rounding."""
    every = replace(PARALLEL, router=replace(PARALLEL.router, num_chosen=9))
    config = mixture((ALL, SHARED), (ALL,), (PARALLEL_MLP, every))
    support.assert_exact_sums_of_rounded_factors(config, number_format, isa)


def test_bfloat16_is_near_when_all_experts_are_chosen(isa: str) -> None:
    config = mixture((ALL, SHARED), (ALL,))
    rows = [Row(slot, random_tokens(random.Random(slot), 4)) for slot in range(NUM_SLOTS)]
    exact = torch.cat(support.torch_bench(support.in_float32(make_model(config, torch.bfloat16))).run(rows))
    ours = torch.cat(cpu_bench(config, support.BFLOAT16, isa).run(rows))
    assert float((ours - exact).abs().mean() / exact.abs().mean()) < 0.02


def in_formats(model: Decoder, grouped: dict[str, int]) -> Decoder:
    """The model with some matrices of its experts in groups, by the beginnings of their names: bits of a value."""
    for name, parameter in list(model.named_parameters()):
        bits = next((bits for part, bits in grouped.items() if f".experts.{part}" in name), None)
        if bits is not None and name.endswith("_proj.weight"):
            weight = quantize(parameter.detach(), bits)
            model.load_weight(name, lambda weight=weight: weight)  # type: ignore[misc]
    return model


def with_rounded(model: Decoder, grouped: dict[str, int]) -> Decoder:
    """The same numbers in torch."""
    for name, parameter in model.named_parameters():
        for part, bits in grouped.items():
            if f".experts.{part}" in name and name.endswith("_proj.weight"):
                parameter.copy_(quantize(parameter.detach(), bits).dequantize()[:, : parameter.shape[1]])
    return model


EACH = ("gate", "up", "down")
OF_WHOLE_GROUPS = replace(mixture((replace(ALL, intermediate_size=96),)), hidden_size=128)
MIXED = (
    {"gate": 4, "up": 8},
    {"gate": 8, "down": 4},
    {"down": 8},
    {"up": 4, "down": 4},
    {"gate": 4, "up": 4, "down": 8},
)


@pytest.mark.parametrize("grouped", MIXED, ids=str)
def test_matrices_of_experts_may_differ_in_format(grouped: dict[str, int], isa: str) -> None:
    expected = support.torch_bench(with_rounded(make_model(OF_WHOLE_GROUPS), grouped))
    ours = cpu_bench(in_formats(make_model(OF_WHOLE_GROUPS), grouped), FLOAT32, isa)
    rows = [Row(slot, random_tokens(random.Random(slot), 1 + slot)) for slot in range(NUM_SLOTS)]
    exact = torch.cat(expected.run(rows))
    assert float((torch.cat(ours.run(rows)) - exact).abs().mean() / exact.abs().mean()) < 0.01
    sequence = random_tokens(random.Random(7), 90)
    alone = at_once(in_formats(make_model(OF_WHOLE_GROUPS), grouped), FLOAT32, isa, sequence)
    among = cpu_bench(in_formats(make_model(OF_WHOLE_GROUPS), grouped), FLOAT32, isa)
    assert_same_bits(Computed(among, 1, steps_around(random.Random(8), 1, sequence, [1, 40, 41])), alone)


def test_an_embedding_that_is_no_number_spoils_its_own_row_only(isa: str, number_format: Format) -> None:
    first, second = [1, 2, 3, 4, 5, 6], [11, 12]
    clean = cpu_bench(make_model(SPARSE, number_format.dtype), number_format, isa).run([Row(1, first)])[0]
    spoilt = make_model(SPARSE, number_format.dtype)
    spoilt.model.embed_tokens.weight[second[0]] = torch.nan
    ours = cpu_bench(spoilt, number_format, isa).run([Row(1, first), Row(2, second)])
    assert torch.equal(ours[0], clean)
    assert bool(ours[1].isnan().all())
