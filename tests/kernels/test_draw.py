"""Tokens drawn by Triton's kernels, against those that operators draw."""

import pytest
import torch
import triton.language as tl

from chairlift.engine.sampling.drawing import DrawBatch, DrawKind, sample_in_graph
from chairlift.engine.sampling.kernels import sample_by_kernels
from chairlift.kernels import draw, peaks
from chairlift.kernels.draw import draw_tokens
from chairlift.params import SamplingParams
from tests.engine.support import make_request, row_of
from tests.support.gpu import needs_gpu
from tests.support.triton_compiler import Compilation, assert_fits

ALL, NOTHING_CUT = 2.0**24, float("inf")  # top-k and top-p of rows that have none

_POINTERS = {
    "table": "*fp64",
    "step": "*i64",
    "peaks": "*fp32",
    "bests": "*i32",
    "shares": "*fp32",
    "found": "*i32",
    "limits": "*fp32",
    "masses": "*fp64",
    "tokens": "*i64",
}
_NUMBERS = ("size", "row_stride", "table_stride", "num_rows", "num_parts", "num_tiles")
_TURNS = ("turn", "first_turn", "shift", "last_shift")


_ALIGNED = {
    "_narrow": ("logits", "table", "peaks", "shares", "found", "limits", "size", "row_stride"),
    "_add_up": ("logits", "table", "peaks", "shares", "found", "limits", "masses", "size", "row_stride"),
    "_pick": (
        *("logits", "table", "step", "peaks", "bests", "limits", "masses", "tokens"),
        *("size", "row_stride"),
    ),
}


def _compilation(kernel: str, num_warps: int, logits: str, **flags: bool) -> Compilation:
    types = {"logits": f"*{logits}", **_POINTERS, **dict.fromkeys((*_NUMBERS, *_TURNS), "i32")}
    return Compilation(
        name="-".join([kernel, logits, *(flag for flag, is_set in flags.items() if is_set)]),
        module=draw.__name__,
        kernel=kernel,
        types=types,
        constants=flags,
        aligned=_ALIGNED[kernel],
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )


COMPILATIONS = tuple(
    compilation
    for logits in ("bf16", "fp32")
    for compilation in (
        *(
            _compilation("_narrow", 8, logits, IS_MASS=is_mass, IS_FIRST=is_first)
            for is_mass in (False, True)
            for is_first in (False, True)
        ),
        *(_compilation("_add_up", 4, logits, IS_CUT=is_cut) for is_cut in (False, True)),
        *(_compilation("_pick", 4, logits, IS_DRAWN=is_drawn) for is_drawn in (False, True)),
    )
)


