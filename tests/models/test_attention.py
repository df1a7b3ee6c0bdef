"""Tests what every backend must do: on a CPU torch's, and others with plain references of their kernels; on a GPU all.

The references refuse what the kernels refuse or take in silence, so that on a CPU these tests check every argument.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.models.attention import (
    AttentionConfig,
    Backend,
    BatchMetadata,
    PaddingBackend,
    Projections,
    flash,
    token_slots,
    view_length,
)
from chairlift.models.attention.flash import is_varlen_available
from chairlift.models.attention.torch_sdpa import TorchBackend, attend_alone
from chairlift.models.attention.triton import TritonBackend
from tests.models import attention_support as support
from tests.models.attention_support import LAYER, POISON, Row, Tokens, attend, make_cache
from tests.support import flash_attn_reference
from tests.support.gpu import (
    GPU_MARKS,
    needs_gpu,
    needs_package,
    no_waiting,
    skipped_where_flash_attn_lacks_kernels,
)

HEAD_DIM = 64
PAGE_SIZE = 256
DECODE, PREFILL, MIXED = support.DECODE, support.PREFILL, [*support.DECODE, *support.PREFILL]
in_every_batch = pytest.mark.parametrize("rows", support.BATCHES.values(), ids=support.BATCHES.keys())
in_every_phase = pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
PLAIN = support.plain(HEAD_DIM)
VERSION_3_MODULES = {"flash_attn_3": "flash_attn_interface", "fa3_fwd": "fa3_fwd_interface"}


@dataclass(frozen=True)
class Loaded:
    """A backend, and where its kernels (or their references) run."""

    name: str
    device: torch.device
    layers: support.Layers = field(default_factory=lambda: PLAIN)

    @property
    def backend(self) -> Backend:
        if self.name in ("torch_in_place", "torch_copied"):
            return TorchBackend(self.layers, is_in_place=self.name == "torch_in_place")
        if self.name == "torch_varlen":
            return flash.TorchVarlenBackend(self.layers)
        if self.name in VERSION_3_MODULES:
            if self.name == "fa3_fwd" and any(layer.window is not None for layer in self.layers.values()):
                pytest.skip("this build has no windows")
            return flash.FlashAttn3Backend(self.layers, VERSION_3_MODULES[self.name])
        if self.name == "triton":
            return TritonBackend(self.layers)
        return flash.FlashAttnBackend(self.layers)

    def tokens(self, rows: list[Row], heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tokens:
        if self.name == "fa3_fwd" and dtype is torch.float16:
            pytest.skip("this build has no kernels for float16")
        return support.random_tokens(rows, heads, kv_heads, HEAD_DIM, dtype).to(self.device)

    def cache(self, rows: list[Row], tokens: Tokens, background: float = 0.0) -> ContinuousBatchingKVCacheManager:
        return make_cache(rows, tokens, background=background, page_size=PAGE_SIZE)

    def attend(self, rows: list[Row], tokens: Tokens, background: float = 0.0) -> torch.Tensor:
        """The results for the rows' new tokens, in slots that hold `background` elsewhere."""
        return attend(self.cache(rows, tokens, background), rows, tokens, self.backend)

    def batch(self, rows: list[Row]) -> BatchMetadata:
        return support.batch_of(rows, self.device)


def assert_near_reference(
    output: torch.Tensor, tokens: Tokens, rows: list[Row], layers: support.Layers | None = None
) -> None:
    """Compares with plain attention over padded copies, in the number format of the output."""
    support.assert_near(output, support.new_parts(support.reference(tokens, layers), rows))


# What each backend needs on a GPU
has_varlen = is_varlen_available([HEAD_DIM], torch.bfloat16)
KERNELS: dict[str, list[pytest.MarkDecorator]] = {
    "flash_attn": [needs_package("flash_attn")],
    "flash_attn_3": [needs_package("flash_attn_interface")],
    "torch_varlen": [pytest.mark.skipif(not has_varlen, reason="needs torch's ragged kernels (torch 2.12)")],
    "torch_copied": [],
}
ON_GPU = {**KERNELS, "fa3_fwd": [needs_package("fa3_fwd_interface")], "triton": []}
RECORDABLE = [  # in CUDA graphs
    *(pytest.param((name, "cpu"), id=f"{name}, reference") for name in KERNELS),
    *(pytest.param((name, "cuda"), id=name, marks=[*GPU_MARKS, *ON_GPU[name]]) for name in ON_GPU),
]
WITH_SINKS = [case for case in RECORDABLE if "torch" not in str(case.id) and "fa3_fwd" not in str(case.id)]
CASES = [*RECORDABLE, pytest.param(("torch_in_place", "cpu"), id="torch_in_place")]  # only a CPU reads slots in place


