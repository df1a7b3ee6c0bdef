"""The newest token of each slot, on the device: how one launch gets at what the one before it sampled."""

from collections.abc import Sequence

import torch

from chairlift.scheduler import RowPlan

ON_DEVICE = -1  # stands for an input token that only the device knows


class NewestTokens:
    """Written as tokens are sampled, read by the steps after."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._by_slot = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def note(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """`tokens`, int64 `[N]`, were sampled for these slots, int32 `[N]`."""
        self._by_slot[slots] = tokens.clamp(min=0)  # a row without a valid token ends, but its surplus is computed

    def fill_in(self, input_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 `[N]` of these slots, int32 `[N]`, with tokens in the place of `ON_DEVICE`."""
        return torch.where(input_ids < 0, self._by_slot[slots], input_ids)


def known_ids(rows: Sequence[RowPlan]) -> list[int]:
    """The input tokens of a step, row by row, as far as the host knows them."""
    token_ids: list[int] = []
    for row in rows:
        start = row.request.num_computed
        token_ids += row.request.token_ids[start : start + row.num_new_tokens] or [ON_DEVICE]
    return token_ids
