"""Shows tensors whose rows stand in another order than the blocks ask for, or in which several matrices stand as one.

A Qwen3-Next has, of a Gated DeltaNet, key head after key head with all that belongs to it:

    in_proj_qkvz    [Hk (2 Dk + 2 Hv / Hk Dv), hidden]: query, key, values, output gates of each
    in_proj_ba      [Hk 2 Hv / Hk, hidden]: beta and decay of each; in GGUF files `ssm_ba`

where the blocks have queries of all heads, and so on. An Ernie and a DeepSeek rotate neighbours of a head, where the
blocks rotate halves, and an Ernie has one dimension more in the biases of its routers. A GGUF file has each head's
matrices of latent attention apart, and that of keys transposed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.blocks import Arrange, LatentAttentionBlock
from chairlift.models.blocks.gated_delta_net import GatedDeltaNetBlock
from chairlift.models.config import ModelConfig
from chairlift.models.grouped import GroupedWeight
from chairlift.models.stored import StoredTensor, WeightReader, fill

_BIAS_OF_CHOICE = ".e_score_correction_bias"

_Spans = dict[str, tuple[int, ...]]
"""By part, in the order of a head's rows: how many rows it has in each of its spans."""


def split_halves(rows: torch.Tensor, head_dim: int, num_still: int = 0) -> torch.Tensor:
    """`[heads * head_dim, ...]`: in each head first the rows that were even, then those that were odd.

    The first `num_still` of a head stay where they are.
    """
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    pairs = heads[:, num_still:].view(len(heads), -1, 2, *rows.shape[1:])
    halves = pairs.transpose(1, 2).flatten(1, 2)
    return (torch.cat((heads[:, :num_still], halves), dim=1) if num_still else halves).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as the blocks ask for it: rows of a stored one, or what `arrange` makes of several."""

    sources: tuple[str, ...]
    arrange: Callable[..., torch.Tensor]


class RearrangedWeights:
    """A `WeightReader` over another one."""

    def __init__(self, reader: WeightReader, views: dict[str, View]) -> None:
        """CheckpointError for a tensor whose rows cannot be taken apart."""
        self._reader, self._views = reader, views
        sources = {source for view in views.values() for source in view.sources}
        self.tensors = {name: stored for name, stored in reader.tensors.items() if name not in sources}
        for name, view in views.items():
            stored = [reader.tensors[source] for source in view.sources]
            try:
                shape = tuple(view.arrange(*(torch.empty(each.shape, device="meta") for each in stored)).shape)
            except (RuntimeError, IndexError):
                given = list(stored[0].shape)
                raise CheckpointError(
                    f"tensor {named(view.sources[0])} has shape {given}, which fits no heads"
                ) from None
            self.tensors[name] = StoredTensor(shape, stored[0].groups if len(stored) == 1 else None)

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """See `WeightReader`."""
        if (view := self._views.get(name)) is None:
            return self._reader.read(name)
        if len(view.sources) > 1:
            return view.arrange(*map(self._read_plain, view.sources))
        read = self._reader.read(view.sources[0])
        return read.map_rows(view.arrange) if isinstance(read, GroupedWeight) else view.arrange(read)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        if name in self._views:
            fill(name, place, self.read(name))
        else:
            self._reader.read_into(name, place)

    def _read_plain(self, name: str) -> torch.Tensor:
        read = self._reader.read(name)
        return read.dequantize()[:, : self._reader.tensors[name].shape[1]] if isinstance(read, GroupedWeight) else read


def rearranged(reader: WeightReader, config: ModelConfig) -> WeightReader:
    """The same tensors as the blocks ask for them: the reader itself, if it has them so."""
    views = dict(_joined_heads(reader, config)) | dict(_latent_heads(reader, config))
    if config.names.rotates_neighbours:
        views |= dict(_neighbours(reader, config))
    return RearrangedWeights(reader, views) if views else reader


def _joined_heads(reader: WeightReader, config: ModelConfig) -> Iterator[tuple[str, View]]:
    for index, layer in enumerate(config.layers):
        block = next((each for each in layer if isinstance(each, GatedDeltaNetBlock)), None)
        if block is None:
            continue
        prefix = f"{config.names.body}layers.{index}.linear_attn.in_proj_"
        num_values = block.num_value_heads // block.num_key_heads
        values = num_values * block.value_dim
        features: _Spans = {"qkv": (block.key_dim, block.key_dim, values), "z": (values,)}
        gates: _Spans = {"b": (num_values,), "a": (num_values,)}
        sources = (
            (f"{prefix}qkvz.weight", features),
            (f"{prefix}ba.weight", gates),
            (f"blk.{index}.ssm_in.weight", features),
            (f"blk.{index}.ssm_ba.weight", gates),
        )
        for source, parts in sources:
            if source in reader.tensors:
                for part, arrange in _taken_apart(block.num_key_heads, parts):
                    yield f"{prefix}{part}.weight", View((source,), arrange)


def _latent_heads(reader: WeightReader, config: ModelConfig) -> Iterator[tuple[str, View]]:
    for index, block in config.attention_blocks.items():
        if isinstance(block, LatentAttentionBlock):
            kinds = [f"blk.{index}.attn_{kind}_b" for kind in ("k", "v")]
            sources = tuple(f"{kind}.{head}.weight" for head in range(block.num_heads) for kind in kinds)
            if sources[0] in reader.tensors:
                if missing := [source for source in sources if source not in reader.tensors]:
                    raise CheckpointError(f"it lacks tensor {missing[0]}")
                yield f"{config.names.body}layers.{index}.{block.name}.kv_b_proj.weight", View(sources, _join_heads)


def _join_heads(*matrices: torch.Tensor) -> torch.Tensor:
    """Takes of each head `[latent, still]` and then `[value, latent]`; returns `[heads * (still + value), latent]`."""
    pairs = zip(matrices[::2], matrices[1::2], strict=True)
    return torch.cat([part for keys, values in pairs for part in (keys.T, values)])


def _taken_apart(num_heads: int, parts: _Spans) -> Iterator[tuple[str, Arrange]]:
    start, total = 0, sum(map(sum, parts.values()))
    for part, lengths in parts.items():
        spans = []
        for length in lengths:
            spans.append(slice(start, start + length))
            start += length
        yield part, partial(_spans_of_heads, num_heads=num_heads, num_rows=total, spans=spans)


def _spans_of_heads(rows: torch.Tensor, num_heads: int, num_rows: int, spans: list[slice]) -> torch.Tensor:
    """`[heads * rows of a head, ...]`: the first span of every head, then the second one."""
    heads = rows.reshape(num_heads, num_rows, *rows.shape[1:])
    return torch.cat([heads[:, span].flatten(0, 1) for span in spans])


def _neighbours(reader: WeightReader, config: ModelConfig) -> Iterator[tuple[str, View]]:
    for part in (part for weight in config.weights() for part in weight.parts):
        if part.rotated_head_dim is not None:
            arrange: Callable[[torch.Tensor], torch.Tensor] = partial(
                split_halves, head_dim=part.rotated_head_dim, num_still=part.num_still
            )
            names = (f"{part.name}.{leaf}" for leaf in ("weight", "bias"))
            yield from ((name, View((name,), arrange)) for name in names if name in reader.tensors)
    for name, stored in reader.tensors.items():
        if name.endswith(_BIAS_OF_CHOICE) and len(stored.shape) > 1:
            yield name, View((name,), torch.Tensor.flatten)
