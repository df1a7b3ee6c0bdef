"""KVCacheParams: how devices share the heads, and what is refused."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from chairlift.cache import KVCacheParams


def test_one_device_has_all_heads() -> None:
    assert KVCacheParams(torch.float32, n_kv_heads=6, head_dim=8).n_kv_heads_per_device == 6


@pytest.mark.parametrize(("n_devices", "heads_each"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_devices_share_the_heads_evenly(n_devices: int, heads_each: int) -> None:
    params = KVCacheParams(torch.bfloat16, n_kv_heads=6, head_dim=8, n_devices=n_devices)
    assert params.n_kv_heads_per_device == heads_each


@pytest.mark.parametrize(("n_kv_heads", "n_devices"), [(6, 4), (3, 2), (2, 3)])
def test_heads_that_cannot_be_shared_evenly_are_refused_with_both_numbers(n_kv_heads: int, n_devices: int) -> None:
    with pytest.raises(ValueError, match=rf"\({n_kv_heads}\).*\({n_devices}\)"):
        KVCacheParams(torch.float32, n_kv_heads, head_dim=8, n_devices=n_devices)


@pytest.mark.parametrize("field", ["n_kv_heads", "head_dim", "n_devices"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_count_below_one_is_refused_by_name(field: str, value: int) -> None:
    counts = {"n_kv_heads": 4, "head_dim": 8, "n_devices": 1, field: value}
    with pytest.raises(ValueError, match=f"^{field} must be at least 1, not {value}$"):
        KVCacheParams(torch.float32, **counts)


def test_params_cannot_be_changed() -> None:
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=8)
    with pytest.raises(FrozenInstanceError):
        params.head_dim = 16  # type: ignore[misc]


def test_equal_params_are_equal() -> None:
    assert KVCacheParams(torch.float32, 4, 8) == KVCacheParams(torch.float32, 4, 8, n_devices=1)
    assert KVCacheParams(torch.float32, 4, 8) != KVCacheParams(torch.bfloat16, 4, 8)
