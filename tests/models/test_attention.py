"""Attention through the cache's views, in torch: what `test_attention_backends` does not ask of every backend."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from chairlift.models.attention import AttentionConfig, token_slots
from chairlift.models.attention.torch_sdpa import TorchBackend, attend_alone
from tests.models.attention_support import (
    BATCHES,
    LAYER,
    POISON,
    Row,
    assert_near,
    attend,
    batch_of,
    make_cache,
    new_parts,
    random_tokens,
    reference,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These products are so small that several threads would mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


SPECIAL = {
    "window": AttentionConfig(0.2, (None, None, 7)),
    "window of one": AttentionConfig(0.25, (None, None, 1)),
    "wide window": AttentionConfig(0.25, (None, None, 4000)),
    "soft cap": AttentionConfig(0.25, (None, None, None), 0.7),
    "window and soft cap": AttentionConfig(0.3, (3, None, 12), 0.7),
}


@pytest.mark.parametrize("config", SPECIAL.values(), ids=SPECIAL.keys())
def test_tokens_that_attend_alone_obey_them_too(config: AttentionConfig) -> None:
    rows = BATCHES["mixed"]
    tokens = random_tokens(rows)
    (collection,) = make_cache(rows, tokens, background=POISON).fetch(
        [row.slot for row in rows], [row.num_new for row in rows]
    )
    batch = batch_of(rows)
    attend_layer = attend_alone(config, token_slots(batch, collection), batch.positions, collection)
    assert_near(attend_layer(LAYER, *tokens.new_parts(rows)), new_parts(reference(tokens, config), rows))


class _Reads(TorchFunctionMode):
    """Counts the keys that attention's products look at."""

    num_keys = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.num_keys += args[1].shape[-2]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_decode_step_reads_no_more_than_the_window(is_in_place: bool) -> None:
    config = AttentionConfig(0.25, (None, None, 9))
    for num_cached in (20, 200, 2000):
        rows = [Row(3, num_cached, 1)]
        tokens = random_tokens(rows)
        with _Reads() as reads:
            attend(make_cache(rows, tokens, num_slots=4), rows, tokens, TorchBackend(config, is_in_place=is_in_place))
        assert reads.num_keys == 9


def test_encoding_over_a_cache_equals_encoding_in_one_go() -> None:
    """The test of chunked prefill: 50/100/150/100 tokens after 50/100/150/300, against 100/200/300/400."""
    slots = [2, 0, 3, 1]
    whole = [Row(slot, 0, count) for slot, count in zip(slots, [100, 200, 300, 400], strict=True)]
    first = [Row(slot, 0, count) for slot, count in zip(slots, [50, 100, 150, 300], strict=True)]
    second = [Row(row.slot, row.num_new, count) for row, count in zip(first, [50, 100, 150, 100], strict=True)]
    tokens = random_tokens(whole, head_dim=8)
    at_once = attend(make_cache(whole, tokens, num_slots=4), whole, tokens)
    manager = make_cache(whole, tokens, num_slots=4)
    begun, finished = attend(manager, first, tokens), attend(manager, second, tokens)
    parts = zip(
        torch.split(begun, [row.num_new for row in first]),
        torch.split(finished, [row.num_new for row in second]),
        strict=True,
    )
    assert_near(torch.cat([torch.cat(pair) for pair in parts]), at_once)
    assert [manager.cache_length_of(slot) for slot in slots] == [100, 200, 300, 400]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_one_device_or_two_with_half_of_the_heads_equal_padded_copies(rows: list[Row], dtype: torch.dtype) -> None:
    tokens = random_tokens(rows, num_heads=8, num_kv_heads=4, dtype=dtype)
    expected = new_parts(reference(tokens), rows)
    for n_devices in (1, 2):
        together = attend(make_cache(rows, tokens, n_devices=n_devices), rows, tokens)
        assert (together.shape[1], together.dtype) == (8, dtype)
        assert_near(together, expected)
