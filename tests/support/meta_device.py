"""Torch's meta device as a device that works beside the host: tensors on it have shapes and no numbers.

So whatever would wait for a GPU to learn a number fails by itself. `DeviceWatch` judges the rest, which a GPU takes in
silence and pays for with time, or with a graph that cannot be recorded: copies that block, that leave from memory that
is not pinned, or that are made while a graph is recorded, and operators that take tensors of both sides.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

_aten = torch.ops.aten


class DeviceWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails with AssertionError at an operator that a launch must not use. What comes to the host is `told`."""

    def __init__(self, told: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_sent = 0
        self.num_brought = 0
        self._told = told
        self._pinned: list[torch.Tensor] = []  # kept, so that no other tensor gets their addresses
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records: what happens meanwhile would become part of a graph."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is _aten.pin_memory.default:
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        with self:  # in inference mode composite operators come as they are
            result = func.decompose(*args, **given)
        if result is not NotImplemented:
            return result
        if func is _aten._to_copy.default and given.get("device") not in (None, args[0].device):
            return self._copy(func, args[0], given)
        self._check_sides(func, args)
        return func(*args, **given)

    def _copy(self, func: Any, source: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        assert not self._is_recording, "a copy between host and device while a graph is recorded"
        assert given.get("non_blocking"), "a copy between host and device that blocks"
        if source.device == META:
            self.num_brought += 1
            return torch.full(source.shape, self._told, dtype=source.dtype)
        self.num_sent += 1
        addresses = {tensor.data_ptr() for tensor in self._pinned}
        assert source.data_ptr() in addresses or not source.numel(), "a copy from memory that is not pinned"
        copied: torch.Tensor = func(source, **given)
        return copied

    def _check_sides(self, func: Any, args: Sequence[Any]) -> None:
        flat = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
        tensors = [each for each in flat if isinstance(each, torch.Tensor)]
        sides = {tensor.device for tensor in tensors if tensor.device == META or tensor.dim()}
        assert len(sides) < 2, f"{func} takes tensors of the host and of the device"
