"""The native forward pass against torch: the same numbers but for rounding, for every instruction set of this machine.

What it writes, what it reads and what it keeps. That bits do not depend on the batch: see `test_bits.py`.
"""

import functools
import gc
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.grouped import quantize
from chairlift.models.precision import Widths
from tests.models.cpu import support
from tests.models.cpu.support import BASE, BFLOAT16, FLOAT32, SHAPES, Format, cpu_bench, cpu_forward, make_model
from tests.models.support import linear
from tests.support.forward_bench import NUM_SLOTS, SLOT_LEN, Bench, Row, random_tokens
from tests.support.kernels import needs_kernels
from tests.support.shapes import Positions, attention_of, varied

pytestmark = needs_kernels

# Slots and numbers of new tokens. Contexts end at, before and behind the borders between chunks of 128 keys; rows are
# of one token (decoding), of few and of many, which the kernels treat differently.
RAGGED = (
    ((7, 1), (3, 127), (0, 128), (5, 129)),
    ((7, 1), (0, 1), (3, 1), (8, 300)),
    ((8, 1), (0, 1), (5, 1), (7, 1), (3, 2), (1, 40), (2, 13)),
    ((5, 1), (2, 1), (8, 1), (6, 1), (1, 90), (3, 5)),
    ((8, 1), (0, 1), (3, 1), (1, 1), (5, 1), (7, 1), (2, 1), (6, 1)),
    ((3, 240), (0, 17)),
)
UNTIED = varied(BASE, is_tied=False, num_kv_heads=2)


def ragged_logits(bench: Bench) -> torch.Tensor:
    """`[tokens, vocab]` of all those steps."""
    rng = random.Random(0)
    steps = [[Row(slot, random_tokens(rng, count)) for slot, count in step] for step in RAGGED]
    return torch.cat([logits for rows in steps for logits in bench.run(rows)])


def largest_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """As a share of the largest logit. NaN if there is one in either."""
    return float((ours - theirs).abs().amax() / theirs.abs().amax())


def typical_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Root of the mean square, as a share of the logits' own."""
    return float((ours - theirs).norm() / theirs.norm())


@functools.cache
def truth(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """Logits of that model's weights, rounded to `dtype`, computed with in float32 by torch."""
    return ragged_logits(support.torch_bench(support.in_float32(make_model(config, dtype))))


@functools.cache
def torch_error(config: ModelConfig, number_format: Format) -> float:
    """Returns how far from that torch is in the format; if quantized, with factors that are and all else in float32."""
    model = make_model(config, number_format.dtype)
    if number_format.quantization:
        model = support.quantized(support.in_float32(model), number_format.widths)
    return typical_error(ragged_logits(support.torch_bench(model)), truth(config, number_format.dtype))


of_every_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


@of_every_shape
def test_float32_equals_torch_but_for_rounding(config: ModelConfig, isa: str) -> None:
    ours, exact = ragged_logits(cpu_bench(config, FLOAT32, isa)), truth(config, torch.float32)
    assert (ours.dtype, ours.shape) == (torch.float32, exact.shape)
    assert largest_error(ours, exact) < 2e-5


# Integers are tried with the others in float32, too.
DIFFERENT = ("like Gemma", "one head to one", "five heads to one", "deep products")


@pytest.mark.parametrize(
    ("config", "number_format"),
    [
        pytest.param(config, each, id=f"{each}-{name}", marks=() if is_everyday else pytest.mark.slow)
        for name, config in SHAPES.items()
        for each in (BFLOAT16, support.BFLOAT16_INT8, support.BFLOAT16_INT4, support.BFLOAT16_INT4_LARGE)
        for is_everyday in [each is BFLOAT16 or name in DIFFERENT]
    ],
)
def test_bfloat16_is_as_near_the_truth_as_bits_allow(config: ModelConfig, number_format: Format, isa: str) -> None:
    ours, exact = ragged_logits(cpu_bench(config, number_format, isa)), truth(config, torch.bfloat16)
    assert typical_error(ours, exact) < (1.1 if number_format.quantization else 0.9) * torch_error(
        config, number_format
    )
    assert number_format.quantization or largest_error(ours, exact) < 0.06


# Where products read the embedding itself, 6 bits are left out: of so few numbers many make a factor that lies in the
# middle of two 8-bit numbers.
@pytest.mark.parametrize(
    ("config", "number_format"),
    [
        pytest.param(config, each, id=f"{each}-{name}")
        for name, config in SHAPES.items()
        for each in support.FLOAT32_INTEGERS
        if each is not support.FLOAT32_INT4 or (config.layer_inputs is None and config.num_streams is None)
    ],
)
def test_integers_give_exact_sums_of_rounded_factors(config: ModelConfig, number_format: Format, isa: str) -> None:
    support.assert_exact_sums_of_rounded_factors(config, number_format, isa)


def test_weights_of_values_lose_next_to_nothing(isa: str) -> None:
    config = SHAPES["three heads to one"]
    rounded, exact = cpu_bench(config, support.FLOAT32_INT4_LARGE, isa), support.torch_bench(make_model(config))
    for bench in (rounded, exact):
        bench.run([Row(0, list(range(1, 30)))])
    # The first layer, [keys or values, tokens, ...]; the embedding has 8 bits, and so have the rows of the product.
    ours, theirs = (bench.blocks[0, :, 0, :29].flatten(1) for bench in (rounded, exact))
    lost_of_keys, lost_of_values = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).tolist()
    assert lost_of_keys > 0.05
    assert lost_of_values < 0.012


