"""What batch invariance costs: tokens per second of one forward pass, plain and invariant.

    python benchmarks/batch_invariance.py --shapes bundled 135m --dtypes bfloat16 float32

Prefill of one prompt of 128 tokens, and a decode step of 1, 8 and 32 rows that hold 128 tokens each; logits of each
row's last token included. The two take turns within each round, so that a noisy machine disturbs both alike; ratios are
medians of the rounds' ratios (plain over invariant: how many times slower). The last line is JSON.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
from shapes import SHAPES, make_checkpoint

import chairlift
from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.config import AttentionBackend, DType
from chairlift.engine.forward import Forward, InvariantForward, PlainForward
from chairlift.models import load_model, open_checkpoint
from chairlift.models.attention import BatchMetadata, load_backend
from chairlift.models.llama import Llama

_PROMPT_TOKENS = 128
_DECODE_ROWS = (1, 8, 32)
_MIN_SECONDS = 0.2  # a measurement repeats a call until it took as long


@dataclass(frozen=True, slots=True)
class Result:
    """One case of one model: medians over the rounds."""

    shape: str
    dtype: str
    case: str
    plain: float  # tokens per second
    invariant: float
    ratio: float


def main() -> None:
    """Measures, prints a table, and as the last line all figures as JSON."""
    arguments = _parse_arguments()
    results = []
    print(f"{'shape':>8}  {'dtype':>9}  {'case':>12}  {'plain':>9}  {'invariant':>9}  ratio")
    with tempfile.TemporaryDirectory() as scratch:
        for shape in arguments.shapes:
            name = "bundled" if shape == "bundled" else str(make_checkpoint(shape, Path(scratch) / shape))
            for dtype in map(DType, arguments.dtypes):
                model = load_model(open_checkpoint(name), dtype, "cpu", _PROMPT_TOKENS + 1)
                for result in _measure_model(model, shape, dtype, arguments.rounds):
                    results.append(result)
                    print(
                        f"{result.shape:>8}  {result.dtype:>9}  {result.case:>12}  {result.plain:9.1f}"
                        f"  {result.invariant:9.1f}  {result.ratio:5.2f}",
                        flush=True,
                    )
    versions = {"chairlift": chairlift.__version__, "torch": torch.__version__, "python": platform.python_version()}
    settings = {**vars(arguments), "versions": versions, "threads": torch.get_num_threads()}
    print(json.dumps({"settings": settings, "results": [asdict(result) for result in results]}))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=["bundled", *SHAPES], default=["bundled", "135m"])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _measure_model(model: Llama, shape: str, dtype: DType, num_rounds: int) -> list[Result]:
    config = model.config
    params = KVCacheParams(model.rope.dtype, config.num_kv_heads, config.head_dim)
    num_slots = max(_DECODE_ROWS)
    cache = ContinuousBatchingKVCacheManager(params, num_slots, _PROMPT_TOKENS + 1, config.num_layers, ["cpu"])
    attention = load_backend(AttentionBackend.TORCH, config.head_dim, model.rope.dtype)
    plain, invariant = PlainForward(model, attention), InvariantForward(model)
    slots = cache.claim(num_slots)
    prefill = (1, _PROMPT_TOKENS)
    results = []
    for num_rows, num_tokens in (prefill, *((rows, 1) for rows in _DECODE_ROWS)):
        case = f"prefill {num_tokens}" if num_tokens > 1 else f"decode x{num_rows}"
        calls = [_call(forward, cache, slots[:num_rows], num_tokens) for forward in (plain, invariant)]
        rounds = [[num_rows * num_tokens / _seconds(call) for call in calls] for _ in range(num_rounds)]
        ratio = statistics.median(fast / slow for fast, slow in rounds)
        rates = [statistics.median(rates) for rates in zip(*rounds, strict=True)]
        results.append(Result(shape, dtype.value, case, round(rates[0], 1), round(rates[1], 1), round(ratio, 2)))
        if (num_rows, num_tokens) == prefill:
            for slot in slots:  # what decode rows find: a prompt that was prefilled
                cache.step([_PROMPT_TOKENS], cache.fetch([slot], [_PROMPT_TOKENS]))
    return results


def _call(
    forward: Forward, cache: ContinuousBatchingKVCacheManager, slots: list[int], num_tokens: int
) -> Callable[[], object]:
    """A forward pass that can be repeated: it commits nothing, and writes the same each time."""
    held = cache.cache_length_of(slots[0])
    counts = (num_tokens,) * len(slots)
    inputs = cache.fetch(slots, counts)
    cache.ledger.abandon(slots)
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    batch = BatchMetadata(
        row_offsets=offsets,
        positions=torch.arange(held, held + num_tokens).repeat(len(slots)),
        slots=tuple(slots),
        num_new_tokens=counts,
        num_cached_tokens=(held,) * len(slots),
        num_decode_rows=len(slots) if num_tokens == 1 else 0,
    )
    input_ids = torch.randint(0, 200, (sum(counts),), generator=torch.Generator().manual_seed(len(slots)))
    ends = offsets[1:].long() - 1

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return forward.logits(forward.hidden(batch, input_ids, inputs[0])[ends])

    return run


def _seconds(call: Callable[[], object]) -> float:
    """Of one call, after one that is not counted."""
    call()
    num_calls = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _MIN_SECONDS:
        call()
        num_calls += 1
    return elapsed / num_calls


if __name__ == "__main__":
    main()
