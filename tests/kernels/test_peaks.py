"""Bias, masks and penalties that a kernel applies, against operators; and the largest logits that it finds."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from chairlift.engine.sampling.drawing import INVALID_TOKEN
from chairlift.engine.sampling.kernels import SampleChanged, sample_by_kernels
from chairlift.engine.sampling.sampler import Sampler
from chairlift.engine.sampling.token_rules import BadWords, RuleFilter, TokenRules
from chairlift.kernels import draw, peaks
from chairlift.kernels.changes import NOTHING, Additions, Changes, Penalties, TokenSets
from chairlift.kernels.peaks import find_peaks
from chairlift.params import SamplingParams
from chairlift.plan import RowPlan, SamplingKey, Work
from tests.support.changes_reference import changed
from tests.support.gpu import needs_gpu
from tests.support.triton_compiler import Compilation, assert_fits

VOCAB, NUM_ROWS, NUM_SLOTS = 150, 6, 8
CPU = torch.device("cpu")

_TYPES = {
    **dict.fromkeys(("bests", "pieces", "ends", "tokens", "allowed", "allowed_index", "masks", "mask_index"), "*i32"),
    **dict.fromkeys(("slots", "num_generated"), "*i32"),
    **dict.fromkeys(("peaks", "values", "factors", "changed"), "*fp32"),
    "is_in_prompt": "*i1",
    **dict.fromkeys(("size", "row_stride", "num_parts", "num_tiles", "num_rows"), "i32"),
    **dict.fromkeys(("allowed_width", "mask_width", "state_stride"), "i32"),
}
_FLAGS = ("HAS_ADDITIONS", "HAS_ALLOWED", "HAS_MASKS", "HAS_PENALTIES")
_POINTERS = tuple(name for name, kind in _TYPES.items() if kind.startswith("*"))


def _compilation(logits: str, *flags: str) -> Compilation:
    return Compilation(
        name="-".join([logits, *flags]),
        module=peaks.__name__,
        kernel="_find_peaks",
        types={"logits": f"*{logits}", **_TYPES},
        constants={flag: flag in flags for flag in _FLAGS},
        aligned=("logits", *_POINTERS, "size", "row_stride", "state_stride"),
        options={"num_warps": 4, "enable_fp_fusion": False},
        stack_bytes=8 if flags == _FLAGS else 0,  # a pointer, by Triton 3.7
    )


COMPILATIONS = (
    *(_compilation(logits, *flags) for logits in ("bf16", "fp32") for flags in ((), _FLAGS)),
    *(_compilation("bf16", flag) for flag in _FLAGS),
)


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_the_kernel_compiles_for_a_gpu_without_spills(case: Compilation) -> None:
    assert_fits(case, __name__)


def logits_of(num_rows: int = NUM_ROWS, size: int = VOCAB) -> torch.Tensor:
    return 3.0 * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0))


def changes_of(num_rows: int = NUM_ROWS, size: int = VOCAB) -> Changes:
    """Changes every second or third row; one has two pieces, and one forbids a token that it biases."""
    rng = np.random.default_rng(1)
    pieces = [np.sort(rng.choice(size, count, replace=False)) for count in (30, 9, size, 1)]
    values = [rng.normal(0, 5, len(piece)) for piece in pieces]
    values[1][:] = -np.inf
    first = np.searchsorted([0, 0, 2, num_rows - 1], np.arange(num_rows + 1))
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (2, 2, -(-size // 32)), dtype=np.int32))
    index = torch.tensor([[NOTHING, 1, 0][row % 3] for row in range(num_rows)], dtype=torch.int32)
    shape = NUM_SLOTS, size
    return Changes(
        Additions(
            torch.from_numpy(first.astype(np.int32)),
            torch.from_numpy(np.cumsum([0, *map(len, pieces)]).astype(np.int32)),
            torch.from_numpy(np.concatenate(pieces).astype(np.int32)),
            torch.from_numpy(np.concatenate(values).astype(np.float32)),
        ),
        TokenSets(words[0], index),
        TokenSets(words[1], index.roll(1)),
        Penalties(
            torch.tensor([row % NUM_SLOTS if row % 2 else NOTHING for row in range(num_rows)], dtype=torch.int32),
            torch.from_numpy(rng.uniform(0.3, 2.0, (3, num_rows)).astype(np.float32)),
            torch.from_numpy(rng.integers(0, 3, shape, dtype=np.int32)),
            torch.from_numpy(rng.random(shape) < 0.3),
        ),
    )


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a large tile as for several small ones of a small vocabulary."""
    for module, name in ((peaks, "TILE"), (draw, "_TILE")):
        monkeypatch.setattr(module, name, tl.constexpr(64))