def test_any_number_of_rows_of_the_head_is_multiplied(number_format: Format, isa: str) -> None:
    reference = support.in_float32(make_model(UNTIED, number_format.dtype))
    reference = support.quantized(reference, number_format.widths)
    forward = cpu_forward(UNTIED, number_format, isa)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, UNTIED.hidden_size, generator=generator).to(number_format.dtype)
    ours = forward.logits(hidden)
    if "amx" in isa and number_format.widths is not None and number_format.dtype == torch.bfloat16:
        head = make_model(UNTIED, number_format.dtype).lm_head.weight.detach()
        weight = quantize(head, number_format.widths.head).dequantize()
        exact = hidden.float() @ weight[:, : UNTIED.hidden_size].T  # rows are not rounded, but weights to bfloat16
        assert float((ours - exact).norm() / exact.norm()) < 0.003
    else:
        with torch.inference_mode():
            support.assert_equal_but_for_rounded_factors(ours, reference.logits(hidden.float()))
    for count in (1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 31, 32, 33, 64, 65):
        assert torch.equal(forward.logits(hidden[:count]), ours[:count])


# What it writes and reads


def by_position(bench: Bench) -> torch.Tensor:
    """`[slots, slot_len, 2, layers, heads, head_dim]`, as integers: so what is no number equals itself."""
    dtype = torch.int32 if bench.blocks.dtype == torch.float32 else torch.int16
    return bench.blocks.view(dtype).permute(0, 3, 1, 2, 4, 5)


def test_stale_values_are_neither_read_nor_written(isa: str, number_format: Format) -> None:
    """Beyond a row's length, in other slots, and in layers that are yet to come."""
    clean, stale = (cpu_bench(SHAPES["many heads"], number_format, isa) for _ in range(2))
    stale.blocks.fill_(torch.nan)
    untouched = by_position(stale)[0, 0, 0, 0, 0, 0].clone()
    logits = ragged_logits(clean)
    assert logits.isfinite().all()
    assert torch.equal(ragged_logits(stale), logits)
    lengths = [sum(count for each, count in itertools.chain(*RAGGED) if each == slot) for slot in range(NUM_SLOTS)]
    is_held = torch.arange(SLOT_LEN) < torch.tensor(lengths)[:, None]  # [slot, position]
    assert (by_position(stale)[~is_held] == untouched).all()
    assert torch.equal(by_position(stale)[is_held], by_position(clean)[is_held])


@pytest.mark.parametrize("num_new", [1, 20])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_nothing_before_a_window_is_read(num_kv_heads: int, num_new: int, isa: str, number_format: Format) -> None:
    """But for the rest of a block of 32 keys: so a decode step takes no longer, however long its sequence is."""
    config = varied(BASE, [Positions(None, window) for window in (24, 130)], num_kv_heads=num_kv_heads)
    whole, forgetful = (cpu_bench(config, number_format, isa) for _ in range(2))
    tokens = random_tokens(random.Random(8), 300 + num_new)
    for bench in (whole, forgetful):
        bench.run([Row(4, tokens[:300])])
    forgetful.blocks[4, :, 0, :256] = torch.nan  # the next token sees 277 to 300
    forgetful.blocks[4, :, 1, :160] = torch.nan  # 171 to 300
    new = [Row(4, tokens[300:])]
    (expected,) = whole.run(new)
    assert expected.isfinite().all()
    assert torch.equal(forgetful.run(new)[0], expected)


