"""Drawing tokens: temperature, min-p, top-k and top-p, then inverse transform sampling with a uniform number.

That number depends on nothing but a row's seed and its number of tokens, so neither the batch nor the device changes
what a row draws. A table, float64 `[5 + num_steps, R]`, holds what rows ask for: whether the row draws (1 or 0), its
temperature, min-p, top-k and top-p, then the uniform number for each step of the launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from chairlift.device import compiled_on_gpu, send, to_device
from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed
from chairlift.params import SamplingParams
from chairlift.plan import RowPlan

INVALID_TOKEN = -1  # drawn from logits that are not finite, or if masks allow no token

_NUM_KNOBS = 5
_ALL = 2**24  # a top_k that keeps everything; float32 represents all integers up to it
_HOTTEST = 1e6  # already uniform in float32; more could become inf
_COLDEST = 1e-6  # a smaller temperature could round to zero in float32
_BITS_OF_INF = 0x7F800000  # of float32
_BLOCK = 2**17  # logits drawn from at once on a CPU: they stay in its caches, and malloc reuses their memory

_Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DrawKind(IntEnum):
    """Names what sampling a row needs. A launch uses the highest kind of its rows, which does not change the others."""

    GREEDY = 0
    RANDOM = 1  # a temperature
    MIN_P = 2  # min-p besides
    TOP = 3  # top-k or top-p besides, which need a cutoff

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        if params.is_greedy:
            return cls(cls.GREEDY)
        if params.top_k > 0 or params.top_p < 1.0:
            return cls(cls.TOP)
        return cls(cls.MIN_P if params.min_p else cls.RANDOM)


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The rows of a launch that draw."""

    kind: DrawKind
    rows: torch.Tensor  # int64 [R]
    table: torch.Tensor  # float64 [5 + num_steps, R]

    @classmethod
    def of(
        cls,
        rows: Sequence[RowPlan],
        num_steps: int,
        device: torch.device,
        guessed: Guessed = NOTHING_GUESSED,
        *,
        has_greedy: bool = False,
    ) -> Self | None:
        """`rows`: by place. None if every row is greedy. `has_greedy`: greedy rows beside others are included."""
        places = [place for place, row in enumerate(rows) if not row.key.params.is_greedy]
        if not places:
            return None
        if has_greedy:
            places = list(range(len(rows)))
        drawing = [rows[place] for place in places]
        kind = max(DrawKind.of(row.key.params) for row in drawing)
        num_guessed = [len(guessed.get(place, ())) for place in places] if guessed else ()
        return cls(
            kind, to_device(places, torch.int64, device), send(draw_table(drawing, num_steps, num_guessed), device)
        )

    def table_of(self, step: int) -> torch.Tensor:
        """Returns the table from that step of the launch on."""
        return torch.cat((self.table[:_NUM_KNOBS], self.table[_NUM_KNOBS + step :])) if step else self.table

    def draw(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """float32 `[N, vocab]` -> int64 `[R]`: the tokens of these rows, for that step of the launch."""
        num_rows = len(self.rows)
        if logits.device.type == "cpu":
            num_rows = max(_BLOCK // logits.shape[-1], torch.get_num_threads())  # each thread has a row
        blocks = zip(torch.split(self.rows, num_rows), torch.split(self.table, num_rows, dim=1), strict=True)
        drawn = [draw(logits[rows], self.kind, table, table[_NUM_KNOBS + step]) for rows, table in blocks]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def draw_table(rows: Sequence[RowPlan], num_steps: int, num_guessed: Sequence[int] = ()) -> torch.Tensor:
    """The table for the steps of a launch, on the host."""
    knobs = np.array([_knobs_of(row.key.params) for row in rows])
    table = np.concatenate((knobs.T, uniforms(rows, num_steps, num_guessed)))
    return torch.from_numpy(np.ascontiguousarray(table))  # numpy keeps the order of `knobs.T`, by columns


def greedy_table(num_steps: int, num_rows: int) -> torch.Tensor:
    """A table of rows that do not draw."""
    knobs = torch.tensor(_knobs_of(SamplingParams(temperature=0.0)), dtype=torch.float64)
    return torch.nn.functional.pad(knobs, (0, num_steps)).unsqueeze(1).repeat(1, num_rows)


def _knobs_of(params: SamplingParams) -> list[float]:
    """A sequence's entries in the first rows of a table; harmless ones if it does not draw."""
    return [
        float(not params.is_greedy),
        min(max(params.temperature, _COLDEST), _HOTTEST),
        params.min_p,
        min(params.top_k, _ALL) if params.top_k > 0 else _ALL,
        # A row without top-p must not lose its tail to rounding because another row has top-p.
        params.top_p if params.top_p < 1.0 else np.inf,
    ]


def draw(logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """float32 `[R, vocab]`, the table, and its row of uniform numbers for the step, float64 `[R]` -> int64 `[R]`."""
    _, temperature, min_p, top_k, top_p = table[:_NUM_KNOBS].unsqueeze(2)  # [R, 1] each
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.float()  # the likeliest token is at 0
    if kind >= DrawKind.MIN_P:
        scaled = scaled.masked_fill(scaled < min_p.float().log(), -torch.inf)
    if kind is DrawKind.TOP:
        find_cutoff = cutoff_by_sorting if scaled.device.type == "cpu" else cutoff_by_bisection
        scaled = scaled.masked_fill(scaled < find_cutoff(scaled, top_k.float(), top_p.float()), -torch.inf)
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp_(max=logits.shape[-1] - 1)  # NaN logits must not become an index out of range


def cutoff_by_sorting(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """float32 `[R, vocab]` of at most 0, and `[R, 1]` each -> the smallest logit that top-k and, of those, top-p keep.

    NumPy sorts with vector instructions: 32 rows of 128,000 take a twentieth of torch's time on a CPU.
    """
    descending = torch.from_numpy(np.sort(scaled.numpy(), axis=-1)).flip(-1)
    kth = descending.gather(1, (top_k.long() - 1).clamp(max=scaled.shape[-1] - 1))
    probabilities = descending.masked_fill(descending < kth, -torch.inf).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    num_kept = (mass_before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.maximum(kth, descending.gather(1, num_kept - 1))


def cutoff_by_bisection(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The same without sorting, which takes a GPU several times as long as reading the logits once for each bit."""
    kth = _bisect(_num_within, scaled, top_k)
    return -torch.minimum(kth, _bisect(_mass_within, scaled, top_p * _mass_within(scaled, _next(kth))))


def _bisect(within: _Measure, scaled: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The smallest distance from the likeliest token, `[R, 1]`, within which tokens reach what is wanted; inf: none.

    Found bit by bit from the highest: non-negative floats have the same order as their bits as integers.
    """
    found = torch.zeros_like(wanted, dtype=torch.int32)
    for bit in reversed(range(31)):
        tried = found | (1 << bit)
        is_short = (within(scaled, tried.view(torch.float32)) < wanted) & (tried <= _BITS_OF_INF)
        found = torch.where(is_short, tried, found)
    return found.view(torch.float32)


def _next(distance: torch.Tensor) -> torch.Tensor:
    """The next larger float32; inf for inf."""
    return (distance.view(torch.int32) + 1).clamp(max=_BITS_OF_INF).view(torch.float32)


@compiled_on_gpu
def _num_within(scaled: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """`[R, 1]`: how many tokens are nearer to the likeliest one than the limit."""
    return (-scaled < limit).sum(dim=-1, keepdim=True)


@compiled_on_gpu
def _mass_within(scaled: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """`[R, 1]`: the probability of these tokens, in units of the likeliest one's."""
    return torch.where(-scaled < limit, scaled.exp(), 0.0).sum(dim=-1, keepdim=True)


def uniforms(rows: Sequence[RowPlan], num_steps: int, num_guessed: Sequence[int] = ()) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), `[num_steps, R]`: a hash of each row's seed and of the index of the token to draw.

    `num_guessed`: by row, guessed tokens between the row's own tokens and that token; empty: none.
    The finalizer of SplitMix64 (Steele, Lea & Flood 2014), its state stepped to the token's index; 32 bits are used.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    seeds = np.array([row.key.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64)
    indices = np.array([row.num_output_tokens + 1 for row in rows], dtype=np.uint64)
    if num_guessed:
        indices += np.array(num_guessed, dtype=np.uint64)
    steps = np.arange(num_steps, dtype=np.uint64)[:, None]
    state = _mix(seeds) + golden * (indices + steps)
    return (_mix(state) >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# What a CUDA graph can record: sampling in tensors of fixed size and place, for rows that need only the above.


@dataclass(frozen=True, slots=True)
class GraphSampling:
    """Says how a sampling graph samples the rows of a launch."""

    kind: DrawKind
    table: torch.Tensor | None  # on the host; None: no row draws


def prepare_graph_sampling(rows: Sequence[RowPlan], num_steps: int) -> GraphSampling | None:
    """None if one of the rows needs more than a graph offers."""
    if not all(map(_is_graph_enough, rows)):
        return None
    kind = max((DrawKind.of(row.key.params) for row in rows), default=DrawKind.GREEDY)
    return GraphSampling(kind, None if kind is DrawKind.GREEDY else draw_table(rows, num_steps))


def sample_in_graph(logits: torch.Tensor, kind: DrawKind, table: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Logits `[N, vocab]` of any float type -> int64 `[N]`, INVALID_TOKEN where there is none, as `Sampler` would.

    `table`: on the device, possibly of more steps; `step`: int64 `[1]`, on the device. All shapes depend only on those
    of the arguments.
    """
    logits = logits.float()
    best, tokens = logits.max(dim=-1)  # NaN, if there is one, counts as the maximum
    if kind is not DrawKind.GREEDY:
        drawn = draw(logits, kind, table, table[_NUM_KNOBS:].index_select(0, step).squeeze(0))
        tokens = torch.where(table[0] > 0, drawn, tokens)
    return tokens.masked_fill_(~best.isfinite(), INVALID_TOKEN)


def _is_graph_enough(row: RowPlan) -> bool:
    key = row.key
    has_mask = key.grammar is not None or key.token_filter is not None
    may_not_end = bool(key.end_token_ids) and row.num_output_tokens < key.min_tokens
    wants_more = key.params.logit_bias or key.params.logprobs is not None or key.params.has_penalty
    return not (has_mask or may_not_end or wants_more)
