"""A model over several devices, a process (rank) for each: tensor parallelism (Shoeybi et al., "Megatron-LM", 2019).

A rank has its share of the heads, of the MLPs' inner features and of the vocabulary: a smaller decoder with the usual
wiring. Each block says how its weights are cut (`Cut`), and so which modules combine what the ranks compute
(`CheckpointPart.connect`):

    ROWS          qkv_proj, gate_up_proj   nothing: each continues with its own heads and features
                  q_norm, k_norm           if they span all heads, the mean of the squares
    COLUMNS       o_proj, down_proj        the outputs are added up
    PADDED_ROWS   embed_tokens             zeros for other tokens, added up
                  lm_head                  logits are put side by side

So hidden states and logits are the same on every rank, bit for bit. Where there are fewer key/value heads than ranks,
several ranks have a copy of the same one.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F

from chairlift.errors import CheckpointError, named
from chairlift.models.blocks import Cut, Part
from chairlift.models.checkpoint import Checkpoint
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.layers import Linear, RMSNorm, RowTable
from chairlift.models.rearranged import rearranged
from chairlift.models.stored import SafetensorsWeights, StoredTensor, WeightReader, fill

_HOST = "127.0.0.1"  # where Gloo listens


class Group:
    """The ranks of one model, and their joint operations: all must make the same calls, in the same order."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device, timeout: timedelta) -> None:
        """Waits for all ranks. `timeout`: of this and of each call, after which it raises RuntimeError."""
        self.rank, self.size = rank, size
        torch_distributed: Any = distributed  # its stubs lack most of what follows
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = torch_distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend = torch_distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = torch_distributed.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [torch_distributed.ProcessGroupGloo.create_device(hostname=_HOST)]
            self._backend = torch_distributed.ProcessGroupGloo(store, rank, size, options)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of any shape; in place."""
        self._backend.allreduce([x]).wait()
        return x

    def put_together(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, V] -> [N, ranks * V]`, in the order of the ranks."""
        parts = x.new_empty(self.size, *x.shape)
        self._backend.allgather([list(parts)], [x.contiguous()]).wait()
        return parts.transpose(0, 1).flatten(1)

    def abort(self) -> None:
        """Makes calls that wait for a lost rank raise. Usable from any thread."""
        self._backend.abort()


@dataclass(frozen=True, kw_only=True)
class CheckpointPart(Checkpoint):
    """One rank's part of a checkpoint: `config` describes its part of the model."""

    whole: ModelConfig
    group: Group

    @classmethod
    def of(cls, checkpoint: Checkpoint, group: Group) -> "CheckpointPart":
        """To be called if the model can be divided (`find_obstacle`)."""
        whole, size = checkpoint.config, group.size
        assert isinstance(whole, ModelConfig), "other decoders are not divided"
        part = replace(
            whole,
            layers=tuple(tuple(block.divide(size) for block in layer) for layer in whole.layers),
            vocab_size=-(-whole.vocab_size // size),  # the last rows of the last ranks may be padding
        )
        return cls(checkpoint.path, part, whole=whole, group=group)

    def open_weights(self) -> WeightReader:
        """A reader of the part."""
        assert isinstance(self.config, ModelConfig), "see `of`"
        return rearranged(_WeightsPart(SafetensorsWeights(self.weight_files), self.whole, self.group), self.config)

    def connect(self, model: Decoder) -> None:
        """Connects the rank's decoder, once it is loaded, with those of the others."""
        group, vocab_size = self.group, self.whole.vocab_size
        cuts = {weight.module: weight.cut for weight in self.whole.weights()}
        for name, module in list(model.named_modules()):
            cut = cuts.get(name)
            if cut is Cut.COLUMNS:
                assert isinstance(module, Linear), "nothing else has columns"
                module.is_partial = True
                module.register_forward_hook(lambda _module, _inputs, output: group.add_up(output))
            elif cut is Cut.ROWS and isinstance(module, RMSNorm):
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, _SpreadNorm(module, group))
        model.model.embed_tokens = _SpreadEmbedding(model.model.embed_tokens.weight, group)
        model.lm_head.register_forward_hook(lambda _module, _inputs, output: group.put_together(output)[:, :vocab_size])


