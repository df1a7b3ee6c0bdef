"""Parts of attention kernels: scores, and a softmax that is computed tile by tile (Milakov and Gimelshein 2018).

Its state are the largest score of each query so far, the sum of exp2(score - largest), and the sum of the values with
these weights. Scores are in powers of 2.
"""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_scores(q: tl.tensor, k: tl.tensor, scale: tl.tensor, softcap: tl.tensor, CAPS: tl.constexpr) -> tl.tensor:
    """`q` [M, D] and `k` [N, D] -> [M, N]; capped scores are c tanh(scale q k / c)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPS:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
    return scores * _LOG2_E


@triton.jit
def add_tile(
    best: tl.tensor, mass: tl.tensor, total: tl.tensor, scores: tl.tensor, v: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds scores [M, N] and values [N, D] to the state: [M], [M], [M, D]. Hidden keys have scores of -inf."""
    newest = tl.maximum(best, tl.max(scores, 1))
    reference = tl.where(newest == -float("inf"), 0.0, newest)  # a query may have seen no key yet
    weights, shrink = tl.exp2(scores - reference[:, None]), tl.exp2(best - reference)
    total = total * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return newest, mass * shrink + tl.sum(weights, 1), total


@triton.jit
def add_sinks(
    best: tl.tensor, mass: tl.tensor, total: tl.tensor, sinks: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Lets a score without a value, [M] in powers of e, take part in each query's softmax."""
    scores = sinks.to(tl.float32) * _LOG2_E
    newest = tl.maximum(best, scores)
    shrink = tl.exp2(best - newest)
    return newest, mass * shrink + tl.exp2(scores - newest), total * shrink[:, None]
