"""Tokens drawn from logits: our kernels, and torch's operators as a graph has them."""

import functools

import torch

from chairlift.engine.sampling.drawing import DrawKind, sample_in_graph
from chairlift.engine.sampling.kernels import SampleRows, sample_by_kernels
from on_gpu.kernel_bench import Bench

# A row's knobs: whether it draws, temperature, min-p, top-k, top-p. These cut nothing, or what top-p leaves.
_UNCUT = (1.0, 1.0, 0.0, 2.0**24, float("inf"))
_TOP_P = (1.0, 0.8, 0.0, 2.0**24, 0.9)
_KNOBS = {DrawKind.GREEDY: _UNCUT, DrawKind.RANDOM: _UNCUT, DrawKind.TOP: _TOP_P}


def measure(bench: Bench, *, is_tiny: bool) -> None:
    """Greedy rows, rows that draw from all tokens, and rows with top-p; 1, 32 and 256 of them."""
    vocab_size, dtype = (700, torch.float16) if is_tiny else (128_256, torch.bfloat16)
    step = torch.zeros(1, dtype=torch.int64, device=bench.device)
    for num_rows in (2,) if is_tiny else (1, 32, 256):
        logits = (3 * torch.randn(num_rows, vocab_size, device=bench.device)).to(dtype)
        uniforms = torch.rand(1, num_rows, dtype=torch.float64, device=bench.device)
        for kind, knobs in _KNOBS.items():
            known = torch.tensor(knobs, dtype=torch.float64, device=bench.device)
            table = torch.cat((known[:, None].expand(-1, num_rows), uniforms))
            wanted = sample_in_graph(logits, kind, table, step)
            samplers: dict[str, SampleRows] = {"operators": sample_in_graph, "triton": sample_by_kernels}
            for name, sample in samplers.items():
                work = functools.partial(_draw, sample, logits, kind, table, step)
                bench.run(f"{kind.name.lower()}, {num_rows} rows", name, work, wanted, logits.nbytes)


def _draw(
    sample: SampleRows, logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, step: torch.Tensor, _index: int
) -> torch.Tensor:
    return sample(logits, kind, table, step)