@pytest.fixture(params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    name, device = request.param
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(flash_attn_reference.installed())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(varlen, "varlen_attn", flash_attn_reference.varlen_attn)
        elif name == "flash_attn":
            stack.enter_context(skipped_where_flash_attn_lacks_kernels())
        yield Loaded(name, torch.device(device))


@in_every_batch
def test_attention_equals_attention_over_padded_copies(loaded: Loaded, rows: list[Row]) -> None:
    assert_equal_to_padded_copies(loaded, rows, torch.bfloat16)


@in_every_phase
def test_so_it_does_in_float16(loaded: Loaded, rows: list[Row]) -> None:
    assert_equal_to_padded_copies(loaded, rows, torch.float16)


def assert_equal_to_padded_copies(loaded: Loaded, rows: list[Row], dtype: torch.dtype) -> None:
    tokens = loaded.tokens(rows, dtype=dtype)
    output = loaded.attend(rows, tokens)
    assert output.dtype == dtype
    assert_near_reference(output, tokens, rows)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1), (9, 3)])
def test_query_heads_share_key_heads_in_every_ratio(loaded: Loaded, num_heads: int, num_kv_heads: int) -> None:
    tokens = loaded.tokens(MIXED, num_heads, num_kv_heads)
    assert_near_reference(loaded.attend(MIXED, tokens), tokens, MIXED)


@pytest.mark.parametrize(
    ("window", "rows"),
    [
        *(pytest.param(7, rows, id=f"7-{name}") for name, rows in support.BATCHES.items()),
        *((window, rows) for window in (1, 4000) for rows in (DECODE, PREFILL, MIXED)),
    ],
)
def test_scale_and_the_layer_s_window_are_obeyed(loaded: Loaded, rows: list[Row], window: int) -> None:
    tokens, layers = loaded.tokens(rows), support.layers(0.2, (None, None, window))
    output = replace(loaded, layers=layers).attend(rows, tokens, background=POISON)
    assert_near_reference(output, tokens, rows, layers)


@in_every_batch
def test_a_soft_cap_is_obeyed_by_those_that_have_one(loaded: Loaded, rows: list[Row]) -> None:
    if loaded.name == "torch_varlen":
        assert not is_varlen_available([HEAD_DIM], torch.bfloat16, has_softcap=True)
        return
    tokens, layers = loaded.tokens(rows), support.layers(0.125, (None, 4, 12), 0.7)
    assert_near_reference(replace(loaded, layers=layers).attend(rows, tokens), tokens, rows, layers)


@in_every_phase
@pytest.mark.parametrize("loaded", WITH_SINKS, indirect=True)
def test_sinks_take_their_share(loaded: Loaded, rows: list[Row]) -> None:
    tokens = loaded.tokens(rows)
    layers = {index: AttentionConfig(0.2, window, has_sinks=True) for index, window in enumerate((None, None, 7))}
    loaded, sinks = replace(loaded, layers=layers), torch.linspace(-2.0, 3.0, 4, device=loaded.device)
    output = attend(loaded.cache(rows, tokens, POISON), rows, tokens, loaded.backend, sinks)
    support.assert_near(output, support.new_parts(support.reference(tokens, layers, sinks), rows))


# The last one has 33 keys: a remainder of one beyond a block of 32.
LONG = [
    Row(3, 520, 1),
    Row(0, 255, 1),
    Row(17, 256, 1),
    Row(9, 511, 1),
    Row(30, 300, 40),
    Row(5, 0, 270),
    Row(11, 25, 8),
]


@pytest.mark.parametrize("rows", [LONG, LONG[:4], LONG[4:]], ids=["mixed", "decode", "prefill"])
def test_rows_of_more_than_a_page_of_tokens(loaded: Loaded, rows: list[Row]) -> None:
    tokens = loaded.tokens(rows)
    assert_near_reference(loaded.attend(rows, tokens), tokens, rows)


@pytest.mark.parametrize("rows", [[Row(2, 511, 1), Row(7, 9, 1)], [Row(2, 411, 101)]], ids=["decode", "prefill"])
def test_a_row_that_fills_its_slot_to_the_last_token(loaded: Loaded, rows: list[Row]) -> None:
    tokens = loaded.tokens(rows)
    manager = make_cache(rows, tokens, page_size=PAGE_SIZE, margin=0)
    assert manager.max_seq_len == 512
    assert_near_reference(attend(manager, rows, tokens, loaded.backend), tokens, rows)


