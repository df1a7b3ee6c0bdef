"""Bias and forbidden tokens: numbers that are added to some logits of a row, -inf for a token that must not come."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chairlift.device import send
from chairlift.engine.sampling.guesses import Guessed
from chairlift.engine.sampling.token_rules import TokenIds
from chairlift.kernels.changes import Additions
from chairlift.plan import RowPlan, SamplingKey


class _Piece(NamedTuple):
    """Holds some of what a row adds, on the host, in the order of tokens."""

    tokens: TokenIds
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, tokens: TokenIds, values: npt.NDArray[np.float32]) -> "_Piece":
        """Puts them in order."""
        order = np.argsort(tokens)
        return cls(tokens[order], values[order])

    @classmethod
    def forbidding(cls, tokens: TokenIds) -> "_Piece":
        return cls(np.sort(tokens), np.full(len(tokens), -np.inf, dtype=np.float32))


class _Constants(NamedTuple):
    """Parts of a row's key that may have thousands of entries, as arrays."""

    bias: _Piece
    no_end: _Piece  # forbids its end tokens

    @classmethod
    def of(cls, key: SamplingKey) -> "_Constants":
        bias = key.params.logit_bias
        tokens, ends = (np.array(list(each), dtype=np.int64) for each in (bias, key.end_token_ids))
        values = np.array(list(bias.values()), dtype=np.float32)
        return cls(_Piece.of(tokens, values), _Piece.forbidding(ends))


@dataclass(frozen=True, slots=True)
class Scattered:
    """Lists some elements of the logits, and what to add to them, as operators take them."""

    rows: torch.Tensor  # int64 [E]
    tokens: torch.Tensor  # int64 [E]
    values: torch.Tensor  # float32 [E]

    def add_to(self, logits: torch.Tensor) -> None:
        """Adds them to float32 `[N, vocab]` in place."""
        logits.index_put_((self.rows, self.tokens), self.values, accumulate=True)


class AdditionsMaker:
    """Gathers what rows add, on the device. Remembers the constants of the rows of the last launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._constants: dict[SamplingKey, _Constants] = {}

    def gather(
        self, rows: Sequence[RowPlan], num_steps: int, guessed: Guessed, *, is_for_kernels: bool
    ) -> list[Scattered | Additions | None]:
        """Returns the additions of each step, all of one kind. `rows`: by place.

        Bad words depend on the tokens that the host knows: where that matters, only the first step counts.
        """
        known, self._constants = self._constants, {}
        in_all: list[tuple[int, _Piece]] = []
        may_not_end: list[int] = []
        for place, row in enumerate(rows):
            key = row.key
            may_end = not _may_not_end(row, len(guessed.get(place, ())))
            if key.params.logit_bias or not may_end:
                self._constants[key] = known.get(key) or _Constants.of(key)
                in_all.append((place, self._constants[key].bias))
            if not may_end:
                may_not_end.append(place)
            if len(row.work.forbidden):
                in_all.append((place, _Piece.forbidding(np.asarray(row.work.forbidden, dtype=np.int64))))
        send_parts = partial(self._list if is_for_kernels else self._scatter, len(rows))
        if not may_not_end:
            return [send_parts(in_all)] * num_steps
        steps: list[Scattered | Additions | None] = []
        for step in range(num_steps):
            held = [place for place in may_not_end if _may_not_end(rows[place], step + len(guessed.get(place, ())))]
            steps.append(send_parts(in_all + [(place, self._constants[rows[place].key].no_end) for place in held]))
        return steps

    def _scatter(self, _: int, parts: list[tuple[int, _Piece]]) -> Scattered | None:
        sizes = [len(piece.tokens) for _, piece in parts]
        if not any(sizes):
            return None
        rows = np.repeat([row for row, _ in parts], sizes)
        tokens = np.concatenate([piece.tokens for _, piece in parts])
        values = np.concatenate([piece.values for _, piece in parts])
        return Scattered(*(send(torch.from_numpy(each), self._device) for each in (rows, tokens, values)))

    def _list(self, num_rows: int, parts: list[tuple[int, _Piece]]) -> Additions | None:
        parts = sorted((part for part in parts if len(part[1].tokens)), key=itemgetter(0))
        if not parts:
            return None
        first_pieces = np.searchsorted([row for row, _ in parts], np.arange(num_rows + 1))
        ends = np.cumsum([0, *(len(piece.tokens) for _, piece in parts)])
        numbers = [each.astype(np.int32) for each in (first_pieces, ends, *(piece.tokens for _, piece in parts))]
        sent = send(torch.from_numpy(np.concatenate(numbers)), self._device)
        values = send(torch.from_numpy(np.concatenate([piece.values for _, piece in parts])), self._device)
        pieces, offsets, tokens = torch.split(sent, [num_rows + 1, len(parts) + 1, len(values)])
        return Additions(pieces, offsets, tokens, values)


def _may_not_end(row: RowPlan, num_more: int) -> bool:
    """Returns true if `num_more` more tokens leave the row below its min_tokens, and tokens could end it."""
    return bool(row.key.end_token_ids) and row.num_output_tokens + num_more < row.key.min_tokens
