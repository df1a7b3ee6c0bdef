"""Finds out which inputs of a decoder's products matter, before its weights are rounded.

A few sequences go through the decoder in torch, one layer at a time, so that no more than a layer's weights are in
memory beside those that are packed already. An input that is large makes more of its weights' rounding errors. So it
counts by its squares, as in llama.cpp's importance matrices, but as shares of its token's: a few tokens have numbers
that are a thousand times those of all others, and would decide alone.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from chairlift.models.attention import Projections
from chairlift.models.attention.torch_sdpa import attend_to
from chairlift.models.blocks import DecoderLayer
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.layers import Linear, RMSNorm, has_bfloat16
from chairlift.models.recurrence import prepare_from_zero

_NUM_SEQUENCES, LENGTH = 4, 64
"""Sequences, and tokens of each, that `draw_tokens` gives."""


def draw_tokens(vocab_size: int) -> torch.Tensor:
    """Int64 `[sequences, LENGTH]`: the same random tokens each time."""
    return torch.randint(vocab_size, (_NUM_SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))


class Calibration:
    """Sequences on their way through a decoder."""

    def __init__(self, model: Decoder, token_ids: torch.Tensor) -> None:
        """Embeds the tokens, int64 `[sequences, tokens]`. The model has tables for as many positions as tokens."""
        num_sequences, length = token_ids.shape
        self._importance: dict[Linear, torch.Tensor] = {}
        with torch.inference_mode():
            now = model.look_up(
                torch.arange(length).repeat(num_sequences),
                _Attention(model.config, num_sequences),
                prepare_from_zero(model.config.states(), num_sequences),
            )
            self._stream, self._now = model.enter(token_ids.flatten(), now)

    @torch.inference_mode()
    def observe(self, layer: DecoderLayer) -> None:
        """Takes the tokens through the next layer, and notes what its products read.

        The weights of these are read, and stay where they are.
        """
        watched = []
        for linear in layer.modules():
            if isinstance(linear, Linear):
                linear.read()
                linear.product = _Watched(linear)
                watched.append(linear.product)
        self._stream = layer(self._stream, self._now)
        for each in watched:
            each.linear.product = None
        self._importance = {each.linear: each.shares / each.num_rows for each in watched if each.num_rows}

    def importance(self, linear: Linear) -> torch.Tensor | None:
        """Float32 `[in]`, 1 on average, of a product of the layer observed last; None: it was not used as a whole."""
        return self._importance.get(linear)


class _Watched:
    """A `Product` that adds up each input's share in the mean square of its token."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.shares = torch.zeros(linear.in_features)
        self.num_rows = 0
        self._dtype = linear.weight.dtype if has_bfloat16() else torch.float32

    def folds(self, num_rows: int) -> bool:  # noqa: ARG002
        """See `Product`."""
        return False

    def folds_norm(self, num_rows: int) -> bool:  # noqa: ARG002
        """See `Product`."""
        return False

    def __call__(
        self, x: torch.Tensor, norm: RMSNorm | None = None, addend: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Product`."""
        assert norm is None, "it folds nothing in"
        assert addend is None, "likewise"
        squares = x.float().square()
        means = squares.mean(dim=-1, keepdim=True)
        self.shares += (squares / means.clamp_(min=torch.finfo(torch.float32).tiny)).sum(dim=0)
        self.num_rows += len(x)
        weight, bias = self.linear.weight.to(self._dtype), self.linear.bias
        return F.linear(x.to(self._dtype), weight, None if bias is None else bias.to(self._dtype)).to(x.dtype)


class _Attention:
    """An `Attend` over sequences of one length, none of which has anything cached."""

    def __init__(self, config: ModelConfig, num_sequences: int) -> None:
        self._blocks = config.attention_blocks
        self._num_sequences = num_sequences
        self._written: dict[int, Sequence[torch.Tensor]] = {}  # by layer: keys and values

    def __call__(self, layer_idx: int, new: Projections) -> torch.Tensor:
        """See `Attend`."""
        block = self._blocks[layer_idx]
        if new.own is not None:
            self._written[layer_idx] = new.own
        written = self._written[layer_idx if block.source is None else block.source]
        queries, keys, values = (
            each.reshape(self._num_sequences, -1, *each.shape[1:]).transpose(1, 2) for each in (new.query, *written)
        )
        num_heads, length = keys.shape[1:3]
        grouped = queries.reshape(self._num_sequences, num_heads, -1, length, block.head_dim)
        keys, values = (each.unsqueeze(2).expand(-1, -1, grouped.shape[2], -1, -1) for each in (keys, values))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if block.window is not None:
            seen = seen.triu(1 - block.window)
        own = None if new.sinks is None else new.sinks.view(num_heads, -1, 1, 1)
        attended = attend_to(grouped, keys, values, block.attention, seen, own)
        return attended.permute(0, 3, 1, 2, 4).reshape(new.query.shape)
