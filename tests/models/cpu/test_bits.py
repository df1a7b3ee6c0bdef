"""A token gets the same bits from the native forward pass whatever else is in the batch, and however it is computed."""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.models.cpu.support import SHAPES, Format, cpu_bench, threads
from tests.support.forward_bench import Bench, Row, Step, logits_of, random_tokens, steps_around
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

LENGTH = 300  # tokens: three chunks of 128 keys
SLOT = 5
SOME_SHAPES = ["three heads to one", "like Gemma", "like Granite, Phi and SmolLM", "twenty heads to one"]


@dataclass(frozen=True)
class Way:
    """To compute a sequence: where it is cut, and on how many threads."""

    num_threads: int
    cuts: list[int]


WAYS = [
    Way(2, []),
    Way(3, list(range(64, LENGTH, 64))),
    Way(7, [1, 127, 128, 129, 256]),
    Way(1, [40, *range(122, 134)]),  # the last chunk: its first queries see none of the keys from 256 on
    Way(1, list(range(LENGTH - 12, LENGTH))),
]


@dataclass(frozen=True)
class Outcome:
    """Logits of all tokens, and the keys and values in the slot."""

    logits: torch.Tensor
    cached: torch.Tensor

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        return torch.equal(self.logits, other.logits) and torch.equal(self.cached, other.cached)


def outcome(bench: Bench, slot: int, steps: list[Step]) -> Outcome:
    return Outcome(logits_of(bench, steps), bench.blocks[slot, :, :, :LENGTH])


@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_chunks_company_slot_and_threads_make_no_difference(shape: str, isa: str, number_format: Format) -> None:
    rng = random.Random(2)
    sequence = random_tokens(rng, LENGTH)
    expected = outcome(cpu_bench(SHAPES[shape], number_format, isa), SLOT, [Step([Row(SLOT, sequence)])])
    for slot, way in enumerate(WAYS):
        bench = cpu_bench(SHAPES[shape], number_format, isa)
        with threads(way.num_threads):
            assert outcome(bench, slot, steps_around(rng, slot, sequence, way.cuts)) == expected


def test_more_rows_than_go_through_a_product_at_once_get_the_same_bits(isa: str, number_format: Format) -> None:
    rng = random.Random(5)
    sequence = random_tokens(rng, LENGTH)
    config = SHAPES["deep products"]
    expected = outcome(cpu_bench(config, number_format, isa), SLOT, [Step([Row(SLOT, sequence)])])
    steps = [Step([Row(0, sequence[start : start + 20])]) for start in range(0, LENGTH, 20)]
    with threads(3):
        assert outcome(cpu_bench(config, number_format, isa), 0, steps) == expected


def test_threads_with_rows_of_their_own_give_the_bits_of_one(isa: str, number_format: Format) -> None:
    """So many rows that each thread takes some through all products, rather than all of them through some columns."""
    rng = random.Random(6)
    sequence = random_tokens(rng, 2 * 192 + 3)
    config = SHAPES["three heads to one"]
    expected = outcome(cpu_bench(config, number_format, isa), SLOT, steps_around(rng, SLOT, sequence, [150, 300]))
    with threads(2):
        assert outcome(cpu_bench(config, number_format, isa), SLOT, [Step([Row(SLOT, sequence)])]) == expected


@pytest.mark.parametrize("shape", SOME_SHAPES[:3])
def test_a_row_that_decodes_alone_on_several_threads_gets_the_bits_of_one_among_many(
    shape: str, isa: str, number_format: Format
) -> None:
    """Alone, several tasks share its keys; among many, one task has all of them."""
    rng = random.Random(3)
    sequence = random_tokens(rng, LENGTH)
    cuts = list(range(LENGTH - 3, LENGTH))
    among_many = cpu_bench(SHAPES[shape], number_format, isa)
    others = [Row(slot, random_tokens(rng, 1)) for slot in range(SLOT)]
    steps = [
        Step([Row(SLOT, sequence[: cuts[0]])]),
        *(Step([*others, Row(SLOT, [sequence[cut]])], SLOT) for cut in cuts),
    ]
    expected = outcome(among_many, SLOT, steps)
    for count in (1, 3):
        alone = cpu_bench(SHAPES[shape], number_format, isa)
        rows = [Row(0, sequence[: cuts[0]]), *(Row(0, [sequence[cut]]) for cut in cuts)]
        with threads(count):
            assert outcome(alone, 0, [Step([row]) for row in rows]) == expected


@pytest.mark.parametrize("shape", SOME_SHAPES[:3])
def test_several_steps_in_a_launch_give_the_bits_of_single_ones(shape: str, isa: str, number_format: Format) -> None:
    rng = random.Random(4)
    sequence = random_tokens(rng, LENGTH)
    others = [Row(slot, random_tokens(rng, 20)) for slot in (8, 1, 3)]
    expected = outcome(cpu_bench(SHAPES[shape], number_format, isa), SLOT, [Step([Row(SLOT, sequence)])])
    bench = cpu_bench(SHAPES[shape], number_format, isa)
    first = bench.run([Row(SLOT, sequence[:-20]), *others])[0]
    decoded = bench.launch([*others, Row(SLOT, sequence[-20:])])[-1]
    assert Outcome(torch.cat((first, decoded)), bench.blocks[SLOT, :, :, :LENGTH]) == expected


@pytest.mark.parametrize("shape", SOME_SHAPES[:3])
def test_rows_with_a_common_prefix_read_its_chunks_in_one_place_and_get_the_bits_of_their_own(
    shape: str, isa: str, number_format: Format
) -> None:
    rng = random.Random(7)
    sequence = random_tokens(rng, LENGTH)
    expected = outcome(cpu_bench(SHAPES[shape], number_format, isa), SLOT, [Step([Row(SLOT, sequence)])]).logits
    bench = cpu_bench(SHAPES[shape], number_format, isa)
    bench.run([Row(2, sequence[:290])])
    bench.cache.copy_prefix(2, 6, 280)
    bench.cache.settle()
    bench.blocks[6, :, :, :256] = torch.nan  # two chunks, which are read in slot 2
    decoded, first, second = bench.run([Row(2, sequence[290:291]), Row(6, sequence[280:281])]) + bench.run(
        [Row(6, sequence[281:])]
    )
    assert torch.equal(decoded, expected[290:291])
    assert torch.equal(torch.cat((first, second)), expected[280:])
