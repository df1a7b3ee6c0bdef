"""A decoder of any family as wiring over one ragged batch of tokens; `ModelConfig` says how families differ.

Modules are named as the checkpoints' tensors, except where `Weight.parts` (`models/blocks/`) have other names.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn

from chairlift.models.attention import Attend
from chairlift.models.blocks import (
    EMBEDDING,
    AltUpLayer,
    DecoderLayer,
    LayerInputs,
    Pass,
    Residual,
    StackedLinear,
    Streams,
)
from chairlift.models.config import ModelConfig
from chairlift.models.grouped import GroupedWeight
from chairlift.models.layers import Linear, RMSNorm, RowTable, can_pack, soft_cap
from chairlift.models.recurrence import Recur
from chairlift.models.rope import rope_tables
from chairlift.models.rotary import RopeTable

_LARGE_PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj", "in_proj", "out_proj")  # modules


class _Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        make_norm = partial(RMSNorm, eps=config.rms_norm_eps, is_offset=config.has_offset_norms)
        self.embed_tokens = RowTable(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            (DecoderLayer if config.num_streams is None else AltUpLayer)(
                layer,
                index,
                config.hidden_size,
                config.norms,
                make_norm,
                config.residual_scale,
                has_scale=config.has_layer_scales,
            )
            for index, layer in enumerate(config.layers)
        )
        self.norm = make_norm(config.hidden_size)
        inputs = config.layer_inputs
        self.layer_inputs = None if inputs is None else LayerInputs(inputs, config.hidden_size, make_norm)
        self.streams = None if config.num_streams is None else Streams(config.num_streams, config.hidden_size)


class Decoder(nn.Module):
    """Token ids in, hidden states out; logits only where asked for."""

    ropes: dict[RopeTable, torch.Tensor]  # [2, positions, rotated] each, in the model's dtype: cosines and sines
    num_positions: int  # of each table

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        if not config.is_tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.model.layers))

    def is_product(self, name: str) -> bool:
        """Returns true for the matrix of a product: a `Linear`'s, or the embedding that is also the head."""
        module, _, leaf = name.rpartition(".")
        is_head = self.config.is_tied and name == EMBEDDING
        return is_head or (leaf == "weight" and isinstance(self.get_submodule(module), Linear))

    def is_of_experts(self, name: str) -> bool:
        """Returns true for the matrices of all experts, stacked."""
        module, _, leaf = name.rpartition(".")
        return leaf == "weight" and isinstance(self.get_submodule(module), StackedLinear)

    def can_keep_groups(self, name: str, *, is_on_gpu: bool) -> bool:
        """Returns true for a matrix that may stay in groups, if the backend multiplies these.

        It is one of which rows are looked up, or a product's. On a GPU nothing but products may read it, and the
        embedding is numbers, whose rows a graph gathers in one launch.
        """
        if name == EMBEDDING:
            return not is_on_gpu
        module, _, leaf = name.rpartition(".")
        own = self.get_submodule(module) if leaf == "weight" else None
        is_multiplied = isinstance(own, Linear) if is_on_gpu else self.is_product(name)
        return is_multiplied or isinstance(own, RowTable)

    def can_round(self, name: str) -> bool:
        """Returns true for a matrix that becomes float8 if quantization asks for that.

        It is a large one of a layer: neither a head nor a router, nor a gate of few outputs.
        """
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or not isinstance(own := self.get_submodule(module), Linear):
            return False
        return isinstance(own, StackedLinear) or module.rpartition(".")[2] in _LARGE_PRODUCTS

    def load_weight(self, name: str, weight: GroupedWeight | Callable[[], GroupedWeight | torch.Tensor]) -> None:
        """Replaces the matrix of a product, or one that is looked up.

        A tied head takes the embedding's matrix, which the embedding then lacks.
        """
        if name == EMBEDDING and self.config.is_tied:
            self._add_tied_head()
            del self.model.embed_tokens.weight
            self.lm_head.load_weight(weight)
        else:
            cast("Linear | RowTable", self.get_submodule(name.removesuffix(".weight"))).load_weight(weight)

    def finalize(self, max_seq_len: int, num_positions: int | None = None) -> None:
        """Once the weights are loaded: ties the head and prepares rotary tables.

        Tables have `num_positions` (None: `max_seq_len`): slots may have memory for more tokens than a sequence.
        """
        weight = self.model.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        if self.config.is_tied and not hasattr(self, "lm_head"):
            self._add_tied_head()
            self.lm_head.weight = self.model.embed_tokens.weight
        # transformers multiplies by the number in the model's format: for example 55.5 instead of 55.43
        self.embedding_scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()
        self.num_positions = num_positions or max_seq_len
        self.ropes = {
            table: rope_tables(*table, max_seq_len, self.device, self.num_positions, self.dtype)
            for table in self.config.rope_tables
        }

    def _add_tied_head(self) -> None:
        with torch.device("meta"):
            self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def pack(self) -> None:
        """Packs the weights of its products where that pays; a packed model still runs, but cannot be changed."""
        if can_pack(self.model.norm.weight):
            for module in self.modules():
                if isinstance(module, Linear):
                    module.pack()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, recur: Recur | None = None
    ) -> torch.Tensor:
        """int64 `[T]`, int64 `[T]` -> final hidden states `[T, hidden]`: all pieces one after the other."""
        stream, now = self.enter(input_ids, self.look_up(positions, attend, recur))
        return self.leave(self.run(stream, now, 0, self.config.num_layers))

    def look_up(self, positions: torch.Tensor, attend: Attend, recur: Recur | None = None) -> Pass:
        """Gathers what layers need of tokens at these positions, int64 `[T]`. Recurrent layers need `recur`."""
        ropes = {key: table[:, positions].unsqueeze(2) for key, table in self.ropes.items()}
        return Pass(ropes, positions, attend, recur)

    def enter(self, input_ids: torch.Tensor, now: Pass) -> tuple[Residual, Pass]:
        """Embeds the tokens, int64 `[T]`; returns the pass with what each layer gets of them."""
        x = self.model.embed_tokens.look_up(input_ids, self.dtype)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.model.layer_inputs is not None:
            now = replace(now, layer_inputs=self.model.layer_inputs(input_ids, x))
        if self.model.streams is not None:
            return Residual(self.model.streams.spread(x), None), now
        return Residual(x, torch.zeros_like(x)), now

    def run(self, stream: Residual, now: Pass, first_layer: int, count: int) -> Residual:
        """Runs `count` layers from that one on. IndexError if there are not so many."""
        if not 0 <= first_layer <= first_layer + count <= self.config.num_layers:
            raise IndexError(f"{count} layers from {first_layer} on are not in [0, {self.config.num_layers})")
        for layer in self.layers[first_layer : first_layer + count]:
            stream = layer(stream, now)
        return stream

    def leave(self, stream: Residual) -> torch.Tensor:
        """Normalises what the layers made: final hidden states `[T, hidden]`."""
        norm, (x, delta) = self.model.norm, stream
        if self.model.streams is not None:
            x = self.model.streams.merge(x)
        normalised: torch.Tensor = norm(x) if delta is None else norm.add(x, delta)[1]
        return normalised

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type of logits: the model's, unless they are changed after the last product."""
        is_changed = self.config.logits_divisor != 1.0 or self.config.logits_softcap is not None
        return torch.float32 if is_changed else self.dtype

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> `[N, vocab]`, of `logits_dtype`."""
        logits: torch.Tensor = self.lm_head(hidden).to(self.logits_dtype)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        cap = self.config.logits_softcap
        return logits if cap is None else soft_cap(logits, cap)
