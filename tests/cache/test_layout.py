"""Layers that differ in what they keep: where each layer's planes are, and that one ledger keeps the books of all."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection, KVCacheParams
from chairlift.cache import ContinuousBatchingKVCacheManager as Manager
from chairlift.cache.layout import CacheLayout, Kept, Place, SharedWith
from chairlift.cache.memory import AllocateBlocks, DenseMemory, allocate_blocks

WIDE = KVCacheParams(torch.float32, n_kv_heads=2, head_dim=16)
NARROW = KVCacheParams(torch.float32, n_kv_heads=1, head_dim=32)
# Four layers of two heads of 16, two of one head of 32, one that shares with the second of these, one with nothing.
LAYERS: tuple[Kept, ...] = (WIDE, NARROW, WIDE, WIDE, NARROW, WIDE, SharedWith(4), None)
SHAPES = {0: (2, 16), 1: (1, 32), 2: (2, 16), 3: (2, 16), 4: (1, 32), 5: (2, 16)}
NUM_SLOTS, SLOT_LEN = 6, 96
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4 + 2 * 2 * 1 * 32 * 4  # four layers and two, of keys and values in float32


@pytest.fixture(
    params=[
        pytest.param(DenseMemory, id="dense"),
        pytest.param(
            allocate_blocks,
            id="mapped",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="mapped on Linux only"),
        ),
    ]
)
def make(request: pytest.FixtureRequest) -> Callable[..., Manager]:
    """Makes a cache of these layers, in memory of either kind."""
    allocate: AllocateBlocks = request.param

    def make_cache(layers: Sequence[Kept] = LAYERS, devices: int = 1, **options: Any) -> Manager:
        return Manager(layers, NUM_SLOTS, SLOT_LEN, len(layers), ["cpu"] * devices, allocate=allocate, **options)

    return make_cache


def write(cache: Manager, slot: int, num_tokens: int, seed: int) -> None:
    """Fetches, fills the new tokens of every layer with other numbers, and commits."""
    (inputs,) = cache.fetch([slot], [num_tokens])
    start = inputs.cache_length(0)
    for layer in SHAPES:
        for keys_or_values, planes in enumerate(planes_of(inputs, layer)):
            planes[slot, start : start + num_tokens] = 1000 * seed + 10 * layer + keys_or_values + 1
    cache.step([num_tokens], [inputs])


def planes_of(inputs: ContinuousBatchingKVCacheCollection, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.get_key_cache(layer), inputs.get_value_cache(layer)


def held(cache: Manager, slot: int) -> dict[int, list[list[float]]]:
    """By layer: the numbers of keys, and of values, in the slot's tokens. All elements of a token are the same."""
    (inputs,) = cache.fetch([slot], [0])
    cache.step([0], [inputs])
    found = {}
    for layer in SHAPES:
        tokens = [planes[slot].flatten(1) for planes in planes_of(inputs, layer)]
        assert all(torch.equal(each, each[:, :1].expand_as(each)) for each in tokens)
        found[layer] = [each[:, 0].tolist() for each in tokens]
    return found


def filled(seeds: Sequence[int]) -> dict[int, list[list[float]]]:
    """As `held`, for tokens written with these seeds (0: never), and zeros up to the end."""
    padded = [*seeds, *[0] * (SLOT_LEN - len(seeds))]
    return {
        layer: [[1000.0 * seed + 10 * layer + which + 1 if seed else 0.0 for seed in padded] for which in (0, 1)]
        for layer in SHAPES
    }


# Places


def test_layers_of_equal_shape_are_planes_of_one_tensor(make: Callable[..., Manager]) -> None:
    cache = make()
    (inputs,) = cache.fetch(cache.claim(2))
    assert list(inputs.blocks.shape) == cache.block_shape(NUM_SLOTS) == [6, 2, 4, 96, 2, 16]
    assert [list(blocks.shape) for blocks in inputs.further_blocks] == [[6, 2, 2, 96, 1, 32]]
    assert cache.blocks[0].data_ptr() == inputs.blocks.data_ptr()
    assert {layer: tuple(inputs.get_key_cache(layer).shape[2:]) for layer in SHAPES} == SHAPES
    assert inputs.get_key_cache(3).data_ptr() == inputs.blocks[:, 0, 2].data_ptr()
    assert inputs.get_value_cache(4).data_ptr() == inputs.further_blocks[0][:, 1, 1].data_ptr()


