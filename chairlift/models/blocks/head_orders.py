"""Orders the elements of heads: as the native code rotates them, and so that keys and values have some in common."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Orders the elements of heads so that keys and values have the ones that do not rotate in common.

    If values are what keys are before their norm and rotation, and have a norm of their own without factors, then an
    element of a key that does not rotate is that of the value times a factor of the key's norm. The query takes this
    factor instead. So a slot keeps such elements once:

        kept     rotated elements of the key | elements that do not rotate | rotating elements of the value
        key      |------------------------ head_dim ----------------------|
        value                                |------------------------ head_dim --------------------------|
    """

    head_dim: int
    num_common: int

    def rotating(self, device: torch.device | None = None) -> torch.Tensor:
        """int64 `[head_dim - num_common]`: the first of each half, which rotate with each other."""
        return self._of_halves(0, self._num_turned, device)

    def still(self, device: torch.device | None = None) -> torch.Tensor:
        """int64 `[num_common]`: those that do not rotate."""
        return self._of_halves(self._num_turned, self.head_dim // 2, device)

    def of_keys(self, device: torch.device | None = None) -> torch.Tensor:
        """int64 `[head_dim]`, also of queries"""
        return torch.cat((self.rotating(device), self.still(device)))

    def back(self, device: torch.device | None = None) -> torch.Tensor:
        """int64 `[head_dim]`: from the order of values to the first one"""
        return torch.cat((self.still(device), self.rotating(device))).argsort()

    def share(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[T, H, D]` in these orders; float32 `[D]`: the factors of the keys' norm."""
        rotating, still = self.rotating(key.device), self.still(key.device)
        scaled = (query[..., still] * factors[still]).to(query.dtype)
        common = value[..., still]
        return (
            torch.cat((query[..., rotating], scaled), dim=-1),
            torch.cat((key[..., rotating], common), dim=-1),
            torch.cat((common, value[..., rotating]), dim=-1),
        )

    @property
    def _num_turned(self) -> int:
        return (self.head_dim - self.num_common) // 2

    def _of_halves(self, begin: int, end: int, device: torch.device | None) -> torch.Tensor:
        low, high = torch.arange(self.head_dim, device=device).chunk(2)
        return torch.cat((low[begin:end], high[begin:end]))


def part_gates(rows: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """`[n * head_dim, ...]`: queries that alternate with gates, keys, values -> queries, keys, gates, values."""
    heads = torch.arange(len(rows)).view(-1, head_dim)
    pairs, others = heads[: 2 * num_heads], heads[2 * num_heads :]
    keys, values = others.chunk(2)
    return rows[torch.cat((pairs[::2], keys, pairs[1::2], values)).flatten()]


def arrange_heads(rows: torch.Tensor, *, num_heads: int, order: torch.Tensor) -> torch.Tensor:
    """`[n * head_dim, ...]`: puts the first `num_heads` heads, if there are so many, into that order of elements."""
    if is_ascending(order):
        return rows
    indices = torch.arange(len(rows)).view(-1, len(order))
    indices[:num_heads] = indices[:num_heads, order]
    return rows[indices.flatten()]


def is_ascending(order: torch.Tensor) -> bool:
    """Returns true if the elements of a head are in their first order."""
    return torch.equal(order, torch.arange(len(order)))


def head_order(head_dim: int, num_rotated: int, lanes: int) -> torch.Tensor:
    """int64 `[head_dim]`: the elements of a head in the order in which the native code rotates them.

    It rotates whole heads, each half with the other, `lanes` elements at a time. In the order of a checkpoint the first
    `num_rotated` elements rotate, each half of these with the other; here they come first in both halves. What is left
    of the halves behind a multiple of `lanes` comes last.
    """
    middle, end = num_rotated // 2, (num_rotated + head_dim) // 2
    elements = torch.arange(head_dim)
    low = torch.cat((elements[:middle], elements[num_rotated:end]))
    high = torch.cat((elements[middle:num_rotated], elements[end:]))
    whole = head_dim // 2 // lanes * lanes
    return torch.cat((low[:whole], high[:whole], low[whole:], high[whole:]))