@pytest.mark.parametrize("window", [2**31 - 1, 2**32 + 5])
def test_a_window_wider_than_any_sequence_hides_nothing(window: int, isa: str) -> None:
    tokens = random_tokens(random.Random(8), 300)
    wide, without = (
        cpu_bench(varied(BASE, [Positions(None, each)] * 2), FLOAT32, isa).run([Row(4, tokens)])[0]
        for each in (window, None)
    )
    assert torch.equal(wide, without)


@pytest.mark.parametrize("token", [-1, UNTIED.vocab_size, 2**40])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_token_outside_the_vocabulary_is_refused_before_anything_is_written(token: int, is_tied: bool) -> None:
    bench = cpu_bench(replace(UNTIED, is_tied=is_tied), FLOAT32)
    bench.blocks.fill_(1.0)
    with pytest.raises(IndexError, match="token ids must be below 261, and not negative"):
        bench.run([Row(0, [1, 2]), Row(1, [3, token])])
    assert (bench.blocks == 1.0).all()


@pytest.mark.parametrize(("kv", "position"), [(0, 0), (1, 127), (0, 128), (1, 140)])
def test_a_cached_nan_spoils_its_own_row_only(kv: int, position: int, isa: str, number_format: Format) -> None:
    rng = random.Random(1)
    first = [Row(slot, random_tokens(rng, count)) for slot, count in ((4, 141), (2, 141), (7, 3))]
    second = [Row(4, [5]), Row(2, [6]), Row(7, [8, 9, 10])]
    sound, poisoned = (cpu_bench(UNTIED, number_format, isa) for _ in range(2))
    for bench in (sound, poisoned):
        bench.run(first)
    poisoned.blocks[2, kv, 1, position, 1, 3] = torch.nan
    expected, found = sound.run(second), poisoned.run(second)
    assert all(torch.equal(found[index], expected[index]) for index in (0, 2))
    assert found[1].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_embedding_that_is_no_number_spoils_its_own_row_only(value: float, isa: str, number_format: Format) -> None:
    model = make_model(UNTIED, number_format.dtype)
    model.model.embed_tokens.weight[7, 3] = value
    rows = [Row(1, [5]), Row(2, [7]), Row(0, [1, 2, 7, 3]), Row(3, [4, 6, 8])]
    sound = cpu_bench(UNTIED, number_format, isa).run(rows)
    found = cpu_bench(model, number_format, isa).run(rows)
    assert all(torch.equal(found[index], sound[index]) for index in (0, 3))
    assert found[1].isnan().all()
    assert found[2][2:].isnan().all()