def find_split_obstacle(checkpoint: Checkpoint, size: int) -> str | None:
    """Says why that checkpoint cannot be divided over so many ranks; None if it can."""
    config = checkpoint.config
    if checkpoint.gguf is not None or checkpoint.compression is not None:
        what = "it is a GGUF file" if checkpoint.gguf else "its weights are quantized"
        return f"{what}, which one process reads; choose safetensors in bfloat16, float16 or float32, or leave it out"
    if not isinstance(config, ModelConfig):
        return f"{config.architecture} is none of the families that docs/models.md lists"
    obstacles = (block.find_split_obstacle(size) for layer in config.layers for block in layer)
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


@dataclass(frozen=True, slots=True)
class _Span:
    """A rank's part of a tensor: concatenated spans of one dimension, and zeros up to `length`."""

    dim: int
    whole_length: int
    length: int
    spans: list[tuple[int, int]]


class _WeightsPart:
    """A `WeightReader` that reads a rank's part of each tensor."""

    def __init__(self, files: SafetensorsWeights, whole: ModelConfig, group: Group) -> None:
        self._files, self._rank, self._size = files, group.rank, group.size
        self._spans = {
            part.name: self._span(weight.cut, part)  # of a parameter, or of what stands before its leaf
            for weight in whole.weights()
            for part in weight.parts
            if weight.cut is not Cut.NONE
        }
        shapes = {name: self._shape_of(name, each.shape) for name, each in files.tensors.items()}
        self.tensors = {name: StoredTensor(shape) for name, shape in shapes.items()}

    def _shape_of(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        shape, cut = list(whole), self._span_of(name)
        if cut is not None:
            if shape[cut.dim : cut.dim + 1] != [cut.whole_length]:
                raise CheckpointError(
                    f"tensor {named(name)} has shape {shape}; the model needs {cut.whole_length} in dimension {cut.dim}"
                )
            shape[cut.dim] = cut.length
        return tuple(shape)

    def read(self, name: str) -> torch.Tensor:
        if (cut := self._span_of(name)) is not None:
            read = self._files.read_spans(name, cut.dim, cut.spans)
            return F.pad(read, (0, 0, 0, cut.length - len(read))) if cut.dim == 0 and read.dim() == 2 else read
        whole = self._files.read(name)
        module, _, leaf = name.rpartition(".")
        is_first_ranks = leaf == "bias" and module in self._spans  # which has all of it
        return torch.zeros_like(whole) if is_first_ranks and self._rank else whole

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        fill(name, place, self.read(name))

    def _span_of(self, name: str) -> _Span | None:
        """None: every rank has all of it."""
        if (whole := self._spans.get(name)) is not None:
            return whole
        module, _, leaf = name.rpartition(".")
        span = self._spans.get(module)
        return None if span is None or (span.dim == 1 and leaf == "bias") else span

    def _span(self, cut: Cut, part: Part) -> _Span:
        if cut is Cut.PADDED_ROWS:
            length = -(-part.length // self._size)
            start, stop = (min(rank * length, part.length) for rank in (self._rank, self._rank + 1))
            return _Span(0, part.length, length, [(start, stop)])
        spans, whole_length = [], 0
        for units in part.units:
            first = self._rank * units.count // self._size  # with fewer heads than ranks, several ranks have the same
            last = first + max(1, units.count // self._size)
            spans.append((whole_length + first * units.length, whole_length + last * units.length))
            whole_length += units.total
        length = sum(stop - start for start, stop in spans)
        return _Span(1 if cut is Cut.COLUMNS else 0, whole_length, length, spans)


class _SpreadEmbedding(RowTable):
    """An embedding whose rows are divided evenly among the ranks."""

    def __init__(self, rows: torch.Tensor, group: Group) -> None:
        super().__init__(len(rows), rows.shape[1], _weight=rows, _freeze=True)
        self._group = group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[T] -> [T, hidden]`"""
        own = input_ids - self._group.rank * len(self.weight)
        is_elsewhere = (own < 0) | (own >= len(self.weight))
        embedded = super().forward(own.masked_fill(is_elsewhere, 0))
        return self._group.add_up(embedded.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0))


class _SpreadNorm(RMSNorm):
    """An `RMSNorm` over features that are divided evenly among the ranks."""

    def __init__(self, norm: RMSNorm, group: Group) -> None:
        super().__init__(len(norm.weight), norm.eps)
        assert not norm.is_offset, "no family has offset norms over all heads"
        self.weight, self._group = norm.weight, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`"""
        mean = self._group.add_up(x.float().square().mean(dim=-1, keepdim=True)) / self._group.size
        scaled: torch.Tensor = (x * (mean + self.eps).rsqrt()).to(x.dtype) * self.weight
        return scaled