def row_of(place: int, fields: dict[str, Any], history: bool, rules: TokenRules | None) -> RowPlan:
    """A row after some tokens, which has its own seed and slot."""
    params = SamplingParams.model_validate({"seed": place, **fields})
    ends = frozenset({3, 77}) if params.min_tokens else frozenset[int]()
    token_filter = None if rules is None else RuleFilter(rules)
    key = SamplingKey(str(place), params, place, 2, ends, params.min_tokens, token_filter=token_filter)
    forbidden = () if token_filter is None else token_filter.forbidden_after([1, 2], 2)
    work = Work(is_sampled=True, history=[5, 6, 40, 40, 41] if history else None, forbidden=forbidden)
    return RowPlan(key, place, 4, [9], 3, work)


WORDS = TokenRules(BadWords([[11], [140], [64]]), torch.arange(VOCAB) % 3 == 0)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
ASKED: list[tuple[dict[str, Any], TokenRules | None]] = [
    ({"temperature": 0.0, **PENALTIES}, None),
    ({"temperature": 0.8, "top_p": 0.9, "logit_bias": {140: 6.0, 3: -2.0, 64: 5.5}}, None),
    ({"temperature": 0.0}, None),
    ({"temperature": 1.2, "top_k": 30, "repetition_penalty": 1.7, "logit_bias": {40: 9.0}}, WORDS),
    ({"temperature": 1.0, "min_p": 0.02, "min_tokens": 5, "logit_bias": {3: 20.0, 77: 20.0}}, None),
    ({"temperature": 0.0, "min_tokens": 4, "logit_bias": {3: 50.0}}, TokenRules(None, WORDS.refused)),
    ({"temperature": 1.5}, TokenRules(WORDS.bad_words, None)),
    ({"temperature": 0.7, "frequency_penalty": 1.9, "logit_bias": dict.fromkeys(range(100), 1.5)}, None),
]


def tokens_of(kernels: SampleChanged | None, num_steps: int) -> list[list[int]]:
    sampler = Sampler(VOCAB, NUM_SLOTS, CPU, kernels)
    rows = [row_of(place, fields, "penalty" in str(fields), rules) for place, (fields, rules) in enumerate(ASKED)]
    batch = sampler.prepare(rows, num_steps)
    steps = torch.stack([logits_of(len(rows)).roll(step, 1).half() for step in range(num_steps)])
    return [sampler.sample(logits, batch, step).tokens.tolist() for step, logits in enumerate(steps)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles of kernels that were compiled do not change")
@pytest.mark.usefixtures("small_tiles")
class TestInterpreted:
    """Small vocabularies of several tiles."""

    def test_rows_beside_each_other_get_the_tokens_that_operators_draw_whatever_each_asks_for(self) -> None:
        expected = tokens_of(None, 3)
        assert tokens_of(sample_by_kernels, 3) == expected
        assert len({*expected[0], *expected[1], *expected[2]}) > 6
        assert all(token % 3 for step in expected for token in (step[3], step[5]))

    @pytest.mark.parametrize("kept", [*Changes._fields, "all"])
    def test_logits_become_what_operators_make_of_them(self, kept: str) -> None:
        changes = changes_of()
        if kept != "all":
            changes = Changes(**{kept: getattr(changes, kept)})
        logits = logits_of().half()
        expected = changed(logits, changes)
        found = find_peaks(logits, changes)
        assert torch.equal(found.logits, expected)
        assert torch.equal(found.peaks.amax(dim=1), expected.amax(dim=1))

    def test_a_logit_that_is_no_number_counts_unless_its_token_is_forbidden_by_a_mask(self) -> None:
        logits = logits_of(2)
        logits[:, 5] = torch.nan
        words = torch.full((1, 5), -1, dtype=torch.int32)
        words[0, 0] = ~(1 << 5)
        masks = TokenSets(words, torch.tensor([NOTHING, 0], dtype=torch.int32))
        tokens = draw.draw_tokens(logits, changes=Changes(masks=masks)).tolist()
        logits[1, 5] = -torch.inf
        assert tokens == [INVALID_TOKEN, int(logits[1].argmax())]

    def test_a_row_without_an_allowed_token_gets_none_beside_others(self) -> None:
        logits, nothing = logits_of(2), torch.zeros(1, 5, dtype=torch.int32)
        masks = TokenSets(nothing, torch.tensor([0, NOTHING], dtype=torch.int32))
        expected = [INVALID_TOKEN, int(logits[1].argmax())]
        assert draw.draw_tokens(logits, changes=Changes(masks=masks)).tolist() == expected


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_changes_logits_as_operators_do_on_a_cpu(dtype: torch.dtype) -> None:
    logits, changes = logits_of(64, 50_257).to(dtype), changes_of(64, 50_257)
    on_gpu = Changes(**{name: type(part)(*(each.cuda() for each in part)) for name, part in changes._asdict().items()})
    assert torch.equal(find_peaks(logits.cuda(), on_gpu).logits.cpu(), changed(logits, changes))