def table_of(num_rows: int, num_steps: int = 1, seed: int = 1) -> torch.Tensor:
    """A table in which neighbours ask for different things, and a fifth are greedy."""
    knobs = [
        [
            float(row % 5 != 0),
            (0.7, 1.0, 1.5)[row % 3],
            (0.0, 0.02)[row % 2],
            (ALL, 5.0, 40.0, 1.0)[row % 4],
            (NOTHING_CUT, 0.9, 0.5, 0.999)[row // 2 % 4],
        ]
        for row in range(num_rows)
    ]
    uniforms = torch.rand(num_steps, num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.cat((torch.tensor(knobs, dtype=torch.float64).T, uniforms))


def logits_of(num_rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a large tile as for several small ones of a small vocabulary."""
    for module, name in ((peaks, "TILE"), (draw, "_TILE")):
        monkeypatch.setattr(module, name, tl.constexpr(64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles of kernels that were compiled do not change")
@pytest.mark.usefixtures("small_tiles")
class TestInterpreted:
    """Small vocabularies of several tiles."""

    def test_rows_get_the_tokens_that_operators_draw(self) -> None:
        logits, table = logits_of(6, 100), table_of(6, num_steps=2)
        logits[4, 30:50] = logits[4].max() + 1.0  # ties
        step = torch.tensor([1])
        drawn = draw_tokens(logits, table, step, has_cutoffs=True)
        assert drawn.tolist() == sample_in_graph(logits, DrawKind.TOP, table, step).tolist()

    def test_and_with_few_bits_in_parts_of_several_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peaks, "_MOST_BLOCKS", 12)
        logits, table = logits_of(12, 110).bfloat16(), table_of(12)
        first = torch.tensor([0])
        drawn = draw_tokens(logits, table, first, has_cutoffs=True)
        assert drawn.tolist() == sample_in_graph(logits, DrawKind.TOP, table, first).tolist()

    @pytest.mark.parametrize("kind", [DrawKind.GREEDY, DrawKind.MIN_P], ids=str)
    def test_rows_may_be_parts_of_wider_tensors(self, kind: DrawKind) -> None:
        logits, table, first = logits_of(8, 200)[:6, :130], table_of(9)[:, :6], torch.tensor([0])
        table[3], table[4] = ALL, NOTHING_CUT
        drawn = sample_by_kernels(logits, kind, table, first)
        assert drawn.tolist() == sample_in_graph(logits, kind, table, first).tolist()

    def test_the_sampler_s_own_table_is_read_row_by_row(self) -> None:
        fields = [{"temperature": 0.5 + 0.3 * place, "seed": place, "top_p": 1.0 - 0.1 * place} for place in range(4)]
        rows = [row_of(make_request(SamplingParams.model_validate(each))) for each in fields]
        batch = DrawBatch.of(rows, 1, torch.device("cpu"), has_greedy=True)
        assert batch is not None
        logits, first = logits_of(4, 100), torch.tensor([0])
        drawn = sample_by_kernels(logits, batch.kind, batch.table_of(0), first)
        assert drawn.tolist() == sample_in_graph(logits, batch.kind, batch.table_of(0), first).tolist()

    @pytest.mark.parametrize("has_table", [True, False])
    def test_rows_that_are_not_finite_get_no_token(self, has_table: bool) -> None:
        logits = logits_of(5, 150)
        logits[0, 140], logits[1, 3], logits[2], logits[3, :149] = torch.nan, torch.inf, -torch.inf, -torch.inf
        table = table_of(7)[:, 1:6] if has_table else None
        drawn = draw_tokens(logits, table, torch.tensor([0]), has_cutoffs=True)
        assert drawn[:4].tolist() == [-1, -1, -1, 149]
        assert 0 <= drawn[4] < 150

    def test_top_p_keeps_one_and_greedy_takes_the_first_of_equal_ones(self) -> None:
        logits, table = logits_of(2, 150), table_of(2)
        logits[:, 100] = logits[:, 20] = 50.0
        logits[1, 20] = 49.0
        table[0], table[4] = torch.tensor([0.0, 1.0]), 1e-9
        assert draw_tokens(logits, table, torch.tensor([0]), has_cutoffs=True).tolist() == [20, 100]


def test_no_rows_get_no_tokens() -> None:
    assert draw_tokens(torch.empty(0, 150)).tolist() == []


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_a_kernel_compiles_for_a_gpu_without_spills(case: Compilation) -> None:
    assert_fits(case, __name__)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 151_936), (5, 50_257), (64, 128_256)])
def test_a_gpu_draws_what_operators_draw_on_a_cpu(num_rows: int, size: int, dtype: torch.dtype) -> None:
    """Sums are rounded differently, which may move a draw across the border of two tokens, but seldom."""
    logits, table = logits_of(num_rows, size).to(dtype), table_of(num_rows, num_steps=2)
    on_gpu = logits.cuda(), table.cuda()
    num_drawn = num_different = 0
    for kind in (DrawKind.GREEDY, DrawKind.MIN_P, DrawKind.TOP):
        for step in torch.arange(2).unsqueeze(1):
            drawn = sample_by_kernels(on_gpu[0], kind, on_gpu[1], step.cuda())
            assert torch.equal(drawn, sample_by_kernels(on_gpu[0], kind, on_gpu[1], step.cuda())), "the same again"
            num_different += int((drawn.cpu() != sample_in_graph(logits, kind, table, step)).sum())
            num_drawn += num_rows
    assert num_different <= 1 + num_drawn // 50


@needs_gpu
def test_a_gpu_draws_a_row_alike_alone_and_beside_others() -> None:
    logits, table = logits_of(64, 128_256).to("cuda", torch.bfloat16), table_of(64).cuda()
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    together = draw_tokens(logits, table, first, has_cutoffs=True)
    alone = [
        draw_tokens(logits[i : i + 1], table[:, i : i + 1].contiguous(), first, has_cutoffs=True) for i in range(64)
    ]
    assert (torch.cat(alone) == together).float().mean() > 0.96