@in_every_phase
def test_poison_beyond_every_row_and_in_free_slots_changes_no_output(loaded: Loaded, rows: list[Row]) -> None:
    tokens = loaded.tokens(rows)
    clean = loaded.attend(rows, tokens)
    for background in (POISON, -POISON):
        torch.testing.assert_close(loaded.attend(rows, tokens, background), clean, rtol=0, atol=0)


@in_every_phase
def test_new_keys_and_values_are_appended_in_place_and_nothing_else_is_written(loaded: Loaded, rows: list[Row]) -> None:
    tokens = loaded.tokens(rows)
    manager = loaded.cache(rows, tokens, background=POISON)
    expected = manager.blocks[0].clone()
    for i, row in enumerate(rows):
        end = row.num_cached + row.num_new
        expected[row.slot, 0, LAYER, row.num_cached : end] = tokens.key[i, row.num_cached : end]
        expected[row.slot, 1, LAYER, row.num_cached : end] = tokens.value[i, row.num_cached : end]
    attend(manager, rows, tokens, loaded.backend)
    assert torch.equal(manager.blocks[0], expected)


@in_every_phase
def test_each_step_of_a_launch_sees_what_the_earlier_ones_wrote(loaded: Loaded, rows: list[Row]) -> None:
    ends = [replace(row, num_new=row.num_new + 3) for row in rows]
    tokens = loaded.tokens(ends)
    manager = loaded.cache(rows, tokens)
    inputs = manager.fetch([row.slot for row in rows], [row.num_new for row in rows], num_steps=4)
    for step in range(4):
        if step:
            inputs = manager.increment_cache_lengths(inputs, loaded.batch(rows).row_offsets)
            rows = [Row(row.slot, row.num_cached + row.num_new, 1) for row in rows]
        attend_layer = loaded.backend.prepare(loaded.batch(rows), inputs[0])
        assert_near_reference(attend_layer(LAYER, Projections(*tokens.new_parts(rows))), tokens, rows)


@pytest.mark.parametrize(("kind", "rows"), [("decode", DECODE), ("prefill", PREFILL), ("mixed", MIXED)])
def test_version_3_splits_the_keys_of_rows_that_decode_and_of_no_others(kind: str, rows: list[Row]) -> None:
    calls: list[tuple[int, int]] = []

    def note(query: torch.Tensor, *_: object, num_splits: int, **__: object) -> torch.Tensor:
        calls.append((len(query), num_splits))
        return query

    functions = {**flash_attn_reference.VERSION_3, "flash_attn_with_kvcache": note}
    with flash_attn_reference.module("flash_attn_interface", functions):
        loaded = Loaded("flash_attn_3", torch.device("cpu"))
        loaded.attend(rows, loaded.tokens(rows))
    of_decode, of_prefill = (len(DECODE), 0), (sum(row.num_new for row in PREFILL), 1)
    expected = {"decode": [of_decode], "prefill": [of_prefill], "mixed": [of_decode, of_prefill]}
    assert calls == expected[kind]


def refuse(reason: str) -> Callable[..., torch.Tensor]:
    def attend(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError(reason)

    return attend


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("This flash attention build does not support local attention.", pytest.skip.Exception),
        ("This flash attention build does not support softcap.", pytest.skip.Exception),
        ("This flash attention build does not support such rows.", RuntimeError),
    ],
)
@in_every_phase
def test_only_kernels_that_version_2_was_built_without_are_not_tested(
    reason: str, outcome: type[BaseException], rows: list[Row]
) -> None:
    functions = dict.fromkeys(("flash_attn_with_kvcache", "flash_attn_varlen_func"), refuse(reason))
    with flash_attn_reference.module("flash_attn", functions), skipped_where_flash_attn_lacks_kernels():
        loaded = Loaded("flash_attn", torch.device("cpu"))
        with pytest.raises(outcome, match=reason):
            loaded.attend(rows, loaded.tokens(rows))