def test_a_layer_reads_the_planes_that_it_shares(make: Callable[..., Manager]) -> None:
    (inputs,) = make().fetch([])
    assert inputs.get_key_cache(6).data_ptr() == inputs.get_key_cache(4).data_ptr()
    assert inputs.get_value_cache(6).data_ptr() == inputs.get_value_cache(4).data_ptr()


@pytest.mark.parametrize(("layer", "said"), [(7, "layer 7 keeps no keys"), (8, r"not in \[0, 8\)"), (-1, "-1 is not")])
def test_there_are_no_planes_of_a_layer_that_keeps_none(make: Callable[..., Manager], layer: int, said: str) -> None:
    (inputs,) = make().fetch([])
    with pytest.raises(IndexError, match=said):
        inputs.get_key_cache(layer)


def test_layers_that_are_alike_have_the_one_tensor_however_they_are_described() -> None:
    caches = [Manager(params, 3, 32, 3, ["cpu"]) for params in (WIDE, [WIDE] * 3)]
    assert [list(cache.blocks[0].shape) for cache in caches] == [[3, 2, 3, 32, 2, 16]] * 2
    for cache in caches:
        (inputs,) = cache.fetch(cache.claim(1))
        assert (inputs.further_blocks, inputs.places) == ((), None)
    assert caches[0].input_symbols() == caches[1].input_symbols()


def test_places_follow_the_first_layer_of_each_shape() -> None:
    layout = CacheLayout.of([None, NARROW, SharedWith(3), WIDE, NARROW], 5)
    assert [group.params for group in layout.groups] == [NARROW, WIDE]
    assert layout.places == (None, Place(0, 0), Place(1, 0), Place(1, 0), Place(0, 1))


