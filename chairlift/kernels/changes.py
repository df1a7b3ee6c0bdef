"""Holds what rows ask to be changed in their logits before tokens are drawn, as tensors that a kernel reads.

All of it is on the logits' device. Row i of a tensor is that of the logits.
"""

from typing import NamedTuple

import torch

NOTHING = -1
"""Stands in the place of a set, or of a slot, for rows that ask for none."""


class Additions(NamedTuple):
    """Lists numbers to add to some logits; -inf forbids a token. A row has pieces, each in the order of tokens."""

    pieces: torch.Tensor  # int32 [R + 1]: of a row, the first; then that of the next
    ends: torch.Tensor  # int32 [P + 1]: of a piece, its first entry; then that of the next
    tokens: torch.Tensor  # int32 [E]
    values: torch.Tensor  # float32 [E]


class TokenSets(NamedTuple):
    """Holds sets of tokens, a bit for each token. A row allows one of the sets, or all tokens."""

    words: torch.Tensor  # int32 [S, W]: bit t % 32 of word t // 32 is that of token t
    chosen: torch.Tensor  # int32 [R]: the row's set, or NOTHING


class Penalties(NamedTuple):
    """Holds counts of tokens by slot, and what a row makes of its slot's; see `engine/sampling/penalties.py`."""

    slots: torch.Tensor  # int32 [R], or NOTHING
    factors: torch.Tensor  # float32 [3, R]: repetition, presence, frequency
    num_generated: torch.Tensor  # int32 [slots, vocab]
    is_in_prompt: torch.Tensor  # bool [slots, vocab]


class Changes(NamedTuple):
    """Holds all changes, in the order in which they are made. None: no row asks for that."""

    additions: Additions | None = None
    allowed: TokenSets | None = None
    masks: TokenSets | None = None
    penalties: Penalties | None = None


NO_CHANGES = Changes()
