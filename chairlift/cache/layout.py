"""Describes what each layer keeps in a slot: keys and values of some shape, those of another layer, or nothing.

Layers of equal shape form a group. A group has one tensor per device, and a layer a place in it:

    layers   0: 2 heads of 16    1: 1 head of 32    2: 2 heads of 16    3: those of layer 1    4: nothing
    places   group 0, plane 0    group 1, plane 0   group 0, plane 1    group 1, plane 0       none

A layer may keep a recurrent state instead or as well: a vector for each slot, of any length. The states of all layers
stand behind one another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.cache.states import StatePlace


@dataclass(frozen=True, slots=True)
class KVCacheParams:
    """Element type, heads and head size of the cache, and the number of devices that share the heads.

    If the last elements of a token's key are the first of its value, a slot keeps these `num_common` once:

        key    |----------- head_dim -----------|
        kept   |  of the key  |    of both      |  of the value  |      2 head_dim - num_common elements
        value                 |----------- head_dim -------------|
    """

    dtype: torch.dtype
    n_kv_heads: int
    head_dim: int
    n_devices: int = 1
    num_common: int = 0

    def __post_init__(self) -> None:
        for name in ("n_kv_heads", "head_dim", "n_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_kv_heads % self.n_devices:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) is not divisible by n_devices ({self.n_devices})")
        if not 0 <= self.num_common < self.head_dim:
            raise ValueError(f"num_common must be from 0 on and below {self.head_dim}, not {self.num_common}")

    @property
    def n_kv_heads_per_device(self) -> int:
        return self.n_kv_heads // self.n_devices

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value in one layer, over all devices."""
        return self.n_kv_heads * (2 * self.head_dim - self.num_common) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SharedWith:
    """A layer that reads the keys and values of another layer, and keeps none of its own."""

    layer: int


@dataclass(frozen=True, slots=True)
class StateParams:
    """The recurrent state of a layer: its size, and how much of a token it takes in. All numbers are float32."""

    num_elements: int  # for each slot
    num_inputs: int  # for each token

    def __post_init__(self) -> None:
        for name in ("num_elements", "num_inputs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


Kept = KVCacheParams | SharedWith | None
"""Declares the keys and values that a slot keeps of one layer; None: none."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of equal shape."""

    params: KVCacheParams
    num_layers: int

    def block_shape(self, n_sequences: int, max_seq_len: int) -> list[int]:
        """`[n_sequences, 2, num_layers, max_seq_len, n_kv_heads_per_device, head_dim]`; 2: keys and values.

        If these have elements in common, `[n_sequences, 1, ..., 2 * head_dim - num_common]`.
        """
        params = self.params
        kinds, width = (1, 2 * params.head_dim - params.num_common) if params.num_common else (2, params.head_dim)
        return [n_sequences, kinds, self.num_layers, max_seq_len, params.n_kv_heads_per_device, width]


@dataclass(frozen=True, slots=True)
class Place:
    """Locates a layer's keys and values: the group, and the plane in its tensor."""

    group: int
    plane: int
    num_common: int = 0  # see `KVCacheParams`

    def view(self, blocks: torch.Tensor, kv_idx: int) -> torch.Tensor:
        """Keys (0) or values (1) in the group's blocks: `[n_slots, max_seq_len, heads, head_dim]`, no copy."""
        if not self.num_common:
            return blocks[:, kv_idx, self.plane]
        head_dim = (blocks.shape[-1] + self.num_common) // 2
        kept = blocks[:, 0, self.plane]
        return kept[..., -head_dim:] if kv_idx else kept[..., :head_dim]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The places of recurrent states, and the sizes of all of them together."""

    places: tuple[StatePlace | None, ...]  # by layer; None: it has no state
    num_elements: int
    num_inputs: int

    @classmethod
    def of(cls, states: Sequence[StateParams | None]) -> "StateLayout | None":
        """The layout of these states, by layer; None if there are none."""
        places = list[StatePlace | None]()
        num_elements = num_inputs = 0
        for each in states:
            if each is None:
                places.append(None)
                continue
            places.append(StatePlace(num_elements, each.num_elements, num_inputs, each.num_inputs))
            num_elements += each.num_elements
            num_inputs += each.num_inputs
        return cls(tuple(places), num_elements, num_inputs) if num_elements else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a slot's state, or of a snapshot, on one device."""
        return self.num_elements * torch.float32.itemsize

    def slot_bytes(self, max_tentative: int) -> int:
        """Bytes of a slot's state and of the inputs of its tentative tokens, on one device."""
        return self.row_bytes + max_tentative * self.num_inputs * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's layers, in the order of their first layers, and each layer's place."""

    groups: tuple[Group, ...]
    places: tuple[Place | None, ...]  # by layer; None: it keeps no keys and values
    states: StateLayout | None = None  # None: no layer has a state

    @classmethod
    def of(
        cls, params: KVCacheParams | Sequence[Kept], num_layers: int, states: Sequence[StateParams | None] = ()
    ) -> "CacheLayout":
        """The layout of layers that are alike, or of each layer's own. `states`: by layer; empty: there are none.

        ValueError if there are none, or not so many, if they disagree about devices, or if a layer shares with one that
        has no keys and values of its own.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, not {num_layers}")
        layers = (params,) * num_layers if isinstance(params, KVCacheParams) else tuple(params)
        if len(layers) != num_layers:
            raise ValueError(f"num_layers is {num_layers}, but {len(layers)} layers are described")
        if states and len(states) != num_layers:
            raise ValueError(f"num_layers is {num_layers}, but the states of {len(states)} layers are described")
        own = [each for each in layers if isinstance(each, KVCacheParams)]
        if len({each.n_devices for each in own}) != 1:
            raise ValueError("no layer keeps keys and values" if not own else "layers differ in n_devices")
        groups = {shape: index for index, shape in enumerate(dict.fromkeys(own))}
        counts = dict.fromkeys(groups, 0)
        places: list[Place | None] = [None] * num_layers
        for index, each in enumerate(layers):
            if isinstance(each, KVCacheParams):
                places[index] = Place(groups[each], counts[each], each.num_common)
                counts[each] += 1
        for index, each in enumerate(layers):
            if isinstance(each, SharedWith):
                places[index] = places[each.layer] if 0 <= each.layer < num_layers else None
                if places[index] is None or not isinstance(layers[each.layer], KVCacheParams):
                    raise ValueError(
                        f"layer {index} shares with layer {each.layer}, which has no keys and values of its own"
                    )
        own_groups = tuple(Group(shape, count) for shape, count in counts.items())
        return cls(own_groups, tuple(places), StateLayout.of(states))

    @property
    def n_devices(self) -> int:
        return self.groups[0].params.n_devices

    @property
    def is_plain(self) -> bool:
        """True if all layers are alike, so that the tensor of the only group is all there is to know."""
        return self.states is None and self.places == tuple(Place(0, index) for index in range(len(self.places)))

    @property
    def token_bytes(self) -> int:
        """Bytes that a slot keeps for each token, over all devices."""
        return sum(group.num_layers * group.params.token_bytes for group in self.groups)

    def slot_bytes(self, max_seq_len: int) -> int:
        """Bytes of one slot's blocks on one device."""
        return sum(math.prod(each.block_shape(1, max_seq_len)) * each.params.dtype.itemsize for each in self.groups)
