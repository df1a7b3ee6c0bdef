"""A model over several devices, a process (rank) for each: tensor parallelism (Shoeybi et al., "Megatron-LM", 2019).

A rank has its share of the heads, of the MLPs' inner features and of the vocabulary: a smaller decoder with the usual
wiring. A few of its modules combine what the ranks compute (`CheckpointPart.connect`):

    qkv_proj, gate_up_proj   the rows of the rank's heads and features     nothing: each continues with its own
    o_proj, down_proj        the columns of the same                       the outputs are added up
    embed_tokens             the rows of the rank's tokens                 zeros for other tokens, added up
    lm_head                  the same rows                                 logits are put side by side
    q_norm, k_norm           if they span all heads, those of the rank     the mean of the squares

So hidden states and logits are the same on every rank, bit for bit. Where there are fewer key/value heads than ranks,
several ranks have a copy of the same one.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F

from chairlift.errors import CheckpointError, named
from chairlift.models.checkpoint import Checkpoint
from chairlift.models.config import ModelConfig, QKNorm
from chairlift.models.decoder import Decoder
from chairlift.models.layers import RMSNorm
from chairlift.models.stored import SafetensorsWeights, StoredTensor, WeightReader

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
            num_heads=whole.num_heads // size,
            num_kv_heads=max(1, whole.num_kv_heads // size),
            intermediate_size=whole.intermediate_size // size,
            vocab_size=-(-whole.vocab_size // size),  # the last rows of the last ranks may be padding
        )
        return cls(checkpoint.path, part, whole=whole, group=group)

    def open_weights(self) -> WeightReader:
        """A reader of the part."""
        return _WeightsPart(SafetensorsWeights(self.weight_files), self.whole, self.group)

    def connect(self, model: Decoder) -> None:
        """Connects the rank's decoder, once it is loaded, with those of the others."""
        group, vocab_size = self.group, self.whole.vocab_size
        for layer in model.layers:
            attention = layer.self_attn
            for product in (attention.o_proj, layer.mlp.down_proj):
                product.register_forward_hook(lambda _module, _inputs, output: group.add_up(output))
            if self.whole.qk_norm is QKNorm.ALL_HEADS and attention.q_norm is not None and attention.k_norm is not None:
                attention.q_norm = _SpreadNorm(attention.q_norm, group)
                attention.k_norm = _SpreadNorm(attention.k_norm, group)
        model.model.embed_tokens = _SpreadEmbedding(model.model.embed_tokens.weight, group)
        model.lm_head.register_forward_hook(lambda _module, _inputs, output: group.put_together(output)[:, :vocab_size])


def find_split_obstacle(checkpoint: Checkpoint, size: int) -> str | None:
    """Why that checkpoint cannot be divided over so many ranks; None if it can."""
    config = checkpoint.config
    if checkpoint.gguf is not None or checkpoint.compression is not None:
        what = "it is a GGUF file" if checkpoint.gguf else "its weights are quantized"
        return f"{what}, which one process reads; choose safetensors in bfloat16, float16 or float32, or leave it out"
    if not isinstance(config, ModelConfig):
        return f"{config.architecture} is none of the families that docs/models.md lists"
    if config.num_heads % size:
        return f"its {config.num_heads} attention heads cannot be divided by that"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"its {config.num_kv_heads} key/value heads can neither be divided by that nor divide it"
    if config.intermediate_size % size:
        return f"the {config.intermediate_size} inner features of its MLPs cannot be divided by that"
    return None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's part of a tensor: concatenated spans of one dimension, and zeros up to `length`."""

    dim: int
    whole_length: int
    length: int
    spans: list[tuple[int, int]]


class _WeightsPart:
    """A `WeightReader` that reads a rank's part of each tensor."""

    def __init__(self, files: SafetensorsWeights, whole: ModelConfig, group: Group) -> None:
        self._files, self._rank, self._size = files, group.rank, group.size
        q, kv = (whole.num_heads, whole.head_dim), (whole.num_kv_heads, whole.head_dim)
        inner = whole.intermediate_size, 1
        rows = {"q_proj": [q], "k_proj": [kv], "v_proj": [kv], "qkv_proj": [q, kv, kv]}
        rows |= {"gate_proj": [inner], "up_proj": [inner], "gate_up_proj": [inner, inner]}
        rows |= {"q_norm": [q], "k_norm": [kv]} if whole.qk_norm is QKNorm.ALL_HEADS else {}
        length = -(-whole.vocab_size // self._size)
        start, stop = (min(rank * length, whole.vocab_size) for rank in (self._rank, self._rank + 1))
        self._cuts = dict.fromkeys(("embed_tokens", "lm_head"), _Cut(0, whole.vocab_size, length, [(start, stop)]))
        self._cuts |= {module: self._cut(0, stacked) for module, stacked in rows.items()}
        self._cuts |= {"o_proj": self._cut(1, [q]), "down_proj": self._cut(1, [inner])}
        shapes = {name: self._shape_of(name, each.shape) for name, each in files.tensors.items()}
        self.tensors = {name: StoredTensor(shape) for name, shape in shapes.items()}

    def _shape_of(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        shape, cut = list(whole), self._cut_of(name)
        if cut is not None:
            if shape[cut.dim : cut.dim + 1] != [cut.whole_length]:
                raise CheckpointError(
                    f"tensor {named(name)} has shape {shape}; the model needs {cut.whole_length} in dimension {cut.dim}"
                )
            shape[cut.dim] = cut.length
        return tuple(shape)

    def read(self, name: str) -> torch.Tensor:
        if (cut := self._cut_of(name)) is not None:
            read = self._files.read_spans(name, cut.dim, cut.spans)
            return F.pad(read, (0, 0, 0, cut.length - len(read))) if cut.dim == 0 and read.dim() == 2 else read
        whole = self._files.read(name)
        is_first_ranks = name.endswith(("o_proj.bias", "down_proj.bias"))  # only the first rank adds it
        return torch.zeros_like(whole) if is_first_ranks and self._rank else whole

    def _cut_of(self, name: str) -> _Cut | None:
        """None: every rank has all of it."""
        _, module, leaf = f"..{name}".rsplit(".", 2)
        cut = self._cuts.get(module)
        return None if cut is None or (cut.dim == 1 and leaf == "bias") else cut

    def _cut(self, dim: int, stacked: list[tuple[int, int]]) -> _Cut:
        """`stacked`: for each part along the dimension, the number of heads or features, and the length of one."""
        spans, whole_length = [], 0
        for count, length in stacked:
            first = self._rank * count // self._size  # with fewer heads than ranks, several ranks have the same
            last = first + max(1, count // self._size)
            spans.append((whole_length + first * length, whole_length + last * length))
            whole_length += count * length
        return _Cut(dim, whole_length, sum(stop - start for start, stop in spans), spans)


class _SpreadEmbedding(nn.Embedding):
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