def test_what_keys_and_values_have_in_common_is_kept_once(make: Callable[..., Manager]) -> None:
    shared = KVCacheParams(torch.float32, n_kv_heads=2, head_dim=16, num_common=12)
    cache = make([WIDE, shared, shared])
    (inputs,) = cache.fetch([])
    assert [list(each.shape) for each in (inputs.blocks, *inputs.further_blocks)] == [
        [6, 2, 1, 96, 2, 16],
        [6, 1, 2, 96, 2, 20],
    ]
    keys, values = planes_of(inputs, 2)
    keys[3, 5], values[3, 5] = 1.0, 2.0
    assert inputs.further_blocks[0][3, 0, 1, 5].tolist() == [[1.0] * 4 + [2.0] * 16] * 2
    assert keys[3, 5].tolist() == [[1.0] * 4 + [2.0] * 12] * 2
    assert cache.layout.token_bytes == 4 * (2 * 2 * 16 + 2 * 2 * 20)
    assert CacheLayout.of(shared, 2).is_plain is False
    with pytest.raises(ValueError, match="num_common must be from 0 on and below 16, not 16"):
        KVCacheParams(torch.float32, 2, 16, num_common=16)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([None, None], "no layer keeps keys and values"),
        ([WIDE, SharedWith(2)], "layer 1 shares with layer 2, which has no keys and values of its own"),
        ([WIDE, SharedWith(-1)], "layer 1 shares with layer -1"),
        ([WIDE, None, SharedWith(1)], "layer 2 shares with layer 1"),
        ([WIDE, SharedWith(0), SharedWith(1)], "layer 2 shares with layer 1"),
        ([WIDE, KVCacheParams(torch.float32, 2, 16, n_devices=2)], "layers differ in n_devices"),
    ],
)
def test_layers_that_make_no_sense_are_refused(layers: list[Kept], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Manager(layers, 2, 32, len(layers), ["cpu"])
    with pytest.raises(ValueError, match=r"num_layers is 9, but \d layers are described"):
        Manager(layers, 2, 32, 9, ["cpu"])


# Sizes


def test_the_size_is_that_of_what_is_declared(make: Callable[..., Manager]) -> None:
    cache = make()
    (inputs,) = cache.fetch(cache.claim(NUM_SLOTS))
    tensors = (inputs.blocks, *inputs.further_blocks, inputs.cache_lengths, inputs.lookup_table)
    assert cache.layout.token_bytes == TOKEN_BYTES
    size = Manager.estimated_memory_size(LAYERS, NUM_SLOTS, SLOT_LEN, len(LAYERS), ["cpu"])
    assert size == sum(tensor.nbytes for tensor in tensors) == NUM_SLOTS * (SLOT_LEN * TOKEN_BYTES + 8)
    slot_bytes = size // NUM_SLOTS
    fitting = [Manager.infer_optimal_batch_size(LAYERS, SLOT_LEN, 8, 5 * slot_bytes - less, ["cpu"]) for less in (0, 1)]
    assert fitting == [5, 4]


def test_input_symbols_name_the_blocks_of_each_group(make: Callable[..., Manager]) -> None:
    (symbols,) = make().input_symbols()
    assert [(each.name, each.dims) for each in symbols if "blocks" in each.name] == [
        ("blocks", ("num_slots", 2, 4, 96, 2, 16)),
        ("further_blocks_1", ("num_slots", 2, 2, 96, 1, 32)),
    ]


def test_devices_share_the_heads_of_every_group(make: Callable[..., Manager]) -> None:
    halves = [KVCacheParams(torch.bfloat16, heads, 16, n_devices=2) for heads in (4, 2, 4)]
    first, second = make(halves, devices=2).fetch([])
    for inputs in (first, second):
        assert [inputs.get_key_cache(layer).shape[2] for layer in range(3)] == [2, 1, 2]
    assert first.get_key_cache(1).data_ptr() != second.get_key_cache(1).data_ptr()


# Life of a slot


def test_what_is_committed_is_held_by_every_layer(make: Callable[..., Manager]) -> None:
    cache = make()
    slots = cache.claim(2)
    for slot in slots:
        write(cache, slot, 5, seed=slot + 1)
        write(cache, slot, 1, seed=slot + 3)
    assert [held(cache, slot) for slot in slots] == [filled([1] * 5 + [3]), filled([2] * 5 + [4])]
    assert [cache.cache_length_of(slot) for slot in slots] == [6, 6]
    cache.check()
    cache.check_memory()


def test_a_later_step_sees_the_same_planes(make: Callable[..., Manager]) -> None:
    cache = make()
    inputs = cache.fetch(cache.claim(1), [3], num_steps=2)
    (later,) = cache.increment_cache_lengths(inputs, torch.tensor([0, 3], dtype=torch.int32))
    assert later.cache_lengths.tolist() == [3]
    assert [later.get_key_cache(layer).data_ptr() for layer in range(7)] == [
        inputs[0].get_key_cache(layer).data_ptr() for layer in range(7)
    ]


def test_a_prefix_is_copied_in_every_group(make: Callable[..., Manager]) -> None:
    cache = make()
    source, target = cache.claim(2)
    write(cache, source, 8, seed=1)
    cache.copy_prefix(source, target, 5)
    write(cache, target, 2, seed=2)
    assert held(cache, target) == filled([1] * 5 + [2] * 2)
    assert held(cache, source) == filled([1] * 8)


def test_a_scrub_reaches_every_group(make: Callable[..., Manager]) -> None:
    cache = make()
    slot, other = cache.claim(2)
    for each in (slot, other):
        write(cache, each, 40, seed=each + 1)
    cache.rewind(slot, 30)
    cache.scrub(slot, 10)
    assert held(cache, slot) == filled([1] * 10)
    assert held(cache, other) == filled([2] * 40)


def test_released_memory_reads_as_zeros_in_every_group(make: Callable[..., Manager]) -> None:
    cache = make(max_tokens=2 * 128)
    (slot,) = cache.claim(1)
    write(cache, slot, 90, seed=1)
    cache.release(slot)
    cache.give_back()
    cache.check_memory()
    cache.claim_slot(slot)
    assert held(cache, slot) == filled([])
    cache.check()
