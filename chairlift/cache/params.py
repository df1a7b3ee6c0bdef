"""The shape of one token's keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVCacheParams:
    """Element type, heads and head size of the cache, and the number of devices that share the heads."""

    dtype: torch.dtype
    n_kv_heads: int
    head_dim: int
    n_devices: int = 1

    def __post_init__(self) -> None:
        for name in ("n_kv_heads", "head_dim", "n_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_kv_heads % self.n_devices:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) is not divisible by n_devices ({self.n_devices})")

    @property
    def n_kv_heads_per_device(self) -> int:
        return self.n_kv_heads // self.n_devices