@pytest.mark.parametrize(("rows", "is_given"), [(DECODE, True), (PREFILL, False), (MIXED, True)])
def test_version_3_leaves_rows_that_decode_to_version_2(rows: list[Row], is_given: bool) -> None:
    other = support.layers(0.5)  # so that one sees which computed what
    with flash_attn_reference.installed():
        backend = flash.FlashAttn3Backend(PLAIN, version_2=flash.FlashAttnBackend(other))
        loaded = Loaded("flash_attn_3", torch.device("cpu"))
        tokens, num_real = loaded.tokens(rows), sum(row.num_new for row in rows)
        outputs = [attend(loaded.cache(rows, tokens), rows, tokens, backend)]
        padded = support.padded_batch_of(rows, 24, 8, 6, 1)
        new = [torch.cat((part, part[:1].expand(24 - num_real, -1, -1))) for part in tokens.new_parts(rows)]
        outputs.append(
            backend.prepare_padded(padded, loaded.cache(rows, tokens).blocks[0])(LAYER, Projections(*new))[:num_real]
        )
    num_given = len(DECODE) if is_given else 0
    parts = [support.new_parts(support.reference(tokens, layers), rows) for layers in (other, PLAIN)]
    for output in outputs:
        support.assert_near(output, torch.cat((parts[0][:num_given], parts[1][num_given:])))


@pytest.mark.parametrize(("rows", "num_splits"), [(DECODE, 1), (LONG[:4], 0)], ids=["a page", "more"])
def test_version_2_splits_the_keys_of_no_single_page(rows: list[Row], num_splits: int) -> None:
    calls: list[int] = []

    def note(query: torch.Tensor, *_: object, num_splits: int, **__: object) -> torch.Tensor:
        calls.append(num_splits)
        return query

    functions = {"flash_attn_with_kvcache": note, "flash_attn_varlen_func": note}
    with flash_attn_reference.module("flash_attn", functions):
        loaded = Loaded("flash_attn", torch.device("cpu"))
        loaded.attend(rows, loaded.tokens(rows))
    assert calls == [num_splits]


@pytest.mark.parametrize("loaded", RECORDABLE, indirect=True)
@pytest.mark.parametrize("window", [None, 7])
def test_of_a_batch_that_decodes_the_host_s_numbers_are_not_looked_at(loaded: Loaded, window: int | None) -> None:
    """A CUDA graph is captured with one batch's numbers and replayed with another's."""
    loaded = replace(loaded, layers=support.layers(0.125, (None, None, window)))
    tokens = loaded.tokens(DECODE)
    (collection,) = loaded.cache(DECODE, tokens).fetch([row.slot for row in DECODE])
    batch = replace(loaded.batch(DECODE), slots=(0,) * len(DECODE), num_cached_tokens=(0,) * len(DECODE))
    attend_layer = loaded.backend.prepare(batch, replace(collection, max_cache_length=256))
    assert_near_reference(attend_layer(LAYER, Projections(*tokens.new_parts(DECODE))), tokens, DECODE, loaded.layers)


CAN_PAD = [case for case in RECORDABLE if "torch_copied" not in str(case.id)]
WITH_SHORT_PROMPT = [*support.DECODE, *support.PREFILL, Row(6, 14, 1)]


