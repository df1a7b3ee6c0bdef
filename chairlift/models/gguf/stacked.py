"""Takes the tensors in which a GGUF file stacks the matrices of experts apart: `ffn_up_exps.weight` `[experts, ...]`
becomes `ffn_up_exps.0.weight` and so on, which are places in the same file. `ffn_gate_up_exps` holds gates before ups.
Those that make AltUp's streams are stacked likewise, and those of each head in latent attention.
"""

from dataclasses import replace

from chairlift.errors import CheckpointError, named
from chairlift.models.claims import MAX_EXPERTS
from chairlift.models.gguf.header import TensorInfo

_STACKS = (
    *("_exps.weight", "_exps.bias", "altup_proj.weight", "altup_unembd_proj.weight"),
    *("attn_k_b.weight", "attn_v_b.weight"),
)
_FUSED, _HALVES = "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")


def is_stack(name: str) -> bool:
    """Returns true for a tensor of several matrices or biases."""
    return name.endswith(_STACKS)


def unstack(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Replaces each stack with one tensor for each expert. CheckpointError for a stack that is none."""
    apart: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if not is_stack(name):
            apart[name] = info
            continue
        if len(info.shape) != 2 + name.endswith("weight") or info.shape[0] > MAX_EXPERTS:
            raise CheckpointError(f"tensor {named(name)} has shape {list(info.shape)}, which are no stacked matrices")
        prefix, _, leaf = name.rpartition(".")
        layer, dot, stack = prefix.rpartition(".")
        for part, index in ((half, i) for i, half in enumerate(_HALVES if stack == _FUSED else (stack,))):
            for expert in range(info.shape[0]):
                apart[f"{layer}{dot}{part}.{expert}.{leaf}"] = _slice(name, info, expert, index, 1 + (stack == _FUSED))
    return apart


def _slice(name: str, info: TensorInfo, expert: int, index: int, count: int) -> TensorInfo:
    """One of `count` equal parts of an expert's rows."""
    num_experts, num_rows, *others = info.shape
    if num_rows % count:
        raise CheckpointError(f"tensor {named(name)} has {num_rows} rows for each expert, which make no {count} parts")
    num_bytes = info.num_bytes // num_experts // count
    offset = info.offset + (expert * count + index) * num_bytes
    return replace(info, shape=(num_rows // count, *others), offset=offset, num_bytes=num_bytes)
