"""Tokens drawn from logits: our kernels, and torch's operators as a graph has them, or outside of one."""

import functools

import torch

from chairlift.engine.sampling.drawing import DrawKind, sample_in_graph
from chairlift.engine.sampling.kernels import SampleRows, sample_by_kernels
from chairlift.kernels.changes import Changes, Penalties, TokenSets
from on_gpu.kernel_bench import Bench

# A row's knobs: whether it draws, temperature, min-p, top-k, top-p. These cut nothing, or what top-p leaves.
_UNCUT = (1.0, 1.0, 0.0, 2.0**24, float("inf"))
_TOP_P = (1.0, 0.8, 0.0, 2.0**24, 0.9)
_KNOBS = {DrawKind.GREEDY: _UNCUT, DrawKind.RANDOM: _UNCUT, DrawKind.TOP: _TOP_P}


def measure(bench: Bench, *, is_tiny: bool) -> None:
    """Greedy rows, rows that draw from all tokens, and rows with top-p, also with masks and penalties.

    1, 32 and 256 of them.
    """
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
        _measure_changed(bench, logits, table, step)


def _measure_changed(bench: Bench, logits: torch.Tensor, table: torch.Tensor, step: torch.Tensor) -> None:
    """Rows with top-p that all have a mask, as of a grammar, and penalties."""
    changes = _changes_of(logits)
    wanted = _sample_changed(logits, table, step, changes, 0)
    case = f"changed top, {len(logits)} rows"
    bench.run(case, "operators", functools.partial(_sample_changed, logits, table, step, changes), wanted)

    def draw(_index: int) -> torch.Tensor:
        return sample_by_kernels(logits, DrawKind.TOP, table, step, changes)

    bench.run(case, "triton", draw, wanted)


def _changes_of(logits: torch.Tensor) -> Changes:
    """Changes that every row asks for, from a state of its own."""
    (num_rows, size), device = logits.shape, logits.device
    every = torch.arange(num_rows, dtype=torch.int32, device=device)
    words = torch.randint(-(2**31), 2**31 - 1, (num_rows, -(-size // 32)), dtype=torch.int32, device=device)
    counts = torch.randint(0, 3, (num_rows, size), dtype=torch.int32, device=device)
    factors = torch.tensor([[1.2], [0.5], [0.5]], device=device).repeat(1, num_rows)
    return Changes(masks=TokenSets(words, every), penalties=Penalties(every, factors, counts, counts == 1))


def _sample_changed(
    logits: torch.Tensor, table: torch.Tensor, step: torch.Tensor, changes: Changes, _index: int
) -> torch.Tensor:
    """Samples by operators, which change the logits first."""
    masks, penalties = changes.masks, changes.penalties
    assert masks is not None
    assert penalties is not None
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (masks.words.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    changed = logits.float().masked_fill(~is_allowed, -torch.inf)
    repetition, presence, frequency = penalties.factors.unsqueeze(2)
    is_generated = penalties.num_generated > 0
    penalised = torch.where(changed > 0, changed / repetition, changed * repetition)
    changed = torch.where(penalties.is_in_prompt | is_generated, penalised, changed)
    changed -= frequency * penalties.num_generated + presence * is_generated
    return sample_in_graph(changed, DrawKind.TOP, table, step)


def _draw(
    sample: SampleRows, logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, step: torch.Tensor, _index: int
) -> torch.Tensor:
    return sample(logits, kind, table, step)
