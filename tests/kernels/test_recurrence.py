"""Kernels of recurrent layers: the torch code's numbers, and bits that no cut and no neighbour changes."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.device import to_device
from chairlift.models import ragged_recurrence
from chairlift.models.attention import BatchMetadata
from chairlift.models.blocks import Block
from chairlift.models.blocks.gated_delta_net import GatedDeltaNetBlock
from chairlift.models.blocks.gated_short_conv import GatedShortConvBlock
from chairlift.models.blocks.mamba2 import Mamba2Block
from chairlift.models.recurrence import Recur
from tests.support.gpu import needs_gpu, no_waiting
from tests.support.recurrences import (
    BLOCKS,
    DELTA_NET,
    LENGTH,
    MAMBA,
    NUM_SLOTS,
    Recurrence,
    Run,
    drive,
    make_recurrence,
    recurrence,
)
from tests.support.triton_compiler import Compilation, assert_fits

_STRIDES = {"inputs_stride": "i32", "pending_slot_stride": "i32", "pending_stride": "i32"}
_STATES = {"pending": "*fp32", "table": "*i32", "inputs": "*bf16", **_STRIDES}
_ALIGNED = ("inputs", "inputs_stride", "pending", "pending_slot_stride", "pending_stride", "table")
_WALKED = {**_STATES, "convolved": "*fp32", "matrices": "*fp32", "matrices_stride": "i32", "output": "*fp32"}
_WALKED |= {"a_log": "*bf16", "dt_bias": "*bf16", "num_tokens": "i32"}
_CONVOLVED = {**_STATES, "live": "*fp32", "live_stride": "i32", "num_features": "i32", "num_inputs": "i32"}
_CONVOLVED |= {"weights": "*bf16", "bias": "*bf16", "output": "*fp32", "row_of": "*i32", "num_tokens": "i32"}
_MATRICES = "convolved", "matrices", "matrices_stride", "output"

COMPILATIONS = (
    Compilation(
        "gated delta rule",
        "chairlift.kernels.gated_delta_rule",
        "_advance",
        {**_WALKED, "length_eps": "fp32"},
        {"HK": 16, "HV": 32, "DK": 128, "DV": 128, "IS_TILED": False, "MOST": 8, "KEYS": 128, "VALUES": 8},
        (*_ALIGNED, *_MATRICES),
        {"num_warps": 1},
    ),
    Compilation(
        "mamba 2",
        "chairlift.kernels.mamba2",
        "_advance",
        {**_WALKED, "skips": "*bf16", "least_dt": "fp32", "most_dt": "fp32"},
        {"H": 64, "G": 8, "P": 64, "N": 128, "MOST": 8, "FEATURES": 8, "COLUMNS": 128},
        (*_ALIGNED, *_MATRICES),
        {"num_warps": 1},
    ),
    Compilation(
        "convolve",
        "chairlift.kernels.causal_conv",
        "_convolve",
        _CONVOLVED,
        {"TAPS": 4, "MOST": 8, "HAS_BIAS": True, "IS_GATED": True, "BLOCK": 512},
        (*_ALIGNED, "live", "live_stride", "weights", "output"),
        {"num_warps": 4},
    ),
    Compilation(
        "settle",
        "chairlift.kernels.causal_conv",
        "_settle",
        _CONVOLVED,
        {"TAPS": 4, "BLOCK": 256},
        (*_ALIGNED, "live", "live_stride"),
        {"num_warps": 2},
    ),
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = pytest.mark.parametrize("kind", BLOCKS)
NUM_ROWS, NUM_TOKENS = 2, 12


def with_kernels(ours: Recurrence) -> Run:
    """Runs the same by kernels."""

    return lambda batch, tokens: prepared(batch, len(tokens))(1, tokens, ours.block)


def prepared(batch: ContinuousBatchingKVCacheCollection, num_tokens: int) -> Recur:
    """Prepares kernels for a batch as a forward pass does."""
    assert batch.states is not None
    counts = batch.states.num_new
    offsets = to_device([0, *accumulate(counts)], torch.int32, batch.blocks.device)
    places = torch.zeros(num_tokens, dtype=torch.int64)
    metadata = BatchMetadata(offsets, places, batch.states.slots, counts, batch.states.starts, 0)
    return ragged_recurrence.prepare(metadata, batch)


def whole(ours: Recurrence, slot: int) -> torch.Tensor:
    """Outputs of a sequence alone and in one go, by kernels."""
    return with_kernels(ours)(ours.start().advance([slot], [NUM_TOKENS]), ours.inputs[slot, :NUM_TOKENS])


OTHERS: dict[str, Block] = {
    "tiled heads": replace(DELTA_NET, has_tiled_heads=True, kernel_size=2),
    "limits": replace(MAMBA, dt_limits=(0.4, 0.7), has_conv_bias=False, num_groups=1),
}


@pytest.mark.parametrize("kind", [*BLOCKS, *OTHERS])
def test_outputs_and_states_are_those_of_the_code_in_torch(kind: str) -> None:
    ours, counts, tentative = make_recurrence((BLOCKS | OTHERS)[kind], DEVICE), [1, 9, 4], [0, 3, 4]
    memories = []
    for run in (ours.run, with_kernels(ours)):
        slots = ours.start()
        run(slots.advance([4, 0, 2], [2, 3, 1], [0, 1, 1]), ours.inputs[0, :6].half())
        outputs = run(slots.advance([0, 4, 2], counts, tentative), ours.inputs[1, :14].half())
        memories.append((outputs, slots.memory.live, slots.memory.pending))
    for expected, actual in zip(*memories, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@KINDS
def test_chunks_guesses_replays_and_batches_change_no_bit(kind: str) -> None:
    ours = recurrence(kind, DEVICE)
    for slot, outputs in drive(ours, 1, with_kernels(ours), NUM_ROWS, NUM_TOKENS).items():
        assert torch.equal(outputs, whole(ours, slot))


def padded(ours: Recurrence, scratch: int) -> Run:
    """Runs the same in a padded step: a row in the scratch slot takes three more tokens, and two rows take none."""

    def run(batch: ContinuousBatchingKVCacheCollection, tokens: torch.Tensor) -> torch.Tensor:
        states, num_more = batch.states, 3
        assert states is not None
        ends = [*accumulate(states.num_new), *[len(tokens) + num_more] * 3]
        counts = [[*each, 0, 0, 0] for each in (states.num_replayed, states.num_tentative)]
        nothing = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        rows = replace(
            batch,
            lookup_table=torch.cat((batch.lookup_table, nothing + scratch)),
            cache_lengths=torch.cat((batch.cache_lengths, nothing)),
            states=replace(states, counts=to_device(counts, torch.int32, tokens.device)),
        )
        places = torch.zeros(len(tokens) + num_more, dtype=torch.int64)
        metadata = BatchMetadata(to_device([0, *ends], torch.int32, tokens.device), places, (), (), (), 0)
        recur = ragged_recurrence.prepare(metadata, rows)
        return recur(1, torch.cat((tokens, tokens[:num_more])), ours.block)[: len(tokens)]

    return run


@KINDS
def test_padding_and_rows_without_tokens_change_no_bit_of_others(kind: str) -> None:
    ours, memories = recurrence(kind, DEVICE), []
    for run in (with_kernels(ours), padded(ours, scratch=3)):
        slots = ours.start()
        run(slots.advance([4, 0], [2, 3], [0, 1]), ours.inputs[0, :5])
        outputs = run(slots.advance([0, 2, 4], [1, 6, 4], [0, 3, 4]), ours.inputs[1, :11])
        others = [0, 2, 4]
        memories.append((outputs, slots.memory.live[others], slots.memory.pending[others]))
    for expected, actual in zip(*memories, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


REAL: dict[str, Block] = {
    "gated delta net": GatedDeltaNetBlock(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel_size=4, norm_eps=1e-6
    ),
    "gated short conv": GatedShortConvBlock(num_features=2048, kernel_size=3),
    "mamba 2": Mamba2Block(num_heads=64, head_dim=64, num_groups=8, state_size=128, kernel_size=4, norm_eps=1e-6),
    "mamba 2, wide states": Mamba2Block(
        num_heads=24, head_dim=64, num_groups=1, state_size=256, kernel_size=4, norm_eps=1e-6
    ),
}


@needs_gpu
@pytest.mark.parametrize("kind", REAL)
def test_recurrences_of_real_models_are_right_in_every_mix(kind: str) -> None:
    ours = make_recurrence(REAL[kind], DEVICE, torch.bfloat16)
    slots, counts = list(range(NUM_SLOTS)), [LENGTH] * NUM_SLOTS
    expected = ours.run(ours.start().advance(slots, counts), ours.inputs.flatten(0, 1))
    together = with_kernels(ours)(ours.start().advance(slots, counts), ours.inputs.flatten(0, 1))
    assert torch.linalg.vector_norm(together - expected) < 1e-4 * torch.linalg.vector_norm(expected)
    for seed in range(3):
        for slot, outputs in drive(ours, seed, with_kernels(ours)).items():
            assert torch.equal(outputs, together[slot * LENGTH :][:LENGTH])


@needs_gpu
def test_only_shapes_are_looked_at_by_the_host() -> None:
    ours = make_recurrence(REAL["mamba 2"], DEVICE, torch.bfloat16)
    batches = [ours.start().advance([0, 3], [1, 20], [1, 8]) for _ in range(2)]
    with_kernels(ours)(batches[0], ours.inputs[0, :21])  # compiles
    with no_waiting():
        run = prepared(batches[1], 21)
        run(1, ours.inputs[0, :21], ours.block)


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_kernels_compile_for_hopper_and_spill_nothing(case: Compilation) -> None:
    assert_fits(case, __name__)
