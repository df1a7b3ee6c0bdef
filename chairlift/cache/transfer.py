"""Brings tokens of a slot out of the cache as bytes, and back into one.

    content    group 0: [keys or values, layer, token, head, element]   group 1: ...   state: float32 [elements]

On a CUDA device both are queued behind the work that was launched before, and nobody waits for it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chairlift.device import Arrival, bring, send
from chairlift.plan import SlotLoad, SlotRange

if TYPE_CHECKING:
    from chairlift.cache.manager import ContinuousBatchingKVCacheManager


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Tokens of a slot, on their way to the host."""

    tensors: tuple[torch.Tensor, ...]  # uint8
    arrival: Arrival

    def wait(self) -> list[memoryview]:
        """Returns them once they are on the host. From any thread."""
        self.arrival.wait()
        return [tensor.numpy().data for tensor in self.tensors]


def count_bytes(cache: "ContinuousBatchingKVCacheManager", num_tokens: int, *, has_state: bool = False) -> int:
    """Counts the bytes of so many tokens, and of a recurrent state."""
    states = cache.layout.states
    return num_tokens * cache.layout.token_bytes + (states.row_bytes if has_state and states is not None else 0)


def copy_out(cache: "ContinuousBatchingKVCacheManager", tokens: SlotRange) -> TokenBytes:
    """Copies tokens of a slot, and the state that belongs to them. What is pending must have been performed."""
    parts = [memory.blocks[tokens.slot, :, :, tokens.start : tokens.end] for memory in cache.memories]
    if tokens.state_row is not None:
        parts += [states.live[tokens.state_row] for states in cache.state_memories]
    # On a CPU, what is contiguous already would not be copied, and change while it is being written.
    tensors = [bring(part.clone(memory_format=torch.contiguous_format)) for part in parts]
    flat = tuple(tensor.reshape(-1).view(torch.uint8) for tensor in tensors)
    return TokenBytes(flat, Arrival.mark(cache.devices[0]))


def copy_in(cache: "ContinuousBatchingKVCacheManager", job: SlotLoad) -> None:
    """Writes the tokens of a part into a slot, and its state into the slot's row."""
    part = job.part
    content = torch.frombuffer(part.content, dtype=torch.uint8)
    num_tokens, offset = part.end - part.start, 0
    for memory in cache.memories:
        blocks = memory.blocks
        shape = [*blocks.shape[1:3], num_tokens, *blocks.shape[4:]]
        num_bytes = shape[0] * shape[1] * num_tokens * blocks[0, 0, 0, 0].numel() * blocks.itemsize
        tokens = content[offset : offset + num_bytes].view(blocks.dtype).view(shape)
        wanted = tokens[:, :, job.start - part.start : job.end - part.start]
        blocks[job.slot, :, :, job.start : job.end].copy_(send(wanted.contiguous(), blocks.device))
        offset += num_bytes
    if part.has_state:
        for states in cache.state_memories:
            states.live[job.slot].copy_(send(content[offset:].view(torch.float32), states.live.device))