@pytest.mark.parametrize("loaded", CAN_PAD, indirect=True)
@pytest.mark.parametrize(("num_decode", "num_prompts"), [(4, 4), (16, 9)], ids=["tight", "roomy"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [DECODE, PREFILL, WITH_SHORT_PROMPT], ids=["decode", "prefill", "mixed"])
def test_a_padded_step_gives_its_rows_what_they_get_alone(
    loaded: Loaded, rows: list[Row], window: int | None, num_decode: int, num_prompts: int
) -> None:
    """More tokens than those of the decode rows have a row among these, and more rows than there are prompts."""
    loaded = replace(loaded, layers=support.layers(0.125, (None, None, window)))
    tokens, scratch = loaded.tokens(rows), 1
    backend, manager = loaded.backend, loaded.cache(rows, tokens)
    blocks, num_real = manager.blocks[0], sum(row.num_new for row in rows)
    assert isinstance(backend, PaddingBackend)
    batch = support.padded_batch_of(rows, 24, num_decode, num_prompts, scratch, loaded.device)
    parts = [torch.cat((part, part[:1].expand(24 - num_real, -1, -1))) for part in tokens.new_parts(rows)]
    before = blocks.clone()
    sinks = None if loaded.name == "torch_varlen" else torch.linspace(-2.0, 3.0, 4, device=loaded.device)
    output = backend.prepare_padded(batch, blocks)(LAYER, Projections(parts[0], parts[1], parts[2], sinks))
    assert output.isfinite().all()
    wanted = support.new_parts(support.reference(tokens, loaded.layers, sinks), rows)
    support.assert_near(output[:num_real], wanted)
    written = (blocks != before).flatten(2).any(dim=2).any(dim=1).nonzero().flatten().tolist()
    assert written == sorted({*(row.slot for row in rows), *([scratch] if num_real < 24 else [])})


@in_every_phase
@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU[name]) for name in ON_GPU])
@needs_gpu
def test_nothing_waits_for_the_device(name: str, rows: list[Row]) -> None:
    loaded = Loaded(name, torch.device("cuda"))
    tokens = loaded.tokens(rows)
    inputs = loaded.cache(rows, tokens).fetch([row.slot for row in rows], [row.num_new for row in rows])
    batch, parts = loaded.batch(rows), tokens.new_parts(rows)
    with no_waiting():
        output = loaded.backend.prepare(batch, inputs[0])(LAYER, Projections(*parts))
    assert_near_reference(output, tokens, rows)


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU[name]) for name in ON_GPU])
@needs_gpu
def test_a_captured_decode_step_serves_other_slots_and_lengths(name: str) -> None:
    loaded = Loaded(name, torch.device("cuda"))
    others = [Row(31, 200, 1), Row(4, 1, 1), Row(9, 77, 1), Row(20, 0, 1)]
    tokens = loaded.tokens([*DECODE, *others])
    manager = loaded.cache([*DECODE, *others], tokens)
    slots = [row.slot for row in DECODE]
    (collection,) = manager.fetch(slots)
    collection = replace(collection, max_cache_length=256)
    batch = loaded.batch(DECODE)
    places = tokens.rows([0, 1, 2, 3]).new_parts(DECODE)
    new = Projections(*places)
    loaded.backend.prepare(batch, collection)(LAYER, new)  # libraries initialise at their first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = loaded.backend.prepare(batch, collection)(LAYER, new)
    collection.lookup_table.copy_(torch.tensor([row.slot for row in others]))
    collection.cache_lengths.copy_(torch.tensor([row.num_cached for row in others]))
    batch.positions.copy_(torch.tensor([row.num_cached for row in others]))
    theirs = tokens.rows([4, 5, 6, 7])
    for place, part in zip(places, theirs.new_parts(others), strict=True):
        place.copy_(part)
    graph.replay()
    assert_near_reference(output, theirs, others)


@pytest.mark.parametrize(
    ("longest", "seen"), [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (1025, 1280), (1280, 1280)]
)
def test_a_decode_step_looks_at_few_different_lengths(longest: int, seen: int) -> None:
    cache = ContinuousBatchingKVCacheManager(KVCacheParams(torch.bfloat16, 1, 8), 1, 1280, 1, ["cpu"])
    (collection,) = cache.fetch(cache.claim(1), [longest])
    assert view_length(collection) == seen


# In torch


SPECIAL = {
    "window": support.layers(0.2, (None, None, 7)),
    "window of one": support.layers(0.25, (None, None, 1)),
    "wide window": support.layers(0.25, (None, None, 4000)),
    "soft cap": support.layers(0.25, softcap=0.7),
    "window and soft cap": support.layers(0.3, (3, None, 12), 0.7),
}


@pytest.mark.parametrize("layers", SPECIAL.values(), ids=SPECIAL.keys())
def test_tokens_that_attend_alone_obey_them_too(layers: support.Layers) -> None:
    rows = MIXED
    tokens = support.random_tokens(rows)
    manager = make_cache(rows, tokens, background=POISON)
    (collection,) = manager.fetch([row.slot for row in rows], [row.num_new for row in rows])
    batch = support.batch_of(rows)
    attend_layer = attend_alone(layers, token_slots(batch, collection), batch.positions, collection)
    assert_near_reference(attend_layer(LAYER, Projections(*tokens.new_parts(rows))), tokens, rows, layers)


class _Reads(TorchFunctionMode):
    """Counts the keys that attention's products look at."""

    num_keys = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.num_keys += args[1].shape[-2]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_decode_step_reads_no_more_than_the_window(is_in_place: bool) -> None:
    layers = support.layers(0.25, (None, None, 9))
    for num_cached in (20, 200, 2000):
        rows = [Row(3, num_cached, 1)]
        tokens = support.random_tokens(rows)
        with _Reads() as reads:
            attend(make_cache(rows, tokens, num_slots=4), rows, tokens, TorchBackend(layers, is_in_place=is_in_place))
        assert reads.num_keys == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_every_batch
def test_one_device_or_two_with_half_of_the_heads_equal_padded_copies(rows: list[Row], dtype: torch.dtype) -> None:
    tokens = support.random_tokens(rows, heads=8, kv_heads=4, dtype=dtype)
    for n_devices in (1, 2):
        together = attend(make_cache(rows, tokens, n_devices=n_devices), rows, tokens)
        assert (together.shape[1], together.dtype) == (8, dtype)
        assert_near_reference(together, tokens, rows)
