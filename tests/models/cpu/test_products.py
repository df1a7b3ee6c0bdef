"""Products with integers in groups, as files hold them: each format, by way of the head."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from chairlift.models import mxfp4
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedParts, GroupedWeight, quantize, stack_rows
from chairlift.models.layers import Linear
from tests.models.cpu import support
from tests.models.cpu.support import BASE, SHAPES, assert_equal_but_for_rounded_factors, cpu_bench, make_model
from tests.models.support import linear
from tests.support.forward_bench import SLOT_LEN, Row, random_tokens
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

VOCAB = 261  # neither panels of 16 columns nor units of 64 divide it
FORMATS = {  # bits, group size, whether there are offsets
    "Q8_0": (8, 32, False),
    "8 bits with offsets": (8, 64, True),
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "groups of 64": (4, 64, False),
    "groups of 96 with offsets": (4, 96, True),
    "one group": (8, 192, False),
    "MXFP4": (4, 32, False),
    "groups of 64 by a table": (4, 64, False),
    "Q4_K": (4, 32, True),
    "Q2_K": (2, 16, True),
    "Q3_K": (3, 16, False),
    "Q5_K": (5, 32, True),
    "Q6_K": (6, 16, False),
}
SCALES_PER_STEP = {"Q2_K": 4, "Q3_K": 4, "Q4_K": 2, "Q5_K": 3, "Q6_K": 4}  # 8 or 16 in files
TABLES = {
    "MXFP4": mxfp4.TABLE,
    "groups of 64 by a table": torch.arange(-128, 128, 17, dtype=torch.int8),
}


def random_weight(name: str, num_inputs: int) -> GroupedWeight:
    """Any values there are; scales of many magnitudes, offsets of the same."""
    num_bits, group_size, has_offsets = FORMATS[name]
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 256, (VOCAB, num_inputs * num_bits // 8), generator=generator, dtype=torch.uint8)
    shape = VOCAB, num_inputs // group_size
    if name in SCALES_PER_STEP:
        counts = [
            torch.randint(0, 16 if num_bits == 2 else 64, shape, generator=generator, dtype=torch.uint8)
            for _ in range(2)
        ]
        shape = VOCAB, shape[1] // SCALES_PER_STEP[name]
        steps = [torch.randn(shape, generator=generator).exp().half() for _ in range(2)]
        if not has_offsets:
            signed = counts[0].view(torch.int8) * 4 - 128
            return GroupedWeight(num_bits, values, signed, scale_steps=steps[0])
        return GroupedWeight(num_bits, values, counts[0], counts[1], scale_steps=steps[0], offset_steps=-steps[1])
    scales = torch.randn(shape, generator=generator).exp().half()
    offsets = torch.randn(shape, generator=generator).half() if has_offsets else None
    if num_bits == 8:
        return GroupedWeight(8, values.view(torch.int8), scales, offsets)
    if name == "MXFP4":
        scales = mxfp4.scales_of(torch.randint(120, 133, shape, generator=generator, dtype=torch.uint8))
    if name in TABLES:
        return GroupedWeight(4, values, scales, table=TABLES[name])
    return GroupedWeight(4, values, scales, -8 * scales if offsets is None else offsets)


def decoder(weight: GroupedWeight, dtype: torch.dtype, isa: str | None = None) -> CpuDecoder:
    """A model with that head; its other matrices are plain."""
    model = make_model(replace(BASE, hidden_size=weight.num_inputs, is_tied=False), dtype)
    model.lm_head.load_weight(weight)
    return CpuDecoder(model, SLOT_LEN, isa=isa)


def random_rows(count: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, num_inputs, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_within_a_hundredth_of_the_files_on_any_rows(name: str, dtype: torch.dtype, isa: str) -> None:
    weight = random_weight(name, 192)
    forward, rows = decoder(weight, dtype, isa), random_rows(40, 192, dtype)
    logits, exact = forward.logits(rows), rows.float() @ weight.dequantize().T
    assert float((logits - exact).norm() / exact.norm()) < 0.01
    for count in range(1, 40):
        assert torch.equal(forward.logits(rows[:count]), logits[:count])
    with support.threads(3):
        assert torch.equal(forward.logits(rows), logits)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_lose_nothing_to_8_bits_give_the_files_numbers_exactly(name: str, isa: str) -> None:
    weight = random_weight(name, 576)
    rows = torch.randint(-127, 128, (5, 576), generator=torch.Generator().manual_seed(5)).float()
    rows[:, ::32] = 127.0  # each group's largest
    rows *= 2.0 ** torch.arange(-40, 10, 10)[:, None]
    exact = rows.double() @ weight.dequantize(torch.float64).T
    error = (decoder(weight, torch.float32, isa).logits(rows) - exact).abs().amax(dim=1)
    assert (error < 2e-6 * exact.abs().amax(dim=1)).all()


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_scales_beyond_the_range_of_float16_lose_nothing(factor: float) -> None:
    weight = random_weight("Q4_1", 64)
    assert weight.offsets is not None
    scaled = replace(weight, scales=weight.scales.float() * factor, offsets=weight.offsets.float() * factor)
    rows = random_rows(3, 64, torch.float32)
    expected = decoder(weight, torch.float32).logits(rows) * factor
    assert torch.equal(decoder(scaled, torch.float32).logits(rows), expected)


def test_a_scale_far_below_the_largest_of_its_row_or_of_0_loses_nothing() -> None:
    weight = random_weight("Q8_0", 192)
    scales = weight.scales.float()
    scales[:, 0] *= 2.0**-22
    scales[5] = 0.0
    weight, rows = replace(weight, scales=scales), torch.zeros(1, 192)
    rows[0, :32] = torch.arange(96, 128)
    exact = rows.double() @ weight.dequantize(torch.float64).T
    error = (decoder(weight, torch.float32).logits(rows) - exact).abs().amax()
    assert error < 2e-6 * exact.abs().amax()


@pytest.mark.parametrize("size", [1e-25, 1e-33, 1e-38, 1e-42])
def test_rows_of_next_to_nothing_give_next_to_nothing(size: float, isa: str) -> None:
    logits = decoder(random_weight("Q8_0", 192), torch.float32, isa).logits(random_rows(4, 192, torch.float32) * size)
    assert logits.isfinite().all()
    assert float(logits.abs().max()) < 1e5 * size


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_a_row_with_what_is_no_number_spoils_itself_only(name: str, value: float, isa: str) -> None:
    forward, rows = decoder(random_weight(name, 192), torch.float32, isa), random_rows(6, 192, torch.float32)
    sound = forward.logits(rows)
    rows[2, 100] = value
    found = forward.logits(rows)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], sound[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding_in_groups_and_a_tied_head_are_those_of_numbers_to_the_bit(name: str, isa: str) -> None:
    weight = random_weight(name, 192)
    tied, untied, grouped = (make_model(replace(BASE, hidden_size=192, is_tied=each)) for each in (True, False, False))
    untied.model.embed_tokens.weight.copy_(weight.dequantize())
    grouped.model.embed_tokens.load_weight(weight)
    del tied.model.embed_tokens.weight
    for model in (tied, untied, grouped):
        model.lm_head.load_weight(weight)
    rows = [Row(0, [0, 15, 16, 100, 260])]
    expected, *others = (cpu_bench(model, isa=isa).run(rows)[0] for model in (tied, untied, grouped))
    assert all(torch.equal(each, expected) for each in others)


def test_matrices_of_one_model_may_differ_in_format() -> None:
    mixed, same = (make_model(replace(BASE, hidden_size=128, is_tied=False)) for _ in range(2))
    for layer in range(BASE.num_layers):
        product, other = (linear(model, f"{layer}.mlp.gate_up_proj") for model in (mixed, same))
        weight = quantize(product.weight.detach(), 4)
        product.load_weight(weight)
        other.weight.copy_(weight.dequantize())
    rows = [Row(0, [1, 2, 3]), Row(3, [9])]
    ours, exact = (torch.cat(cpu_bench(model).run(rows)) for model in (mixed, same))
    assert 0 < float((ours - exact).norm() / exact.norm()) < 0.02


def test_parts_of_a_product_in_formats_of_their_own_give_the_numbers_of_one_format(isa: str) -> None:
    config = SHAPES["three heads to one"]
    mixed, same = (make_model(config) for _ in range(2))
    for layer in range(config.num_layers):
        product, other = (linear(model, f"{layer}.self_attn.qkv_proj") for model in (mixed, same))
        rows, size = product.weight.detach(), product.out_features // 5  # queries have three parts of five
        parts = [quantize(rows[:-size], 8), quantize(rows[-size:], 4)]
        product.load_weight(GroupedParts([lambda parts=parts: parts[0], lambda parts=parts: parts[1]], rows.numel()))  # type: ignore[misc]
        other.load_weight(stack_rows(parts))
    rng = random.Random(0)
    steps = [[Row(slot, random_tokens(rng, count)) for slot in (4, 0, 7)] for count in (5, 1, 40)]
    benches = (cpu_bench(model, isa=isa) for model in (mixed, same))
    ours, theirs = (torch.cat([row for step in steps for row in bench.run(step)]) for bench in benches)
    assert_equal_but_for_rounded_factors(ours, theirs)


def test_offsets_that_are_8_scales_take_no_memory() -> None:
    without, with_them = (decoder(random_weight(name, 192), torch.float32).weight_bytes for name in ("Q4_0", "Q4_1"))
    assert with_them - without == 272 * 6 * 2  # outputs in whole panels, groups, bytes
    weight, rows = replace(random_weight("Q4_0", 192), offsets=None), torch.ones(1, 192)  # 0 to 15, not -8 to 7
    torch.testing.assert_close(decoder(weight, torch.float32).logits(rows), rows @ weight.dequantize().T)


def test_groups_that_rows_cannot_have_are_refused() -> None:
    model = make_model(BASE)
    model.lm_head.load_weight(GroupedWeight(8, torch.zeros(VOCAB, 112, dtype=torch.int8), torch.ones(VOCAB, 7)))
    with pytest.raises(ValueError, match=r"groups of 32, 64, 96, .* weights, not of 16"):
        CpuDecoder(model, SLOT_LEN)


# Plain matrices beside groups

PLAIN = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]


def with_groups(config: ModelConfig, dtype: torch.dtype, plain: str) -> Decoder:
    """All matrices in groups but that of each layer, or the head."""
    model = make_model(config, dtype)
    for name, parameter in list(model.named_parameters()):
        if model.is_product(name) and plain not in name.replace("embed_tokens", "lm_head"):
            model.load_weight(name, partial(quantize, parameter.detach(), 8))
    return model


def reference_of(config: ModelConfig, plain: str) -> Decoder:
    """The same in torch: exact sums of what is rounded, and plain products."""
    model = make_model(config)
    if config.is_tied and plain != "lm_head":
        embedding = quantize(model.lm_head.weight.detach(), 8).dequantize()[:, : config.hidden_size]
        model.model.embed_tokens.weight.copy_(embedding)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear) and name != plain:
                weight = quantize(child.weight.detach(), 8).dequantize()
                setattr(parent, name, support.GroupedLinear(weight, child.bias))
    return model


@pytest.mark.parametrize("shape", ["like Gemma", "like OLMo 2", "three heads to one", "one head to one"])
@pytest.mark.parametrize("plain", PLAIN)
def test_plain_matrices_beside_groups_are_multiplied_as_they_are(plain: str, shape: str, isa: str) -> None:
    config = SHAPES[shape]
    ours = cpu_bench(with_groups(config, torch.float32, plain), isa=isa)
    theirs = support.torch_bench(reference_of(config, plain))
    steps = [[Row(slot, random_tokens(random.Random(slot), count)) for slot in (4, 0, 7)] for count in (5, 1, 40)]
    logits, expected = (torch.cat([row for step in steps for row in bench.run(step)]) for bench in (ours, theirs))
    assert_equal_but_for_rounded_factors(logits, expected)


@pytest.mark.parametrize("plain", PLAIN)
def test_bits_of_plain_matrices_beside_groups_do_not_depend_on_the_batch(plain: str, isa: str) -> None:
    models = (with_groups(SHAPES["one head to one"], torch.bfloat16, plain) for _ in range(2))
    together, alone = (cpu_bench(model, isa=isa) for model in models)
    rows = [Row(slot, random_tokens(random.Random(slot), count)) for slot, count in ((3, 1), (5, 1), (0, 3), (1, 70))]
    for logits, row in zip(together.run(rows), rows, strict=True):
        assert torch.equal(logits, alone.run([row])[0])