@pytest.mark.parametrize("name", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_a_weight_that_is_no_number_shows_in_the_logits(name: str, isa: str, number_format: Format) -> None:
    model = make_model(UNTIED, number_format.dtype)
    block = "self_attn" if name in ("qkv_proj", "o_proj") else "mlp"
    linear(model, f"0.{block}.{name}").weight[-1, 9] = torch.nan
    for logits in cpu_bench(model, number_format, isa).run([Row(1, [5]), Row(0, [1, 2])]):
        assert logits.isnan().all()


def test_weights_of_zeros_give_zeros(isa: str, number_format: Format) -> None:
    """Rows and whole panels, which have no scale, and are in files whose vocabulary is padded."""
    model = make_model(UNTIED, number_format.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("_proj.weight", "lm_head.weight")):
            parameter[13:40] = 0.0
    for logits in cpu_bench(model, number_format, isa).run([Row(1, [5]), Row(0, [1, 2])]):
        assert logits.isfinite().all()
        assert (logits == 0).any(dim=0).nonzero().flatten().tolist() == list(range(13, 40))


# What it keeps


@pytest.mark.parametrize("shape", ["one head to one", "three heads to one"])
def test_the_torch_models_matrices_are_let_go_of(shape: str, number_format: Format) -> None:
    """All but an embedding that is not the head too: that is kept as it is, and so is what is no matrix."""
    model = make_model(SHAPES[shape], number_format.dtype)
    matrices = {
        name: StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if "_proj.weight" in name or "embed" in name or "lm_head" in name
    }
    forward = cpu_forward(model, number_format)
    gc.collect()
    alive = {name for name, storage in matrices.items() if not storage.expired()}  # type: ignore[no-untyped-call]
    assert alive == (set() if SHAPES[shape].is_tied else {"model.embed_tokens.weight"})
    assert matrices.keys() & {name for name, _ in model.named_parameters()} == set()
    assert forward.weight_bytes > 0


def matrix_bytes(num_outputs: int, num_inputs: int, number_format: Format, num_bits: int = 0) -> int:
    """Integers have half a bit more for scales and offsets, 4 bytes of units, and perhaps steps of 2 bytes."""
    if number_format.widths is None:
        return num_outputs * num_inputs * number_format.dtype.itemsize
    num_steps = {5: 2, 6: 1}.get(num_bits, 0)
    return num_outputs * num_inputs * (2 * num_bits + 1) // 16 + num_outputs * (4 + 2 * num_steps)


def expected_bytes(is_tied: bool, number_format: Format) -> int:
    """A model without padding: vocab 128, hidden 64, intermediate 192, two layers, 2 heads of 32, both with keys."""
    bits = number_format.widths or Widths(0, 0, 0, 0, keeps_errors=False)
    num_residuals = 64 if bits.keeps_errors else 0  # rows: what rounding took of the weights of values
    num_bytes = 2 * matrix_bytes(192 + num_residuals, 64, number_format, bits.values)
    num_bytes += 2 * (matrix_bytes(64, 64, number_format, bits.most) + matrix_bytes(384, 64, number_format, bits.most))
    num_bytes += matrix_bytes(64, 192, number_format, bits.most)
    num_bytes += matrix_bytes(64, 192, number_format, bits.sensitive)  # the last layer is
    num_bytes += matrix_bytes(128, 64, number_format, bits.head)
    num_bytes += (2 * 2 + 1) * 64 * 4  # norms, in float32
    num_bytes += SLOT_LEN * 32 * 4  # rotary tables
    return num_bytes + (0 if is_tied else 128 * 64 * number_format.dtype.itemsize)


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_take_the_parameters_bytes_and_a_tied_head_counts_once(is_tied: bool, number_format: Format) -> None:
    shape = support.shape(64, 192, 2, 2, vocab_size=128, is_tied=is_tied)
    assert cpu_forward(shape, number_format).weight_bytes == expected_bytes(is_tied, number_format)


def test_a_model_that_is_gone_leaves_the_forward_pass_whole() -> None:
    """Shows that the forward pass itself keeps what the kernels hold pointers to."""
    for number_format in support.FORMATS:
        expected = cpu_bench(UNTIED, number_format).run([Row(0, [1, 2, 3])])
        model = make_model(UNTIED, number_format.dtype)
        bench = cpu_bench(model, number_format)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        del model
        gc.collect()
        assert torch.equal(bench.run([Row(0, [1, 2, 3])])[0], expected[0])


@pytest.mark.parametrize("number_format", [FLOAT32, support.BFLOAT16_INT8], ids=str)
def test_steps_take_no_more_memory_than_is_counted_for_them_and_not_much_less(number_format: Format) -> None:
    bench = cpu_bench(BASE, number_format)
    decoder = bench._forward
    assert isinstance(decoder, CpuDecoder)
    counted = decoder.step_bytes(num_tokens=390, num_rows=390, cache_tokens=3 * 390)
    rng, taken = random.Random(1), []
    for rows in ([(0, 380)], [(1, 300), (2, 90)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 300)], [(0, 1)]):
        outputs = bench.run([Row(slot, random_tokens(rng, count)) for slot, count in rows])
        results = sum(len(each) * (4 * BASE.vocab_size + 4 * BASE.hidden_size) for each in outputs)
        taken.append(decoder._workspace.nbytes + results)
    assert max(taken) <= counted <= 2 * max(taken)
    a_chunk_s_partial_results = 4 * 16 * (attention_of(BASE).head_dim + 2)  # of 16 queries
    more = decoder.step_bytes(390, 390, 3 * 390 + 128 * 1000) - counted
    assert more == pytest.approx(1000 * a_chunk_s_partial_results, rel=0.1)


@pytest.mark.parametrize("head_dim", [24, 528])
def test_heads_that_the_kernels_do_not_take_are_refused(head_dim: int) -> None:
    with pytest.raises(
        ValueError, match=f"it needs a head_dim of at most 512 that is a multiple of 16, not {head_dim}"
    ):
        cpu_forward(varied(BASE, head_dim=head_dim))
