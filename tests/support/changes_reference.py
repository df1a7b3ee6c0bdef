"""Changes of logits by operators, one row after the other, as a reference for kernels."""

import torch

from chairlift.kernels.changes import NOTHING, Additions, Changes, Penalties, TokenSets


def changed(logits: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Logits `[R, vocab]` of any float type -> float32, with the changes made."""
    result = logits.float().clone()
    for row, own in enumerate(result):
        if changes.additions is not None:
            _add(own, row, changes.additions)
        for sets in (changes.allowed, changes.masks):
            if sets is not None:
                _keep(own, row, sets)
        if changes.penalties is not None:
            _penalise(own, row, changes.penalties)
    return result


def _add(own: torch.Tensor, row: int, additions: Additions) -> None:
    for piece in range(int(additions.pieces[row]), int(additions.pieces[row + 1])):
        entries = slice(int(additions.ends[piece]), int(additions.ends[piece + 1]))
        own.index_put_((additions.tokens[entries].long(),), additions.values[entries], accumulate=True)


def _keep(own: torch.Tensor, row: int, sets: TokenSets) -> None:
    chosen = int(sets.chosen[row])
    if chosen != NOTHING:
        bits = (sets.words[chosen].unsqueeze(1) >> torch.arange(32) & 1).flatten()[: len(own)]
        own.masked_fill_(bits == 0, -torch.inf)


def _penalise(own: torch.Tensor, row: int, penalties: Penalties) -> None:
    slot = int(penalties.slots[row])
    if slot == NOTHING:
        return
    repetition, presence, frequency = penalties.factors[:, row]
    count = penalties.num_generated[slot]
    is_seen = penalties.is_in_prompt[slot] | (count > 0)
    own.copy_(torch.where(is_seen, torch.where(own > 0, own / repetition, own * repetition), own))
    own.sub_(frequency * count + presence * (count > 0))
