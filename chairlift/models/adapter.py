"""Decoders that are in no family: transformers' own modelling code, over the cache's slots.

transformers lets a model's attention be any function of a layer's queries, keys and values. `_attend` is that function:
it appends to the slots and attends in place, as the pass demands that is running in this thread. (Not every model hands
arguments of its forward pass down to its attention.) `recording` sees at start what a model's layers need of attention.

Importing this takes two seconds, so it is done only for a model that needs it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from chairlift.errors import CheckpointError
from chairlift.models.attention import Attend, Projections

ATTENTION = "chairlift"  # name of an attention function

Attention = Callable[..., tuple[torch.Tensor, None]]
"""A function that transformers calls for each layer: module, `[1, H, T, D]` queries, keys and values, mask, options."""


class _Pass(threading.local):
    """The attention of the pass that runs in this thread."""

    attention: Attention | None = None

    @contextmanager
    def running(self, attention: Attention) -> Iterator[None]:
        self.attention = attention
        try:
            yield
        finally:
            self.attention = None


_pass = _Pass()


def _attend(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
    assert _pass.attention is not None, "a layer attends in a pass only"
    return _pass.attention(*arguments, **options)


AttentionInterface.register(ATTENTION, _attend)


def _over_slots(attend: Attend) -> Attention:
    """The backend was built for the scale, the window and the cap.

    A slot keeps keys and values of one size. Zeros fill up the shorter ones: they change no score, and what they
    attend to is cut off.
    """

    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        """`[1, H, T, D]` each, values perhaps `[1, H, T, V]` -> `[1, T, Hq, D]`, or V elements of each head."""
        head_dim, num_elements = max(query.shape[-1], value.shape[-1]), value.shape[-1]
        query, key, value = (_fill_up(x[0].to(value.dtype).transpose(0, 1), head_dim) for x in (query, key, value))
        attended = attend(module.layer_idx, Projections(query, key, value))  # type: ignore[arg-type]
        return attended[..., :num_elements].unsqueeze(0), None

    return attention


def _fill_up(heads: torch.Tensor, size: int) -> torch.Tensor:
    """`[T, H, D]` -> contiguous `[T, H, size]`, with zeros behind each head."""
    missing = size - heads.shape[-1]
    return (pad(heads, (0, missing)) if missing else heads).contiguous()


@dataclass
class _Output(MoeModelOutputWithPast):
    """A model's output, with a field that other bodies return."""

    cross_attentions: None = None


class _Given(nn.Module):
    """Stands in for a model's body while its head computes logits: its output is what it is given."""

    @property
    def decoder(self) -> "_Given":
        """Returns the body to heads that ask for it by this name."""
        return self

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class AdaptedDecoder(nn.Module):
    """As `Decoder`: token ids in, hidden states out; logits only where asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.base_model
        setattr(model, model.base_model_prefix, _Given())
        self.head = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = next(self.body.parameters()).device

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """int64 `[T]`, int64 `[T]` -> final hidden states `[T, hidden]`."""
        return self.run(input_ids, positions, _over_slots(attend))

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """As `forward`, with any attention."""
        with _pass.running(attention):
            output = self.body(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type of logits."""
        return torch.float32

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def check_positions(self) -> None:
        """CheckpointError if the code counts positions itself, because those of a ragged batch are given."""
        twice = torch.ones(2, dtype=torch.int64, device=self.device)
        first, second = self(twice, twice, lambda _, new: new.query)
        if not torch.allclose(first, second, rtol=1e-2, atol=1e-2):
            raise CheckpointError("the model computes positions itself, so those of a batch cannot be given to it")
