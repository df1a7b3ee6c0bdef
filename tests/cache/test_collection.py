"""The borrowed view: what fetch puts into it, what it shares with the blocks, how a launch moves it on.

Its numbers, for rows in any order and whatever is in their slots: test_model_based.py.
"""

import pytest
import torch

from chairlift.cache import (
    ContinuousBatchingKVCacheCollection,
    ContinuousBatchingKVCacheManager,
    KVCacheParams,
)

NUM_LAYERS = 3


def make_manager(n_devices: int = 1) -> ContinuousBatchingKVCacheManager:
    """Eight slots of 16 tokens, 4 heads of 8 in all; slots 0 to 5 are claimed, with 0, 1, ..., 5 tokens."""
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=8, n_devices=n_devices)
    manager = ContinuousBatchingKVCacheManager(params, 8, 16, NUM_LAYERS, ["cpu"] * n_devices)
    rows = manager.claim(6)
    manager.step(rows, manager.fetch(rows, rows))
    return manager


def fetch_one(
    seq_ids: list[int], new_tokens: list[int] | None = None, num_steps: int = 1
) -> ContinuousBatchingKVCacheCollection:
    (collection,) = make_manager().fetch(seq_ids, new_tokens, num_steps)
    return collection


def offsets(*row_lengths: int) -> torch.Tensor:
    """int32 `[batch + 1]`: where rows of these lengths begin and end."""
    return torch.tensor([0, *row_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# What fetch says


def test_indices_are_int32_on_the_device_and_the_rest_is_on_the_host() -> None:
    collection = fetch_one([4, 0, 2])
    assert collection.lookup_table.dtype == collection.cache_lengths.dtype == torch.int32
    assert collection.lookup_table.device == collection.cache_lengths.device == collection.blocks.device
    assert type(collection.is_cache_empty) is bool
    assert type(collection.max_seq_length) is int
    assert type(collection.max_cache_length) is int
    assert [(type(length), length) for length in map(collection.cache_length, range(3))] == [
        (int, 4),
        (int, 0),
        (int, 2),
    ]


def test_without_counts_each_row_writes_one_token() -> None:
    collection = fetch_one([1, 5, 3])
    assert (collection.max_seq_length, collection.max_cache_length) == (1, 6)


def test_a_fetch_is_a_picture_that_later_commits_do_not_change() -> None:
    manager = make_manager()
    (collection,) = manager.fetch([2, 3], [4, 4])
    manager.step([4, 4], [collection])
    assert collection.cache_lengths.tolist() == [2, 3]
    assert manager.fetch([2, 3])[0].cache_lengths.tolist() == [6, 7]


def test_each_device_has_a_view_of_its_own_blocks() -> None:
    manager = make_manager(n_devices=2)
    first, second = manager.fetch([4, 0], [2, 3])
    assert first.blocks is manager.blocks[0]
    assert second.blocks is manager.blocks[1]


# Views


def test_key_and_value_caches_are_views_of_the_blocks() -> None:
    collection = fetch_one([1])
    blocks = collection.blocks
    for layer in range(NUM_LAYERS):
        keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
        assert keys.shape == values.shape == (8, 16, 4, 8)
        assert keys.data_ptr() == blocks[0, 0, layer].data_ptr()
        assert values.data_ptr() == blocks[0, 1, layer].data_ptr()
        assert keys.stride() == values.stride() == (2 * 3 * 16 * 4 * 8, 4 * 8, 8, 1)


def test_a_write_through_a_view_lands_in_its_place_and_nowhere_else() -> None:
    manager = make_manager()
    (collection,) = manager.fetch([5])
    collection.get_key_cache(1)[5, 7] = 2.0
    collection.get_value_cache(2)[5, 7] = 3.0
    assert (manager.blocks[0][5, 0, 1, 7] == 2.0).all()
    assert (manager.blocks[0][5, 1, 2, 7] == 3.0).all()
    assert manager.blocks[0].sum() == 4 * 8 * 2.0 + 4 * 8 * 3.0
    assert (manager.fetch([4])[0].get_key_cache(1)[5, 7] == 2.0).all()


@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_a_layer_out_of_range_is_an_index_error(layer: int) -> None:
    collection = fetch_one([1])
    for get in (collection.get_key_cache, collection.get_value_cache):
        with pytest.raises(IndexError, match=rf"layer {layer} is not in \[0, 3\)"):
            get(layer)


def test_a_later_owner_of_a_slot_sees_none_of_its_tokens() -> None:
    manager = make_manager()
    manager.blocks[0][5] = 7.0
    manager.release(5)
    manager.claim_slot(5)
    (collection,) = manager.fetch([5], [3])
    assert collection.cache_length(0) == 0
    assert collection.is_cache_empty
    assert collection.max_cache_length == 3


# The next step of a launch


def test_lengths_advance_by_the_rows_of_the_previous_step() -> None:
    manager = make_manager()
    first = manager.fetch([4, 0, 2], [1, 3, 2], num_steps=3)
    second = manager.increment_cache_lengths(first, offsets(1, 3, 2))
    third = manager.increment_cache_lengths(second, offsets(1, 1, 1))
    assert [inputs[0].cache_lengths.tolist() for inputs in (first, second, third)] == [
        [4, 0, 2],
        [5, 3, 4],
        [6, 4, 5],
    ]
    assert [inputs[0].max_seq_length for inputs in (first, second, third)] == [3, 1, 1]
    assert [inputs[0].max_cache_length for inputs in (first, second, third)] == [5, 6, 7]


def test_the_next_step_is_not_empty_and_keeps_rows_types_and_blocks() -> None:
    manager = make_manager()
    first = manager.fetch([0], [3], num_steps=2)
    second = manager.increment_cache_lengths(first, offsets(3))
    assert first[0].is_cache_empty
    assert second[0].is_cache_empty is False
    assert second[0].blocks is first[0].blocks is manager.blocks[0]
    assert second[0].lookup_table.tolist() == [0]
    assert second[0].cache_lengths.dtype == torch.int32


def test_the_ledger_does_not_move_before_the_launch_is_committed() -> None:
    manager = make_manager()
    inputs = manager.fetch([4, 0], num_steps=3)
    for _ in range(2):
        inputs = manager.increment_cache_lengths(inputs, offsets(1, 1))
        assert (manager.cache_length_of(4), manager.cache_length_of(0)) == (4, 0)
        manager.check()
    manager.step([3, 2], inputs)  # the inputs of the last step commit the launch, as those of the first would
    assert (manager.cache_length_of(4), manager.cache_length_of(0)) == (7, 2)


def test_all_devices_move_on_together() -> None:
    manager = make_manager(n_devices=2)
    inputs = manager.increment_cache_lengths(manager.fetch([4, 0], [1, 3], num_steps=2), offsets(1, 3))
    assert [collection.cache_lengths.tolist() for collection in inputs] == [[5, 3], [5, 3]]
    assert [collection.blocks is blocks for collection, blocks in zip(inputs, manager.blocks, strict=True)] == [
        True,
        True,
    ]
