"""A token gets the same bits from the native forward pass whatever else is in the batch, and however it is computed."""

import random

import pytest
import torch

from tests.models.cpu.support import BFLOAT16, FLOAT32, RECURRENT, SHAPES, Format, cpu_bench, threads
from tests.support.forward_bench import Bench, Row, Step, logits_of, random_tokens, steps_around
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

LENGTH = 300  # tokens: three chunks of 128 keys
SLOT = 5
SOME_SHAPES = [
    *("layers that differ", "like Gemma 4", "like Granite, Phi and SmolLM", "twenty heads to one"),
    "latent vectors",
]
WAYS = [  # to compute a sequence: on how many threads, and where it is cut
    (2, []),
    (3, list(range(64, LENGTH, 64))),
    (7, [1, 127, 128, 129, 256]),
    (1, [40, *range(122, 134)]),  # the last chunk: its first queries see none of the keys from 256 on
    (1, list(range(LENGTH - 12, LENGTH))),
]
in_some_shapes = pytest.mark.parametrize("shape", SOME_SHAPES[:3])


def held_by(bench: Bench, slot: int) -> torch.Tensor:
    """The keys and values of the sequence in it, of all groups of layers."""
    blocks = [memory.blocks[slot, :, :, :LENGTH] for memory in bench.cache.memories]
    return torch.cat([each.flatten() for each in blocks])


class Computed:
    """A new cache after some steps: the logits of a sequence's tokens, and the keys and values in its slot."""

    def __init__(self, bench: Bench, slot: int, steps: list[Step]) -> None:
        self.logits = logits_of(bench, steps)
        self.cached = held_by(bench, slot)


def assert_same_bits(ours: Computed, theirs: Computed) -> None:
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.cached, theirs.cached)


def at_once(shape: str, number_format: Format, isa: str, sequence: list[int]) -> Computed:
    return Computed(cpu_bench(SHAPES[shape], number_format, isa), SLOT, [Step([Row(SLOT, sequence)])])


@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_chunks_company_slot_and_threads_make_no_difference(shape: str, isa: str, number_format: Format) -> None:
    assert_equal_in_every_way(shape, isa, number_format)


@pytest.mark.parametrize("number_format", [FLOAT32, BFLOAT16], ids=str)
def test_nor_do_they_where_keys_and_values_are_packed_at_once(isa: str, number_format: Format) -> None:
    assert_equal_in_every_way("keys and values with elements in common", isa, number_format)


def assert_equal_in_every_way(shape: str, isa: str, number_format: Format) -> None:
    """The sequence has the bits that it has at once."""
    rng = random.Random(2)
    sequence = random_tokens(rng, LENGTH)
    expected = at_once(shape, number_format, isa, sequence)
    for slot, (num_threads, cuts) in enumerate(WAYS):
        bench = cpu_bench(SHAPES[shape], number_format, isa)
        with threads(num_threads):
            assert_same_bits(Computed(bench, slot, steps_around(rng, slot, sequence, cuts)), expected)


@pytest.mark.parametrize("number_format", [FLOAT32, BFLOAT16], ids=str)
def test_nor_do_they_for_recurrent_blocks(isa: str, number_format: Format) -> None:
    """Up to three tokens of a row go one by one, more of them together."""
    rng = random.Random(8)
    sequence = random_tokens(rng, 24)
    expected = logits_of(cpu_bench(RECURRENT, number_format, isa), [Step([Row(SLOT, sequence)])])
    for slot, (num_threads, cuts) in enumerate([(1, [1, 3, 4, 5, 20]), (2, [*range(1, 7), 9, 14])]):
        with threads(num_threads):
            bench = cpu_bench(RECURRENT, number_format, isa)
            assert torch.equal(logits_of(bench, steps_around(rng, slot, sequence, cuts)), expected)


def test_more_rows_than_go_through_a_product_at_once_get_the_same_bits(isa: str, number_format: Format) -> None:
    sequence = random_tokens(random.Random(5), LENGTH)
    expected = at_once("deep products", number_format, isa, sequence)
    steps = [Step([Row(0, sequence[start : start + 20])]) for start in range(0, LENGTH, 20)]
    with threads(3):
        assert_same_bits(Computed(cpu_bench(SHAPES["deep products"], number_format, isa), 0, steps), expected)


def test_threads_with_rows_of_their_own_give_the_bits_of_one(isa: str, number_format: Format) -> None:
    """So many rows that each thread takes some through all products, rather than all of them through some columns."""
    rng, shape = random.Random(6), "three heads to one"
    sequence = random_tokens(rng, 2 * 192 + 3)
    steps = steps_around(rng, SLOT, sequence, [150, 300])
    expected = Computed(cpu_bench(SHAPES[shape], number_format, isa), SLOT, steps)
    with threads(2):
        assert_same_bits(at_once(shape, number_format, isa, sequence), expected)


@in_some_shapes
def test_a_row_that_decodes_alone_gets_the_bits_of_one_among_many(shape: str, isa: str, number_format: Format) -> None:
    """Alone, several tasks share its keys; among many, one task has all of them."""
    rng = random.Random(3)
    sequence = random_tokens(rng, LENGTH)
    parts = [sequence[:-3], *([token] for token in sequence[-3:])]
    others = [Row(slot, random_tokens(rng, 1)) for slot in range(SLOT)]
    steps = [Step([Row(SLOT, parts[0])]), *(Step([*others, Row(SLOT, part)], SLOT) for part in parts[1:])]
    expected = Computed(cpu_bench(SHAPES[shape], number_format, isa), SLOT, steps)
    for count in (1, 3):
        with threads(count):
            alone = cpu_bench(SHAPES[shape], number_format, isa)
            assert_same_bits(Computed(alone, 0, [Step([Row(0, part)]) for part in parts]), expected)


@in_some_shapes
def test_several_steps_in_a_launch_give_the_bits_of_single_ones(shape: str, isa: str, number_format: Format) -> None:
    rng = random.Random(4)
    sequence = random_tokens(rng, LENGTH)
    others = [Row(slot, random_tokens(rng, 20)) for slot in (8, 1, 3)]
    expected = at_once(shape, number_format, isa, sequence)
    bench = cpu_bench(SHAPES[shape], number_format, isa)
    first = bench.run([Row(SLOT, sequence[:-20]), *others])[0]
    decoded = bench.launch([*others, Row(SLOT, sequence[-20:])])[-1]
    assert torch.equal(torch.cat((first, decoded)), expected.logits)
    assert torch.equal(held_by(bench, SLOT), expected.cached)


@in_some_shapes
def test_rows_read_a_common_prefix_in_one_place_with_their_own_bits(
    shape: str, isa: str, number_format: Format
) -> None:
    sequence = random_tokens(random.Random(7), LENGTH)
    expected = at_once(shape, number_format, isa, sequence).logits
    bench = cpu_bench(SHAPES[shape], number_format, isa)
    bench.run([Row(2, sequence[:290])])
    bench.cache.copy_prefix(2, 6, 280)
    bench.cache.settle()
    bench.blocks[6, :, :, :256] = torch.nan  # two chunks, which are read in slot 2
    decoded, first = bench.run([Row(2, sequence[290:291]), Row(6, sequence[280:281])])
    (second,) = bench.run([Row(6, sequence[281:])])
    assert torch.equal(decoded, expected[290:291])
    assert torch.equal(torch.cat((first, second)), expected[280:])
